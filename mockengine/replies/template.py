# SPDX-License-Identifier: Apache-2.0
"""Texts with places that what a regex has captured is filled into: `$1`, `${1}` or `${name}`; `$$` is a dollar.

A dollar before anything else is one too, so `$ 5` and `US$` need no care, but `$5` does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Captures: TypeAlias = Sequence[str]
"""What each group has captured, in the order of `Groups`; a group that took no part has captured nothing."""

_MOST_DIGITS: Final = 3
_PLACE: Final = re.compile(r"\$(?:(?P<dollar>\$)|(?P<number>[0-9]+)|\{(?P<name>[^{}$]*)\}|(?P<open>\{))")


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that may be named.

    Attributes:
        places: of each in the captures, by its name, which may be a number.

    """

    places: Mapping[str, int]

    @classmethod
    def of(cls, patterns: Sequence[re.Pattern[str]]) -> "Groups":
        """Return the groups of patterns, numbered one after the other; of one alone, 0 is all that it matches.

        Raises:
            ValueError: two groups have one name.

        """
        places: dict[str, int] = {}
        before = 0
        for pattern in patterns:
            first = 0 if len(patterns) == 1 else 1
            places |= {str(before + number): before + number for number in range(first, pattern.groups + 1)}
            twice = sorted(places.keys() & pattern.groupindex.keys())
            if twice:
                raise ValueError(f"both regexes have a group {twice[0]} (give them different names)")
            places |= {name: before + number for name, number in pattern.groupindex.items()}
            before += pattern.groups
        return cls(places)


def captures_of(matches: Sequence[re.Match[str]]) -> Captures:
    """Return what patterns have captured, numbered as `Groups.of` does."""
    whole = matches[0][0] if len(matches) == 1 else ""
    return [whole, *(text for match in matches for text in match.groups(""))]


@dataclass(frozen=True, slots=True)
class Template:
    """A text with places to fill in.

    Attributes:
        parts: texts, and places in the captures.

    """

    parts: Sequence[str | int]

    @classmethod
    def read(cls, text: str, groups: Groups) -> "Template":
        """Read a text.

        Raises:
            ValueError: it has a place for a group that there is not.

        """
        parts: list[str | int] = []
        end = 0
        for found in _PLACE.finditer(text):
            parts.append(text[end : found.start()])
            end = found.end()
            if found["dollar"]:
                parts.append("$")
            elif found["open"]:
                raise ValueError("a ${ that no } follows (write $${ for the text ${)")
            else:
                parts.append(_place(found[0], found["number"] or found["name"], groups))
        parts.append(text[end:])
        return cls(tuple(part for part in parts if part != ""))

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to fill in."""
        return all(isinstance(part, str) for part in self.parts)

    def length(self, captures: Captures) -> int:
        """Return how many characters the filled text has."""
        return sum(len(part if isinstance(part, str) else captures[part]) for part in self.parts)

    def filled(self, captures: Captures = ()) -> str:
        """Return the text with what was captured."""
        return "".join(part if isinstance(part, str) else captures[part] for part in self.parts)


def _place(written: str, name: str, groups: Groups) -> int:
    plain = str(int(name)) if name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS else name
    if plain not in groups.places:
        known = ", ".join(f"${{{each}}}" for each in groups.places) or "none, since the rule has no regex"
        raise ValueError(f"{written}: there is no such group (there are {known}; write ${written} for a dollar)")
    return groups.places[plain]
