# SPDX-License-Identifier: Apache-2.0
"""When a request says something that has a timing of its own, whatever the engine's.

Each moment follows from the one before, so that being late does not add up. Who runs the request asks here for the next
moment and keeps to it as well as its steps let it.
"""

from math import inf

from mockengine.replies.wish import OwnTiming


class Moments:
    """The moments of one request, in engine seconds; infinite is never.

    Attributes:
        due: when the next output is due; None before the request is scheduled.
        waits_first: whether its first output has a time of its own.

    """

    __slots__ = ("_itl_s", "_outputs", "_stall_s", "_stalls_after", "_stretch", "_ttft_s", "due", "waits_first")

    def __init__(self, timing: OwnTiming) -> None:
        """Begin with nothing said."""
        self._itl_s = timing.itl_s
        self._stretch = 1.0 if timing.stretch is None else timing.stretch
        self._stalls_after = inf if timing.stalls_after is None else timing.stalls_after
        self._stall_s = inf if timing.stall_s is None else timing.stall_s
        self._ttft_s = timing.ttft_s if self._stalls_after else self._stall_s
        self.waits_first = self._ttft_s is not None
        self._outputs = 0
        self.due: float | None = None

    @property
    def are_over(self) -> bool:
        """Whether all that it still says comes as it would without."""
        has_stalled = self._stalls_after == inf or self._outputs > self._stalls_after
        return self._outputs > 0 and self._itl_s is None and self._stretch == 1.0 and has_stalled

    def begin(self, now: float, usual_s: float, outputs: int | None = None) -> float:
        """Return when the next output is due of a request that is scheduled now, be it again after a preemption.

        Args:
            now: the time.
            usual_s: how long that takes without a time of its own.
            outputs: that have been said; None is all that were counted.

        """
        usual_s *= self._stretch
        if self.due is None:
            self.due = now + (usual_s if self._ttft_s is None else self._ttft_s)
            return self.due
        # Nothing is due later because of a preemption, unless that has taken too long.
        earliest = now + (usual_s if self._ttft_s is None else 0.0)
        if outputs is None or outputs == self._outputs:
            self.due = max(self.due, earliest)
        else:
            # What was lost was due before.
            self._outputs, self.due = outputs, earliest
        return self.due

    def put_off(self, seconds: float) -> None:
        """Let the next output be due so much later, if it is due at all."""
        if self.due is not None:
            self.due += seconds

    def advance(self, usual_s: float) -> float:
        """Count an output; return when the next one is due, which usually takes that long."""
        if self.due is None:
            raise ValueError("an output was said of a request that has not been scheduled")
        self._outputs += 1
        self.due += self._stretch * usual_s if self._itl_s is None else self._itl_s
        if self._outputs == self._stalls_after:
            self.due += self._stall_s
        return self.due


def moments_of(timing: OwnTiming | None) -> Moments | None:
    """Return the moments of a request that has any of its own."""
    return None if timing is None or timing == OwnTiming() else Moments(timing)
