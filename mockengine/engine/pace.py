# SPDX-License-Identifier: Apache-2.0
"""When the next step is due."""

from math import floor


class Pace:
    """A grid of moments at which steps are due, from the first one after a rest on.

    A deadline follows from the deadline before, never from when a step was made, so that lateness does not add up. A
    moment that was missed altogether is left out instead of being made up for in a burst.
    """

    def __init__(self, interval_s: float) -> None:
        """Begin at rest; with an interval of 0 every step is due at once."""
        self._interval_s = interval_s
        self._next: float | None = None

    def due(self, now: float) -> float:
        """Return when the next step is due, `now` if nothing says otherwise."""
        return now if self._next is None else self._next

    def stepped(self, now: float) -> None:
        """Note that the step that was due has been made."""
        if self._interval_s:
            due = self.due(now)
            intervals = max(1, 1 + floor((now - due) / self._interval_s))
            self._next = due + intervals * self._interval_s

    def rest(self) -> None:
        """Note that there is nothing to do: the next step may be made as soon as there is."""
        self._next = None
