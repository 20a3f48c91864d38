# SPDX-License-Identifier: Apache-2.0
"""Values out of a file in YAML, with the line of each.

YAML is read as its core is understood today, not as in 1.1: `no`, `12:30` and `2024-05-01` are texts. All names are
texts. Anchors, aliases and tags are refused: nobody needs them here, and a few lines of aliases can stand for a world.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from mockengine.replies.located import Located, Place, Problem, check_characters

MOST_DEPTH: Final = 64

_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE: Final = re.compile("[-+]?[0-9]{1,4000}")
_FRACTION: Final = re.compile(r"[-+]?(?:\.[0-9]{1,40}|[0-9]{1,40}(?:\.[0-9]{0,40})?)(?:[eE][-+]?[0-9]{1,3})?")
# libyaml's reads some 30 times as fast.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, problems: list[Problem]) -> Located | None:
    """Read the one document of a YAML file; None where it is no YAML, which is a problem too."""
    reader = _YamlReader(problems)
    try:
        return reader.read(yaml.parse(text, Loader=_LOADER))
    except _TooDeepError as error:
        problems.append(Problem(error.line, f"it is nested more than {MOST_DEPTH} deep"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problems.append(Problem(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}"))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.append(Problem(line, f"not YAML: the character {error.character:#x} is not allowed"))
    except yaml.YAMLError as error:
        problems.append(Problem(1, f"not YAML: {error}"))
    return None


class _TooDeepError(Exception):
    def __init__(self, line: int) -> None:
        self.line = line


class _YamlReader:
    """Makes values out of the events of PyYAML, which come one by one, so that nothing unfolds behind its back."""

    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems
        self._found = Located()

    def read(self, events: Iterator[Any]) -> Located:
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                value = self._value(next(events), events, ())
                if documents == 1:
                    self._found.value = value
                else:
                    self._refuse(event, "a second document (keep all in one)")
        return self._found

    def _value(self, event: Any, events: Iterator[Any], place: Place) -> object:
        """Return the value that begins with this event."""
        line = _line(event)
        if len(place) > MOST_DEPTH:
            raise _TooDeepError(line)
        if place not in self._found.lines and (not place or line != self._found.line(place)):
            self._found.lines[place] = line
        if event.anchor is not None:
            is_alias = isinstance(event, yaml.AliasEvent)
            self._refuse(event, f"{'*' if is_alias else '&'}{event.anchor}: anchors are not allowed (write it out)")
        if isinstance(event, yaml.AliasEvent):
            return None
        self._check_tag(event)
        if isinstance(event, yaml.ScalarEvent):
            text = self._text(event)
            return _scalar(text) if event.implicit[0] else text
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(events, place)
        return self._mapping(events, place)

    def _sequence(self, events: Iterator[Any], place: Place) -> list[object]:
        items: list[object] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._value(event, events, (*place, len(items))))
        return items

    def _mapping(self, events: Iterator[Any], place: Place) -> dict[str, object]:
        items: dict[str, object] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None:
                self._refuse(event, "a name that is no plain text")
                self._value(event, events, (*place, ""))
                self._value(next(events), events, (*place, ""))
                continue
            self._check_tag(event)
            name = self._text(event)
            inner: Place = (*place, name)
            if name in items:
                self._refuse(event, f"{name}: it is there already, on line {self._found.line(inner)}")
                inner = (*place, "")
            else:
                self._found.lines[inner] = _line(event)
            value = self._value(next(events), events, inner)
            items.setdefault(name, value)
        return items

    def _check_tag(self, event: Any) -> None:
        implicit = event.implicit if isinstance(event.implicit, tuple) else (event.implicit,)
        if not any(implicit):
            self._refuse(event, f"{event.tag}: tags are not allowed")

    def _text(self, event: Any) -> str:
        """Return the text of a scalar, as it can be sent."""
        text = str(event.value)
        try:
            check_characters(text)
        except ValueError as error:
            self._refuse(event, str(error))
            return text.encode("utf-8", "replace").decode()
        return text

    def _refuse(self, event: Any, text: str) -> None:
        self._problems.append(Problem(_line(event), text))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _scalar(text: str) -> object:
    """Return what a text stands for that is not in quotes."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FRACTION.fullmatch(text) else text
