# SPDX-License-Identifier: Apache-2.0
"""Probes as a kubelet counts them: when one is due, and after how many results its verdict changes.

It knows numbers and clocks given to it; what a probe does is a function that it is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

Check = Callable[[], bool]
"""Does what the probe says, within its timeout, and returns whether that succeeded."""


@dataclass(slots=True)
class Probe:
    """One probe of one container since it was started."""

    check: Check
    period_s: float
    success_threshold: int
    failure_threshold: int
    due_at: float
    in_a_row: int = 0
    last: bool | None = None

    @classmethod
    def of(cls, described: Mapping[str, Any], check: Check, *, started_at: float, pace: float) -> Self:
        """Make the probe that a manifest describes; `pace` multiplies its delay and period."""
        return cls(
            check=check,
            period_s=described.get("periodSeconds", 10) * pace,
            success_threshold=described.get("successThreshold", 1),
            failure_threshold=described.get("failureThreshold", 3),
            due_at=started_at + described.get("initialDelaySeconds", 0) * pace,
        )

    def run(self, now: float) -> bool | None:
        """Check once, if it is due; return True or False when that many in a row said so, None while undecided."""
        if now < self.due_at:
            return None
        # From the last due time, so that a slow check does not shift the next one; but never twice at once.
        self.due_at = max(self.due_at + self.period_s, now)
        result = self.check()
        self.in_a_row = self.in_a_row + 1 if result is self.last else 1
        self.last = result
        threshold = self.success_threshold if result else self.failure_threshold
        return result if self.in_a_row >= threshold else None
