# SPDX-License-Identifier: Apache-2.0
"""The file of a script: from YAML or JSON Lines to rules, or to all that is wrong with them, line by line.

What one value may look like is in `script_keys`; here is what may stand where, and what goes with what.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from mockengine.replies.asked import ReplyError
from mockengine.replies.located import Located, Place, Problem, read_json_lines, text_of
from mockengine.replies.reply_keys import Readers, contradictions, wish_of
from mockengine.replies.rules import Arguments, CallTemplate, Conditions, Reply, Rule
from mockengine.replies.script_keys import CONDITIONS, OF_TEXT, REPLY, condition_readers, reply_readers
from mockengine.replies.steered import MOST_TEXT_BYTES, expected, printable, read_tool_calls
from mockengine.replies.template import Groups, Template
from mockengine.replies.wish import ToolCall, Wish

MOST_BYTES: Final = 2**20
"""Of a file: up to a second, in which nothing else goes on when it is read again."""

_MOST_PROBLEMS: Final = 100
_LINE_SUFFIXES: Final = (".jsonl", ".ndjson")
_NO_TOKENIZER: Final = "text takes a tokenizer (set tokenizer to the folder of the frontend's model)"
_FILLED_IN: Final = frozenset({"template", "reasoning", "tool_calls"})
_SAYING: Final = _FILLED_IN | {"text", "token_ids"}
_REGEXES: Final = ("prompt_regex", "last_message_regex")

T = TypeVar("T")


class ScriptError(Exception):
    """A script that cannot be used; `problems` has a line for each reason, with file and line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"the file has {count}:", *problems]))


_RULE: Final = ("match", "reply", "replies", "in_order")


@dataclass(frozen=True, slots=True)
class ScriptFile:
    """Where a script is, and what it may ask for.

    Attributes:
        path: of the file: JSON Lines if its name ends so, else YAML.
        vocab_size: token ids of replies lie below it.
        has_tokenizer: whether text can be looked at and said.

    """

    path: Path
    vocab_size: int
    has_tokenizer: bool

    def rules(self, data: bytes) -> Sequence[Rule]:
        """Return the rules that the file holds.

        Raises:
            ScriptError: anything is wrong with them.

        """
        problems: list[Problem] = []
        text = text_of(data, problems)
        located = None if text is None else self._located(text, problems)
        rules: list[Rule] = []
        if located is not None:
            rules = _Reader(self, located, problems).rules()
        if problems:
            raise self.error(problems)
        return rules

    def error(self, problems: Sequence[Problem]) -> ScriptError:
        """Return the error for these problems, in the order of the file."""
        said = [f"{self.path}:{each.line}: {each.text}" for each in sorted(problems)[:_MOST_PROBLEMS]]
        more = len(problems) - len(said)
        return ScriptError([*said, f"and {more} more"] if more else said)

    def _located(self, text: str, problems: list[Problem]) -> Located | None:
        if self.path.suffix.lower() in _LINE_SUFFIXES:
            return read_json_lines(text, problems)
        from mockengine.replies.yaml_values import read_yaml  # noqa: PLC0415 - most processes read no YAML

        return read_yaml(text, problems)


class _Reader:
    """Reads rules and notes what is wrong with them."""

    def __init__(self, file: ScriptFile, located: Located, problems: list[Problem]) -> None:
        self._file = file
        self._located = located
        self._problems = problems
        self._lacks_tokenizer = not file.has_tokenizer
        self._conditions = condition_readers()
        self._reply = reply_readers(file.vocab_size)

    def rules(self) -> list[Rule]:
        found = self._located.value
        place: Place = ()
        if isinstance(found, dict):
            for name in found.keys() - {"rules"}:
                self._refuse((name,), f"{printable(name)}: unknown (allowed is rules, or a list of rules alone)")
            found, place = found.get("rules"), ("rules",)
        if not isinstance(found, list):
            self._refuse(place, "there are no rules (write a list of them, if only [])")
            return []
        rules = [self._rule(item, (*place, number)) for number, item in enumerate(found)]
        if not found and self._file.path.suffix.lower() in _LINE_SUFFIXES and not self._problems:
            self._refuse((), "there are no rules (write one on each line, or unset reply_script)")
        return [rule for rule in rules if rule is not None]

    def _rule(self, item: object, place: Place) -> Rule | None:
        fields = self._fields(item, place, _RULE, "a rule")
        if fields is None:
            return None
        inner = (*place, "match")
        match = self._fields(fields.get("match", {}), inner, [key.name for key in CONDITIONS], "conditions") or {}
        values = self._values(match, inner, self._conditions)
        replies = self._replies(fields, place, self._groups(match, values, inner))
        in_order = fields.get("in_order", False)
        if not isinstance(in_order, bool):
            self._refuse((*place, "in_order"), f"in_order: {expected(in_order, 'true or false')}")
        elif in_order and "replies" not in fields:
            self._refuse((*place, "in_order"), "in_order: there is one reply (write replies)")
        return Rule(
            line=self._located.line(place),
            conditions=Conditions(**values),
            replies=replies,
            in_order=in_order is True,
        )

    def _groups(self, match: Mapping[str, object], values: Mapping[str, Any], place: Place) -> Groups | None:
        """Return the groups of the regexes; None is not to know, because of one that is none."""
        if not all(name in values for name in _REGEXES if name in match):
            return None
        try:
            return Groups.of([values[name] for name in _REGEXES if name in values])
        except ValueError as error:
            self._refuse(place, str(error))
            return None

    def _replies(self, fields: Mapping[str, object], place: Place, groups: Groups | None) -> list[Reply]:
        if ("reply" in fields) == ("replies" in fields):
            has = "both reply and replies" if "reply" in fields else "no reply"
            self._refuse(place, f"the rule has {has} (give it reply, or replies)")
            return []
        if "reply" in fields:
            return [self._one_reply(fields["reply"], (*place, "reply"), groups, weighs=False)]
        found = fields["replies"]
        if not isinstance(found, list) or not found:
            self._refuse((*place, "replies"), f"replies: {expected(found, 'a list of replies')}")
            return []
        each = enumerate(found)
        return [self._one_reply(item, (*place, "replies", number), groups, weighs=True) for number, item in each]

    def _one_reply(self, item: object, place: Place, groups: Groups | None, *, weighs: bool) -> Reply:
        names = [key.name for key in REPLY if weighs or key.name != "weight"]
        fields = self._fields(item, place, names, "a reply") or {}
        values = self._values(fields, place, self._reply)
        if "tool_calls" in fields:
            values["tool_calls"] = self._tool_calls(fields["tool_calls"], (*place, "tool_calls"))
        for (name, *_), problem in contradictions(fields, values):
            self._refuse((*place, name), f"{name}: {problem}")
        if "text" in fields and "template" in fields:
            self._refuse((*place, "template"), "template: it is said instead of text")
        return self._templated(values, place, groups)

    # Templates.

    def _templated(self, values: Mapping[str, Any], place: Place, groups: Groups | None) -> Reply:
        """Return a reply, with what is the same for every request filled in already."""
        text = self._template("template", values.get("template"), (*place, "template"), groups)
        reasoning = self._template("reasoning", values.get("reasoning"), (*place, "reasoning"), groups)
        calls = None
        if values.get("tool_calls") is not None:
            calls = [
                CallTemplate(name=call.name, arguments=self._arguments(call.arguments, inner, groups))
                for inner, call in values["tool_calls"]
            ]
        reply = Reply(
            wish=_wish_of(values),
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            weight=values.get("weight", 1.0),
        )
        parts = [each for each in (text, reasoning) if each is not None]
        if all(part.is_fixed for part in parts) and all(_is_fixed(call.arguments) for call in calls or ()):
            try:
                return Reply(wish=reply.wish_for(()), weight=reply.weight)
            except ReplyError:
                self._refuse(place, f"all that is said together has more than {MOST_TEXT_BYTES} bytes")
        return reply

    def _template(self, label: str, text: str | None, place: Place, groups: Groups | None) -> Template | None:
        if text is None or groups is None:
            return None
        try:
            return Template.read(text, groups)
        except ValueError as error:
            self._refuse(place, f"{label}: {error}")
            return None

    def _arguments(self, value: Any, place: Place, groups: Groups | None) -> Any:
        if isinstance(value, str):
            return self._template("arguments", value, place, groups)
        if isinstance(value, dict):
            return {name: self._arguments(item, (*place, name), groups) for name, item in value.items()}
        if isinstance(value, list):
            return [self._arguments(item, (*place, number), groups) for number, item in enumerate(value)]
        return value

    def _tool_calls(self, value: object, place: Place) -> list[tuple[Place, ToolCall]] | None:
        """Return calls with the places of their arguments."""
        if not isinstance(value, list) or not value:
            self._refuse(place, f"tool_calls: {expected(value, 'a list of objects with name and arguments')}")
            return None
        calls: list[tuple[Place, ToolCall]] = []
        for number, item in enumerate(value):
            found = self._read((*place, number), f"tool_calls[{number}]", item, lambda one: read_tool_calls([one]))
            calls += [((*place, number, "arguments"), call) for call in found or ()]
        if len(calls) == len(value) and self._read(place, "tool_calls", value, read_tool_calls) is None:
            return None
        return calls

    # Values.

    def _fields(self, item: object, place: Place, known: Sequence[str], what: str) -> dict[str, object] | None:
        """Return the parts of a mapping that are known."""
        if not isinstance(item, dict):
            self._refuse(place, f"{expected(item, f'{what}, a mapping,')}")
            return None
        for name in item.keys() - set(known):
            self._refuse((*place, name), f"{printable(name)}: unknown (allowed are {', '.join(known)})")
        return {name: value for name, value in item.items() if name in known}

    def _values(self, fields: Mapping[str, object], place: Place, readers: Readers) -> dict[str, Any]:
        """Return the values that are in order, of those that there is a reader for."""
        values: dict[str, Any] = {}
        for name, item in fields.items():
            if name in OF_TEXT and self._lacks_tokenizer:
                # Once is enough: it is not the file that is to be mended.
                self._lacks_tokenizer = False
                self._refuse((*place, name), f"{name}: {_NO_TOKENIZER}")
            if name in readers:
                value = self._read((*place, name), name, item, readers[name])
                if value is not None:
                    values[name] = value
        return values

    def _read(self, place: Place, label: str, value: object, read: Callable[[object], T]) -> T | None:
        try:
            return read(value)
        except ValueError as error:
            self._refuse(place, f"{label}: {error}")
            return None

    def _refuse(self, place: Place, text: str) -> None:
        self._problems.append(Problem(self._located.line(place), text))


def _wish_of(values: Mapping[str, Any]) -> Wish:
    """Return the wish for what a reply has, but for what is filled in."""
    known = {name: value for name, value in values.items() if name not in _FILLED_IN}
    return wish_of(known, says_something=not values.keys().isdisjoint(_SAYING))


def _is_fixed(value: Arguments) -> bool:
    if isinstance(value, Template):
        return value.is_fixed
    if isinstance(value, Mapping):
        return all(map(_is_fixed, value.values()))
    return not isinstance(value, list) or all(map(_is_fixed, value))
