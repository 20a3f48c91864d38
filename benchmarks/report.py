# SPDX-License-Identifier: Apache-2.0
"""Tables and bars for a person, JSON for a program, and what machine it was."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

Cell: TypeAlias = float | str

# From here on, all digits before the point are shown.
_LARGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured figure, named with its unit, and what it is not to exceed."""

    name: str
    measured: float
    limit: float

    @property
    def is_held(self) -> bool:
        """Whether it does not."""
        return self.measured <= self.limit


@dataclass
class Table:
    """Measured figures, and the bars that some of them are held against."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def add(self, *values: Cell) -> None:
        """Add a row."""
        if len(values) != len(self.columns):
            raise ValueError(f"{self.title}: {len(values)} values for {len(self.columns)} columns")
        self.rows.append(values)

    def hold(self, name: str, measured: float, limit: float) -> None:
        """Hold a figure against its bar."""
        self.bars.append(Bar(name, measured, limit))

    def named_rows(self) -> list[dict[str, Cell]]:
        """Return every row by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def __str__(self) -> str:
        cells = [tuple(self.columns), *(tuple(map(_shown, row)) for row in self.rows)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(self.columns))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([f"\n{self.title}", *lines])


def bar_table(tables: Sequence[Table]) -> Table:
    """Return the bars of all tables, as one that says which are held."""
    table = Table("Bars", ("what", "measured", "at most", "verdict"))
    for bar in _bars(tables):
        table.add(bar.name, bar.measured, bar.limit, "held" if bar.is_held else "MISSED")
    return table


def machine() -> dict[str, Cell]:
    """Return what the figures depend on, the load being that of the minute before."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": os.cpu_count() or 0,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def as_json(facts: Mapping[str, Cell], tables: Sequence[Table]) -> str:
    """Return facts of the machine, all figures and all bars as JSON."""
    content = {
        "machine": dict(facts),
        "tables": {table.title: table.named_rows() for table in tables},
        "bars": [
            {"name": bar.name, "measured": bar.measured, "limit": bar.limit, "held": bar.is_held}
            for bar in _bars(tables)
        ],
    }
    return json.dumps(content, indent=2) + "\n"


def _bars(tables: Sequence[Table]) -> list[Bar]:
    return [bar for table in tables for bar in table.bars]


def _shown(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < _LARGE else f"{value:,.0f}"
    return str(value)
