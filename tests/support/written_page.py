# SPDX-License-Identifier: Apache-2.0
"""A page of the docs of which a program writes parts, between markers, and tests read them again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

Row: TypeAlias = dict[str, str]
"""What was seen, by column."""

_END: Final = "<!-- end -->"


@dataclass(frozen=True)
class WrittenPage:
    """Such a page.

    Attributes:
        path: of its file.
        command: that writes it.

    """

    path: Path
    command: str

    def part(self, name: str) -> str:
        """Return what is between the markers of a part."""
        return self._around(name)[1].strip("\n")

    def write(self, name: str, text: str) -> None:
        """Write a part anew."""
        before, _, after = self._around(name)
        self.path.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")

    def rows(self, name: str) -> Mapping[str, Row]:
        """Return the rows of the table of a part, by their first cell."""
        lines = [line for line in self.part(name).splitlines() if line.startswith("|")]
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
        return {cells[0]: dict(zip(header[1:], cells[1:], strict=True)) for cells in rows}

    def _around(self, name: str) -> tuple[str, str, str]:
        begin = f"<!-- begin: {name}, written by `{self.command}` -->"
        before, found, rest = self.path.read_text(encoding="utf-8").partition(begin)
        content, closed, after = rest.partition(_END)
        assert found, f"{self.path.name} has no line {begin}"
        assert closed, f"{self.path.name} has no line {_END} after {begin}"
        return before + begin, content, _END + after


def table(first: str, rows: Mapping[str, Row]) -> str:
    """Return a table of rows with the same columns; `first` heads the column of their names."""
    columns = list(next(iter(rows.values())))
    return lines_of([first, *columns], [[name, *(row[column] for column in columns)] for name, row in rows.items()])


def lines_of(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells."""
    names = list(header)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])
