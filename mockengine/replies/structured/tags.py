# SPDX-License-Identifier: Apache-2.0
"""Structural tags as grammars: text with parts of it constrained, which is how frontends ask for tool calls.

Both forms are read: the older one of structures and triggers, and the newer one, a tree of formats. Free text, and how
often a part repeats, is narrowed here, so that a reply ends.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from mockengine.replies.structured import lark
from mockengine.replies.structured.constraint import ConstraintError
from mockengine.replies.structured.schema import any_object
from mockengine.replies.tokenizer import Tokenizer

_MOST_REPEATS: Final = 3
_MOST_WORDS: Final = 24
_WORDS_ONLY: Final = re.compile("[A-Za-z ]*")
_TEXT: Final = "/[A-Za-z]{1,16}( [A-Za-z]{1,16}){0,%d}/"


class TagGrammar:
    """Writes one structural tag as an expression.

    Attributes:
        grammars: grammars that the expression refers to, by name.

    """

    def __init__(self, tokenizer: Tokenizer, json_expression: Callable[[Any], str]) -> None:
        """Take what turns a schema into an expression, since how JSON looks is the constraint's."""
        self.grammars: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._json = json_expression

    def expression(self, tag: Mapping[str, Any]) -> str:
        """Return the expression of a whole structural tag.

        Raises:
            ConstraintError: a format that is unknown, or lacks something.

        """
        if "structures" in tag:
            return self._format(_newer_form(tag), "structural_tag")
        if not isinstance(tag.get("format"), dict):
            raise ConstraintError("structural_tag has neither a format nor structures and triggers")
        return self._format(tag["format"], "format")

    def _format(self, form: Any, place: str) -> str:
        if not isinstance(form, dict):
            raise ConstraintError(f"structural_tag: {place} is not an object")
        kind = form.get("type")
        write = self._formats.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise ConstraintError(
                f"structural_tag: {place} has the type {kind!r}; known are {', '.join(self._formats)}"
            )
        return write(self, form, place)

    def _const_string(self, form: Mapping[str, Any], place: str) -> str:
        return lark.literal(_string(form, "value", place), self._tokenizer)

    def _json_schema(self, form: Mapping[str, Any], place: str) -> str:
        schema, style = form.get("json_schema"), form.get("style", "json")
        if style != "json":
            raise ConstraintError(f"structural_tag: {place} has the style {style!r}; only json is written here")
        if not isinstance(schema, (dict, bool)):
            raise ConstraintError(f"structural_tag: {place} has no json_schema")
        return self._json(any_object() if schema is True else schema)

    def _regex(self, form: Mapping[str, Any], place: str) -> str:
        return lark.regex(_string(form, "pattern", place))

    def _grammar(self, form: Mapping[str, Any], place: str) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars[name] = lark.grammar(_string(form, "grammar", place))
        return f"@{name}"

    def _any_text(self, form: Mapping[str, Any], _place: str) -> str:
        limits = [limit for limit in (form.get("max_tokens"), form.get("max_chars")) if limit is not None]
        if limits and not all(isinstance(limit, int) and limit > _MOST_WORDS * 17 for limit in limits):
            return '""'
        return _text_without(_strings(form, "excludes"))

    def _token(self, form: Mapping[str, Any], place: str) -> str:
        token = form.get("token")
        if isinstance(token, str):
            return lark.literal(token, self._tokenizer)
        if not isinstance(token, int) or not 0 <= token < self._tokenizer.vocab_size:
            raise ConstraintError(f"structural_tag: {place} has the token {token!r}, which the tokenizer has not")
        return f"<[{token}]>"

    def _sequence(self, form: Mapping[str, Any], place: str) -> str:
        return "(" + " ".join(self._elements(form, "elements", place)) + ")"

    def _alternatives(self, form: Mapping[str, Any], place: str) -> str:
        return "(" + " | ".join(self._elements(form, "elements", place)) + ")"

    def _optional(self, form: Mapping[str, Any], place: str) -> str:
        return f"({self._content(form, place)})?"

    def _plus(self, form: Mapping[str, Any], place: str) -> str:
        return f"({self._content(form, place)}){{1,{_MOST_REPEATS}}}"

    def _star(self, form: Mapping[str, Any], place: str) -> str:
        return f"({self._content(form, place)}){{0,{_MOST_REPEATS}}}"

    def _repeat(self, form: Mapping[str, Any], place: str) -> str:
        least, most = form.get("min"), form.get("max")
        if type(least) is not int or type(most) is not int or least < 0 or (most < least and most != -1):
            raise ConstraintError(f"structural_tag: {place} repeats {least!r} to {most!r} times")
        most = max(least, _MOST_REPEATS if most == -1 else min(most, _MOST_REPEATS))
        content = self._content(form, place)
        lark.check_unfolded(f"({content}){{{most}}}", "structural_tag")
        return f"({content}){{{least},{most}}}"

    def _tag(self, form: Mapping[str, Any], place: str) -> str:
        end = form.get("end")
        ends = end if isinstance(end, list) and end else [end]
        written = " | ".join(self._delimiter(one, f"{place}.end") for one in ends)
        return f"({self._delimiter(form.get('begin'), f'{place}.begin')} {self._content(form, place)} ({written}))"

    def _triggered_tags(self, form: Mapping[str, Any], place: str) -> str:
        text = _text_without(_strings(form, "triggers") + _strings(form, "excludes"))
        return self._among_text(form, text, place)

    def _token_triggered_tags(self, form: Mapping[str, Any], place: str) -> str:
        return self._among_text(form, _text_without([]), place)

    def _tags_with_separator(self, form: Mapping[str, Any], place: str) -> str:
        tags = self._tags(form, place)
        more = f"({lark.literal(_string(form, 'separator', place), self._tokenizer)} {tags})"
        written = tags if form.get("stop_after_first") else f"{tags} {more}{{0,{_MOST_REPEATS - 1}}}"
        return f"({written})" if form.get("at_least_one") else f"({written})?"

    def _dispatch(self, form: Mapping[str, Any], place: str) -> str:
        rules = form.get("rules")
        if not isinstance(rules, list) or not all(_is_rule(rule) for rule in rules):
            raise ConstraintError(f"structural_tag: {place} has no rules of a pattern and a format")
        tags = [{"type": "tag", "begin": pattern, "content": content, "end": ""} for pattern, content in rules]
        text = _text_without([pattern for pattern, _ in rules] + _strings(form, "excludes"))
        return self._among_text({"tags": tags, "stop_after_first": form.get("loop") is False}, text, place)

    def _among_text(self, form: Mapping[str, Any], text: str, place: str) -> str:
        """Write tags with text before and after them, or only text."""
        tags = self._tags(form, place)
        if form.get("at_least_one"):
            return tags if form.get("stop_after_first") else f"({tags} ({text})?)"
        if form.get("stop_after_first"):
            return f"(({text})? {tags} | {text})"
        return f"(({text} {tags}? | {tags}) ({text})?)"

    def _tags(self, form: Mapping[str, Any], place: str) -> str:
        tags = form.get("tags")
        if not isinstance(tags, list) or not tags:
            raise ConstraintError(f"structural_tag: {place} has no tags")
        # Tags of a list need not say that they are some.
        typed = [{"type": "tag", **tag} if isinstance(tag, dict) else tag for tag in tags]
        written = [self._format(tag, f"{place}.tags[{index}]") for index, tag in enumerate(typed)]
        return "(" + " | ".join(written) + ")"

    def _elements(self, form: Mapping[str, Any], key: str, place: str) -> list[str]:
        elements = form.get(key)
        if not isinstance(elements, list) or not elements:
            raise ConstraintError(f"structural_tag: {place} has no {key}")
        return [self._format(element, f"{place}.{key}[{index}]") for index, element in enumerate(elements)]

    def _content(self, form: Mapping[str, Any], place: str) -> str:
        return self._format(form.get("content"), f"{place}.content")

    def _delimiter(self, value: Any, place: str) -> str:
        if isinstance(value, dict):
            return self._token(value, place)
        if not isinstance(value, str):
            raise ConstraintError(f"structural_tag: {place} is not a string")
        return lark.literal(value, self._tokenizer)

    _formats: ClassVar[Mapping[str, Callable[["TagGrammar", Mapping[str, Any], str], str]]] = {
        "const_string": _const_string,
        "json_schema": _json_schema,
        "regex": _regex,
        "grammar": _grammar,
        "any_text": _any_text,
        "token": _token,
        "sequence": _sequence,
        "or": _alternatives,
        "optional": _optional,
        "plus": _plus,
        "star": _star,
        "repeat": _repeat,
        "tag": _tag,
        "triggered_tags": _triggered_tags,
        "token_triggered_tags": _token_triggered_tags,
        "tags_with_separator": _tags_with_separator,
        "dispatch": _dispatch,
    }


def _newer_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Turn structures and triggers into the format that means the same."""
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(structure, dict) for structure in structures):
        raise ConstraintError("structural_tag: structures is not a list of objects")
    tags = [
        {
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
            "end": structure.get("end"),
        }
        for structure in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _is_rule(rule: Any) -> bool:
    return isinstance(rule, (list, tuple)) and len(rule) == len(("pattern", "format")) and isinstance(rule[0], str)


def _string(form: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(value := form.get(key), str):
        raise ConstraintError(f"structural_tag: {place} has no {key}")
    return value


def _strings(form: Mapping[str, Any], key: str) -> list[str]:
    value = form.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConstraintError(f"structural_tag: {key} is not a list of strings")
    return value


def _text_without(excluded: Sequence[str]) -> str:
    """Return an expression for some words, or for no text if words could make up what is excluded."""
    return '""' if any(map(_WORDS_ONLY.fullmatch, excluded)) else _TEXT % (_MOST_WORDS - 1)
