# SPDX-License-Identifier: Apache-2.0
"""Constraints compiled: what llguidance needs to say which tokens may follow, kept for the next request."""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mockengine.replies.structured import lark
from mockengine.replies.structured.constraint import Constraint, ConstraintError, Kind
from mockengine.replies.structured.schema import (
    any_object,
    narrow,
    without_additional_properties,
    without_unknown_formats,
)
from mockengine.replies.structured.tags import TagGrammar
from mockengine.replies.tokenizer import Tokenizer, load_llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAIN: Final = "reply"
_MOST_REPEATED: Final = 2_000
_MOST_KEPT: Final = 32
_LIMITS: Final = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    # Up to 2 kB each, and as many grammars as are kept may reach it.
    "max_lexer_states": 5_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Where in the generated grammar, which its client never saw.
_PLACE: Final = re.compile(r"^(?:at )?[0-9]+\([0-9]+\): ")
_SHOWN_CHARACTERS: Final = 300


class Grammars:
    """Compiles constraints for one tokenizer, and keeps the last ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, LLMatcher | ConstraintError] = OrderedDict()

    def matcher(self, constraint: Constraint, *, anew: bool = False) -> "LLMatcher":
        """Return a matcher at the beginning of a reply.

        Args:
            constraint: what it is for.
            anew: compile even what is kept, since it grows while it is used, up to a limit.

        Raises:
            ConstraintError: the constraint is wrong, cannot be satisfied, is too large or not supported.

        """
        identity = json.dumps([constraint.kind, constraint.value, constraint.whitespace_pattern, *_flags(constraint)])
        kept = self._kept.pop(identity, None)
        if kept is None or anew:
            kept = self._compiled(constraint)
        self._kept[identity] = kept
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        if isinstance(kept, ConstraintError):
            # Each with a traceback of its own.
            raise ConstraintError(str(kept))
        return kept.deep_copy()

    def _compiled(self, constraint: Constraint) -> "LLMatcher | ConstraintError":
        """Compile the first form of the constraint that can be; what is wrong with the last is what is wrong."""
        failure = ConstraintError(f"{constraint.kind} cannot be compiled")
        try:
            for grammar in _grammars(constraint, self._tokenizer):
                matcher = self._compile(grammar)
                if not matcher.is_error():
                    return matcher
                failure = ConstraintError(f"{constraint.kind}: {_reason(matcher.get_error())}")
        except ConstraintError as error:
            failure = error
        return failure

    def _compile(self, grammar: str) -> "LLMatcher":
        llguidance = load_llguidance()
        matcher: LLMatcher = llguidance.LLMatcher(
            self._tokenizer.masks, grammar, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS)
        )
        return matcher


def _flags(constraint: Constraint) -> tuple[bool, bool]:
    return constraint.no_additional_properties, constraint.compact


def _reason(error: str) -> str:
    """Return what of llguidance's message is about the client's text."""
    lines = _PLACE.sub("", error.replace("<non-verbose/>", "")).splitlines()
    # It goes on with the lines of the grammar, numbered.
    told = [line.strip() for line in lines if not re.match(r" +[0-9]+ \| | +\^$", line)]
    return " ".join(filter(None, told))[:_SHOWN_CHARACTERS]


def _grammars(constraint: Constraint, tokenizer: Tokenizer) -> Iterator[str]:
    """Make the grammars to try: one of few and short replies, then one of all of them, where they differ."""
    value = constraint.value
    if constraint.kind is Kind.JSON:
        _check_repetitions(value)
        # What is added to a schema may contradict it in ways that are not foreseen.
        yield _whole(_json(narrow(value), constraint))
        yield _whole(_json(value, constraint))
    elif constraint.kind is Kind.JSON_OBJECT:
        yield _whole(_json(any_object(), constraint))
    elif constraint.kind is Kind.REGEX:
        yield _whole(lark.regex(value))
    elif constraint.kind is Kind.CHOICE:
        yield _whole(lark.either(value, tokenizer))
    elif constraint.kind is Kind.GRAMMAR:
        yield _serialized({_MAIN: lark.grammar(value)})
    else:
        _check_repetitions(value)
        for narrowed in (True, False):
            tags = TagGrammar(tokenizer, partial(_json_part, constraint=constraint, narrowed=narrowed))
            expression = tags.expression(value)
            yield _serialized({_MAIN: f"start: {expression}", **tags.grammars})


def _json_part(schema: Any, *, constraint: Constraint, narrowed: bool) -> str:
    return _json(narrow(schema) if narrowed else schema, constraint)


def _check_repetitions(schema: Any) -> None:
    """Refuse what repeats so often that no reply could hold it, or that each token would take long.

    Raises:
        ConstraintError: some keyword of the schema, or of one within it, does.

    """
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(pattern := node.get("pattern"), str):
                lark.check_unfolded(pattern, "pattern")
            for keyword in ("minLength", "minItems", "minProperties"):
                if isinstance(least := node.get(keyword), (int, float)) and least > _MOST_REPEATED:
                    raise ConstraintError(f"{keyword} is {least}; a reply holds {_MOST_REPEATED} at most")
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _json(schema: Any, constraint: Constraint) -> str:
    """Return the expression of JSON documents of a schema."""
    if constraint.no_additional_properties:
        schema = without_additional_properties(schema)
    schema = without_unknown_formats(schema)
    if schema is False:
        raise ConstraintError("json: a schema that is false allows nothing")
    style: dict[str, Any] = {"whitespace_flexible": False}
    if constraint.whitespace_pattern is not None:
        lark.check_unfolded(constraint.whitespace_pattern, "whitespace_pattern")
        style = {"whitespace_pattern": constraint.whitespace_pattern}
    elif not constraint.compact:
        style |= {"item_separator": ", ", "key_separator": ": "}
    whole = {} if schema is True else schema
    return f"%json {json.dumps({**whole, 'x-guidance': style})}"


def _whole(expression: str) -> str:
    return _serialized({_MAIN: f"start: {expression}"})


def _serialized(grammars: dict[str, str]) -> str:
    """Return grammars in llguidance's form: the first is the one to begin with, and refers to the others by name."""
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in grammars.items()]})
