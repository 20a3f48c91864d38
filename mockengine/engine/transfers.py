# SPDX-License-Identifier: Apache-2.0
"""When blocks are loaded from another instance, and until when they are kept for one."""

from heapq import heappop, heappush
from itertools import count

from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.scheduler import Scheduler
from mockengine.engine.sequences import TokenSequence
from mockengine.engine.steps import Step, StepResult


class Transfers:
    """What is under way between this rank and other instances, by the time at which it ends."""

    def __init__(self, connector: KvConnector, scheduler: Scheduler) -> None:
        """Begin with nothing under way."""
        self._connector = connector
        self._scheduler = scheduler
        self._heap: list[tuple[float, int, TokenSequence]] = []
        self._order = count()

    @property
    def due(self) -> float | None:
        """When the next one ends, in engine seconds; None: nothing is under way."""
        return self._heap[0][0] if self._heap else None

    def load(self, step: Step, now: float) -> None:
        """Begin to load what a step was scheduled to."""
        for sequence in step.loading:
            transfer = sequence.kv_transfer
            num_tokens = 0 if transfer is None else transfer.num_external_tokens
            self._put(now + self._connector.load_s(num_tokens), sequence)

    def keep(self, result: StepResult, now: float) -> None:
        """Begin to keep the blocks of those that have ended with a step."""
        for sequence in result.kept:
            self._put(now + self._connector.keep_s(sequence.num_computed_tokens), sequence)

    def end(self, now: float) -> bool:
        """End what is over; tell whether there was any."""
        any_ended = False
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence = heappop(self._heap)
            any_ended = True
            if sequence.kv_transfer is not None and sequence.kv_transfer.num_kept_blocks:
                self._scheduler.release(sequence)
            else:
                self._scheduler.end_load(sequence)
        return any_ended

    def _put(self, ends_at: float, sequence: TokenSequence) -> None:
        heappush(self._heap, (ends_at, next(self._order), sequence))
