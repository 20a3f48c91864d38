# SPDX-License-Identifier: Apache-2.0
"""Who is due when: each at one moment at most, which may be never.

Who is taken when its moment has come keeps that moment until it gets another one or is forgotten, since the next moment
follows from it.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# So many entries of the heap may be old ones, beside as many as there are others.
_MOST_OLD: Final = 1_024


class Agenda(Generic[T]):
    """Moments in engine seconds, the earliest first; of equal ones that which was put first."""

    __slots__ = ("_entries", "_heap", "_order")

    def __init__(self) -> None:
        """Begin with nobody."""
        # Everybody's entry, be it still in the heap or not; others in the heap are old.
        self._entries: dict[T, tuple[float, int, T]] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()

    def __contains__(self, item: T) -> bool:
        """Whether somebody has a moment, be it past or never."""
        return item in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def earliest(self) -> float | None:
        """The first moment at which somebody is to be taken, or None."""
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def put(self, item: T, moment: float) -> None:
        """Give somebody a moment instead of the one before; an infinite one never comes."""
        entry = self._entries[item] = moment, next(self._order), item
        if moment < inf:
            heappush(self._heap, entry)

    def put_back(self, item: T) -> None:
        """Have somebody taken once more who was."""
        self.put(item, self._entries[item][0])

    def take(self, now: float) -> list[T]:
        """Return those whose moment has come since they were put."""
        taken: list[T] = []
        heap, entries = self._heap, self._entries
        while heap and heap[0][0] <= now:
            entry = heappop(heap)
            if entries.get(entry[2]) is entry:
                taken.append(entry[2])
        return taken

    def put_off(self, seconds: float) -> None:
        """Let everybody's moment come so much later."""
        # Those who were taken are not in the heap.
        waiting = [entry[2] for entry in sorted(self._heap) if self._entries.get(entry[2]) is entry]
        self._entries = {item: (moment + seconds, order, item) for item, (moment, order, _) in self._entries.items()}
        self._heap = [self._entries[item] for item in waiting]

    def forget(self, item: T) -> float | None:
        """Return somebody's moment, who has none any more."""
        entry = self._entries.pop(item, None)
        if len(self._heap) > 2 * len(self._entries) + _MOST_OLD:
            # Entries whose moment is far away would keep the prompts of requests that are gone.
            self._heap = [each for each in self._heap if self._entries.get(each[2]) is each]
            heapify(self._heap)
        return None if entry is None else entry[0]

    def clear(self) -> None:
        """Forget everybody."""
        self._entries.clear()
        self._heap.clear()
