# SPDX-License-Identifier: Apache-2.0
"""What a client constrains its reply to: the map `structured_outputs` of its sampling parameters, read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, Final

_MOST_CHARACTERS: Final = 100_000
_MOST_NODES: Final = 10_000
# llguidance reads JSON to a depth of 128, and the constraint is wrapped in some of it.
_MOST_DEPTH: Final = 64


class ConstraintError(ValueError):
    """A constraint that nothing can be written to; its text is for the client, who gets it as a `validation_error`."""


class Kind(StrEnum):
    """The kinds of constraints, by their keys in the map."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a reply must be.

    Attributes:
        kind: how `value` is meant.
        value: a schema for `json`; a list of strings for `choice`; true for `json_object`; the tag's map for
            `structural_tag`; text otherwise.
        whitespace_pattern: a regex of what may stand between the parts of JSON.
        no_additional_properties: objects have the properties that their schema names, and no others.
        compact: no space after `,` and `:` in JSON.

    """

    kind: Kind
    value: Any
    whitespace_pattern: str | None = None
    no_additional_properties: bool = False
    compact: bool = False


def read_constraint(structured_outputs: Mapping[str, object] | None) -> Constraint | None:
    """Read the map `structured_outputs` as either frontend sends it; None if nothing is constrained.

    Keys that are nil are as good as absent (the Python frontend sends all of them). `_backend` matters for the style of
    JSON under `disable_any_whitespace` alone: xgrammar wants `", "` and `": "` then, guidance wants no space.

    Raises:
        ConstraintError: several constraints, a value of the wrong type, one that is too large.

    """
    asked = structured_outputs or {}
    kinds = [kind for kind in Kind if asked.get(kind) is not None and (kind is not Kind.JSON_OBJECT or asked[kind])]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ConstraintError(f"structured_outputs has {' and '.join(kinds)}: only one constraint may be given")
    kind = kinds[0]
    value = _READERS[kind](asked[kind], kind)
    _check_size(value, kind)
    pattern = asked.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise ConstraintError("whitespace_pattern is not a string")
    return Constraint(
        kind=kind,
        value=value,
        whitespace_pattern=pattern,
        no_additional_properties=asked.get("disable_additional_properties") is True,
        compact=asked.get("disable_any_whitespace") is True and asked.get("_backend") == "guidance",
    )


def read_json(text: str, place: str) -> Any:
    """Parse JSON that a client sent as text.

    Raises:
        ConstraintError: not JSON, or nested too deeply.

    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"{place} is not valid JSON: {error}") from error


def _schema(value: object, place: str) -> object:
    schema = read_json(value, place) if isinstance(value, str) else value
    if not isinstance(schema, (dict, bool)):
        raise ConstraintError(f"{place} is not a JSON schema: it must be an object, true or false")
    return schema


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ConstraintError(f"{place} is not a string")
    return value


def _choice(value: object, place: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ConstraintError(f"{place} is not a list of strings with at least one of them")
    return list(value)


def _tag(value: object, place: str) -> dict[str, Any]:
    tag = read_json(value, place) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise ConstraintError(f"{place} is not an object")
    return tag


def _true(value: object, place: str) -> bool:
    if value is not True:
        raise ConstraintError(f"{place} is neither true nor false")
    return value


_READERS: Final = {
    Kind.JSON: _schema,
    Kind.JSON_OBJECT: _true,
    Kind.REGEX: _text,
    Kind.CHOICE: _choice,
    Kind.GRAMMAR: _text,
    Kind.STRUCTURAL_TAG: _tag,
}


def _check_size(value: object, place: str) -> None:
    """Refuse what would take long, or more stack than there is, to compile.

    Raises:
        ConstraintError: too long, too deep, too many parts, or no valid text.

    """
    nodes, characters = 0, 0
    waiting = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        nodes += 1
        if depth > _MOST_DEPTH:
            raise ConstraintError(f"{place} is nested more than {_MOST_DEPTH} deep")
        if isinstance(node, dict):
            if not all(isinstance(name, str) for name in node):
                raise ConstraintError(f"{place} has a name that is not a string")
            waiting += [(item, depth + 1) for pair in node.items() for item in pair]
        elif isinstance(node, list):
            waiting += [(item, depth + 1) for item in node]
        elif isinstance(node, str):
            characters += _length(node, place)
        elif isinstance(node, float) and not isfinite(node):
            raise ConstraintError(f"{place} has the number {node}, which JSON has not")
        elif not isinstance(node, (int, float, bool)) and node is not None:
            raise ConstraintError(f"{place} has a value of type {type(node).__name__}, which JSON has not")
        if nodes > _MOST_NODES or characters > _MOST_CHARACTERS:
            raise ConstraintError(
                f"{place} is too large: at most {_MOST_NODES} values and {_MOST_CHARACTERS} characters are compiled"
            )


def _length(text: str, place: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{place} has a lone surrogate, which no text has") from error
