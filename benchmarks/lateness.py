# SPDX-License-Identifier: Apache-2.0
"""How late steps are when they have a pace, by the times that they bear, and whether the pace drifts.

Engine and reader are on one machine and share its monotonic clock; so the reader knows when a step was made, when it
arrived, and, from the first one, when each was due.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from statistics import median
from typing import Final

from benchmarks.report import Table
from benchmarks.rig import Rig, joined

_TAKES_UP_S: Final = 0.5
_SOAK_RUNNING: Final = 256
# Of a soak, the share after which memory is what it will be.
_WARM_SHARE: Final = 0.1
# The bars, at so many running.
_BAR_RUNNING: Final = 256
_BAR_P50_MS: Final = 0.2
_BAR_P99_MS: Final = 1.0
# A drift of less than that is the noise of two medians.
_BAR_DRIFT_MS: Final = 0.1
_BAR_GROWTH_MB: Final = 1.0


class Grid:
    """The moments at which steps are due: a multiple of the interval after the first step, which itself is on time.

    A moment that was missed altogether is left out instead of being made up for, as the engine has it.
    """

    def __init__(self, first: float, interval_s: float) -> None:
        self.intervals = 0
        self._first = first
        self._interval_s = interval_s

    def lateness_s(self, made_at: float) -> float:
        """Return how late the next step was made, in seconds."""
        late_s = made_at - (self._first + self.intervals * self._interval_s)
        self.intervals += max(1, 1 + floor(late_s / self._interval_s))
        return late_s


@dataclass(slots=True)
class Steps:
    """How late steps were, in milliseconds, in order.

    Attributes:
        made_ms: when they were made.
        arrived_ms: when they arrived.
        due: how many there should have been.

    """

    made_ms: list[float] = field(default_factory=list)
    arrived_ms: list[float] = field(default_factory=list)
    due: int = 0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values within which that share of them stays."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def drift(values: Sequence[float]) -> float:
    """Return by how much the median of the last tenth exceeds that of the first."""
    tenth = max(1, len(values) // 10)
    return median(values[-tenth:]) - median(values[:tenth])


def measure(running: tuple[int, ...], itl_ms: float, lasts_s: float) -> Table:
    """Measure for so many seconds each, with a frontend that reads."""
    columns = (
        *("running", "p50 ms", "p99 ms", "max ms", "p99 / step", "drift ms", "made / due"),
        *("arrival p50 ms", "arrival p99 ms", "engine CPU %"),
    )
    table = Table(f"Lateness of steps {itl_ms:g} ms apart", columns)
    for count in running:
        with joined(f"--itl-ms={itl_ms}") as rig:
            grid = start(rig, count, itl_ms)
            used_before_s = rig.cpu_s
            steps = listen(rig, grid, lasts_s)
            used_s = rig.cpu_s - used_before_s
        p50, p99, *others = _summary(steps, itl_ms)
        arrived = (quantile(steps.arrived_ms, 0.5), quantile(steps.arrived_ms, 0.99))
        table.add(count, p50, p99, *others, *arrived, 100 * used_s / lasts_s)
        if count == _BAR_RUNNING:
            _hold(table, steps, f"{count} running")
    return table


def soak(minutes: float, itl_ms: float) -> Table:
    """Measure for so many minutes, and how much memory the engine has at the end that it had not after a tenth."""
    columns = ("minutes", "running", "p50 ms", "p99 ms", "max ms", "p99 / step", "drift ms", "made / due", "growth MB")
    table = Table(f"Soak, steps {itl_ms:g} ms apart", columns)
    with joined(f"--itl-ms={itl_ms}") as rig:
        grid = start(rig, _SOAK_RUNNING, itl_ms)
        warm = listen(rig, grid, 60 * minutes * _WARM_SHARE)
        warm_mb = rig.resident_mb
        rest = listen(rig, grid, 60 * minutes * (1 - _WARM_SHARE))
        growth_mb = rig.resident_mb - warm_mb
    whole = Steps(warm.made_ms + rest.made_ms, warm.arrived_ms + rest.arrived_ms, warm.due + rest.due)
    table.add(minutes, _SOAK_RUNNING, *_summary(whole, itl_ms), growth_mb)
    _hold(table, whole, f"soak of {minutes:g} minutes")
    table.hold(f"soak of {minutes:g} minutes, MB of growth", growth_mb, _BAR_GROWTH_MB)
    return table


def start(rig: Rig, running: int, itl_ms: float) -> Grid:
    """Let so many requests run; return the grid of their steps, from the next one on."""
    rig.run_requests(1)
    first = rig.steps.next(1.0)
    if first is None:
        raise TimeoutError("no step came")
    grid = Grid(first, itl_ms / 1e3)
    rig.run_requests(running - 1, first_number=1)
    listen(rig, grid, _TAKES_UP_S)
    return grid


def listen(rig: Rig, grid: Grid, lasts_s: float) -> Steps:
    """Read steps for so many seconds."""
    steps = Steps()
    passed = grid.intervals
    end = time.monotonic() + lasts_s
    while (left_s := end - time.monotonic()) > 0:
        made_at = rig.steps.next(left_s)
        if made_at is not None:
            arrived_at = time.monotonic()
            late_s = grid.lateness_s(made_at)
            steps.made_ms.append(1e3 * late_s)
            steps.arrived_ms.append(1e3 * (late_s + arrived_at - made_at))
    steps.due = grid.intervals - passed
    return steps


def _summary(steps: Steps, itl_ms: float) -> tuple[float, ...]:
    """Return p50, p99, maximum, p99 in steps, drift, and steps made of those due."""
    made = steps.made_ms
    p99 = quantile(made, 0.99)
    return quantile(made, 0.5), p99, max(made), p99 / itl_ms, drift(made), len(made) / steps.due


def _hold(table: Table, steps: Steps, case: str) -> None:
    table.hold(f"lateness, {case}, p50 ms", quantile(steps.made_ms, 0.5), _BAR_P50_MS)
    table.hold(f"lateness, {case}, p99 ms", quantile(steps.made_ms, 0.99), _BAR_P99_MS)
    table.hold(f"lateness, {case}, drift ms", abs(drift(steps.made_ms)), _BAR_DRIFT_MS)
