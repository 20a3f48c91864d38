# SPDX-License-Identifier: Apache-2.0
"""Tables for a person, JSON for a program, and what machine it was."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

# From here on, all digits before the point are shown.
_LARGE: Final = 1_000


@dataclass
class Table:
    """Measured figures, and the bars they are held against."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *values: Any) -> None:
        """Add a row and say it at once: a run takes minutes."""
        self.rows.append(values)

    def __str__(self) -> str:
        cells = [tuple(self.columns), *(tuple(map(_shown, row)) for row in self.rows)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(self.columns))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([f"\n{self.title}", *lines])

    def value(self, column: str, **where: Any) -> float:
        """Return the figure of that column in the row with these values."""
        for row in self.rows:
            named = dict(zip(self.columns, row, strict=True))
            if all(named[key.replace("_", " ")] == wanted for key, wanted in where.items()):
                return float(named[column])
        raise LookupError(f"{self.title} has no row with {where}")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def as_json(tables: Sequence[Table]) -> str:
    """Return all figures as JSON."""
    content = {table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in tables}
    return json.dumps({"machine": machine(), "tables": content}, indent=2)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < _LARGE else f"{value:,.0f}"
    return str(value)
