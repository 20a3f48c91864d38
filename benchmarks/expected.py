# SPDX-License-Identifier: Apache-2.0
"""Whether ratios are what they were: those that a checked-in file holds, within a factor, after some tries."""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.report import Table

FILE: Final = Path(__file__).with_name("expected.json")
"""Ratios by name, as `python -m benchmarks --short --write-expected` writes them."""

FACTOR: Final = 1.5
"""By how much a ratio may be worse than it was."""

# A machine that is busy for a moment must not fail the run.
_MOST_TRIES: Final = 3
_TRIES_TO_WRITE: Final = 3
_DIGITS: Final = 4

Measures = Mapping[str, Callable[[], float]]
"""What measures each ratio."""


class Verdict(Enum):
    """What a ratio is in the light of the expected one."""

    AS_EXPECTED = "as expected"
    WORSE = "WORSE"
    BETTER = "better"
    UNKNOWN = "NOT IN THE FILE"


def judge(ratio: float, expected: float | None) -> Verdict:
    """Compare a ratio, of which less is better, with the expected one."""
    if expected is None:
        return Verdict.UNKNOWN
    if ratio > expected * FACTOR:
        return Verdict.WORSE
    return Verdict.BETTER if ratio < expected / FACTOR else Verdict.AS_EXPECTED


def compare(measures: Measures, expected: Mapping[str, float]) -> Table:
    """Measure every ratio, those that are worse than expected again, and say what became of each."""
    table = Table("Ratios", ("ratio", "measured", "expected", "measured / expected", "tries", "verdict"))
    for name, measure in measures.items():
        wanted = expected.get(name)
        ratio, tries = measure(), 1
        while judge(ratio, wanted) is Verdict.WORSE and tries < _MOST_TRIES:
            ratio, tries = min(ratio, measure()), tries + 1
        shown = ("-", "-") if wanted is None else (wanted, ratio / wanted)
        table.add(name, ratio, *shown, tries, judge(ratio, wanted).value)
    return table


def complaints(table: Table) -> list[str]:
    """Return what makes the run fail, a sentence for each ratio."""
    said: list[str] = []
    for row in table.named_rows():
        if row["verdict"] == Verdict.WORSE.value:
            said.append(
                f"{row['ratio']}: {row['measured']:.3g} is more than {FACTOR} times the expected {row['expected']:.3g}"
            )
        if row["verdict"] == Verdict.UNKNOWN.value:
            said.append(f"{row['ratio']}: {FILE.name} does not know it; {HOW_TO_WRITE}")
    return said


def hints(table: Table) -> list[str]:
    """Return what may be done about ratios that are better than they were."""
    better = [str(row["ratio"]) for row in table.named_rows() if row["verdict"] == Verdict.BETTER.value]
    return [f"{', '.join(better)}: better than expected by more than {FACTOR}; {HOW_TO_WRITE}"] if better else []


HOW_TO_WRITE: Final = "python -m benchmarks --short --write-expected writes the file anew"
"""For whoever has changed what a ratio should be."""


def read(path: Path) -> dict[str, float]:
    """Return the expected ratios, none if there is no file yet."""
    if not path.exists():
        return {}
    return {str(name): float(ratio) for name, ratio in json.loads(path.read_text(encoding="utf-8")).items()}


def write(path: Path, measures: Measures) -> None:
    """Measure every ratio some times and write down the median of each."""
    rounds: Sequence[dict[str, float]] = [
        {name: measure() for name, measure in measures.items()} for _ in range(_TRIES_TO_WRITE)
    ]
    ratios = {name: round(median(ratio[name] for ratio in rounds), _DIGITS) for name in measures}
    path.write_text(json.dumps(ratios, indent=2) + "\n", encoding="utf-8")
