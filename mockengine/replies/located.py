# SPDX-License-Identifier: Apache-2.0
"""Values out of a file, with the line of each, and how JSON Lines are read; `yaml_values` does it for YAML.

What the values mean is no business of either.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Place: TypeAlias = tuple[str | int, ...]
"""Names and numbers that lead to a value."""

# Python reads numbers of some more, and no longer ones.
_MOST_DIGITS: Final = 4_000


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is wrong with a file.

    Attributes:
        line: where, from 1 on.
        text: what.

    """

    line: int
    text: str


@dataclass(slots=True)
class Located:
    """A value out of a file.

    Attributes:
        value: mappings, lists, texts, numbers, true, false and None.
        lines: those of its parts, as far as they have one of their own.

    """

    value: object = None
    lines: dict[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """Return the line of a part, or of the nearest thing around it."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def text_of(data: bytes, problems: list[Problem]) -> str | None:
    """Return what a file says in UTF-8, with or without a byte order mark; None where it is something else."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Of a file with a byte order mark this is what comes after it.
        seen = error.object
        line = seen.count(b"\n", 0, error.start) + 1
        problems.append(Problem(line, f"byte {seen[error.start]:#04x} is no UTF-8 (save the file as UTF-8)"))
        return None


def check_characters(text: str) -> None:
    """Refuse a text that cannot be sent; raises `ValueError`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{half} is half a character (write both halves, or the character itself)") from None


def read_json_lines(text: str, problems: list[Problem]) -> Located:
    """Read a list of values, one on each line that is not empty; lines that are no JSON are problems."""
    values: list[object] = []
    found = Located(values)
    # Not splitlines: a text in JSON may hold characters that Unicode takes for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value: object = json.loads(
                line, parse_int=_whole, parse_constant=_refuse_constant, object_pairs_hook=_without_twins
            )
            # Only an escape can say half a character.
            if "\\u" in line:
                check_characters(json.dumps(value, ensure_ascii=False))
        except RecursionError:
            problems.append(Problem(number, "it is nested too deep"))
        except json.JSONDecodeError as error:
            problems.append(Problem(number, f"not JSON: {error.msg}, column {error.colno}"))
        except ValueError as error:
            problems.append(Problem(number, str(error)))
        else:
            found.lines[len(values),] = number
            values.append(value)
    return found


def _whole(text: str) -> int | float:
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _without_twins(pairs: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:60]}: it is there twice")
        found[name] = value
    return found
