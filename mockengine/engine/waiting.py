# SPDX-License-Identifier: Apache-2.0
"""Queues of sequences that wait to be admitted: first come first served, or by priority."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from mockengine.engine.sequences import TokenSequence


class WaitingQueue(Protocol):
    """Sequences in the order in which they are admitted."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[TokenSequence]: ...

    def add(self, sequence: TokenSequence) -> None:
        """Take in a sequence that has arrived."""

    def put_back(self, sequences: Sequence[TokenSequence]) -> None:
        """Take in sequences that go before all others, where their order is not fixed anyway."""

    def remove(self, sequence: TokenSequence) -> None:
        """Remove one, wherever it is."""

    def note_arrival(self, sequence: TokenSequence, arrival_time: float) -> None:
        """Set when one has arrived that is here already."""


class ArrivalQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[TokenSequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def add(self, sequence: TokenSequence) -> None:
        """Take in a sequence at the end."""
        self._sequences[sequence] = None

    def put_back(self, sequences: Sequence[TokenSequence]) -> None:
        """Take in sequences at the front, in their order."""
        for sequence in reversed(sequences):
            self._sequences[sequence] = None
            self._sequences.move_to_end(sequence, last=False)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove one, wherever it is."""
        del self._sequences[sequence]

    def note_arrival(self, sequence: TokenSequence, arrival_time: float) -> None:
        """Set when one has arrived that is here already, and keeps its place."""
        sequence.arrival_time = arrival_time


_Rank: TypeAlias = tuple[int, float, str]


def _rank(sequence: TokenSequence) -> _Rank:
    return (sequence.priority, sequence.arrival_time, sequence.request_id)


class PriorityQueue:
    """The smallest priority first, of those the one that arrived first."""

    def __init__(self) -> None:
        self._sequences: list[TokenSequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def add(self, sequence: TokenSequence) -> None:
        """Take in a sequence where it belongs."""
        insort(self._sequences, sequence, key=_rank)

    def put_back(self, sequences: Sequence[TokenSequence]) -> None:
        """Take in sequences where they belong."""
        for sequence in sequences:
            self.add(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove one, wherever it is."""
        del self._sequences[bisect_left(self._sequences, _rank(sequence), key=_rank)]

    def note_arrival(self, sequence: TokenSequence, arrival_time: float) -> None:
        """Set when one has arrived that is here already, and put it where it then belongs."""
        self.remove(sequence)
        sequence.arrival_time = arrival_time
        self.add(sequence)
