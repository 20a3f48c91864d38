# SPDX-License-Identifier: Apache-2.0
"""Requests each have moments of their own: a time to their first token, and times between tokens.

Limits and cache are those of vLLM's scheduler, or none. A request that is admitted gets its slot and its blocks at
once, and its prompt is computed but for the last token; that one is scheduled when the first output is due, and
everything after it when it is due. Since no step has a duration, none has a budget of tokens either.

What is due at almost the same time is said in one step. Moments follow from moments, so that being late by the rest of
a tick does not add up.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafted import make_requests
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduled import KvEventSink, ScheduledRunner
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import StepResult
from mockengine.engine.timing import RequestTiming
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats

# Steps are at least so far apart: a fraction of any time between tokens that is worth simulating.
_TICK_S: Final = 0.000_5
# So many entries of the heap may be old ones, beside as many as there are others.
_MOST_OLD: Final = 1_024
_NO_LIMIT: Final = 2**40
_NO_LIMITS: Final = BatchingConfig(
    max_num_seqs=_NO_LIMIT,
    max_num_batched_tokens=_NO_LIMIT,
    num_gpu_blocks=_NO_LIMIT,
    enable_prefix_caching=False,
)


class MomentRunner(ScheduledRunner):
    """Runs requests by their own moments."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        batching: BatchingConfig | None,
        timing: RequestTiming,
        kv_event_sink: KvEventSink | None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            rank: of the engine.
            config: what it plays.
            batching: its limits and its cache; None is without any.
            timing: when requests say something.
            kv_event_sink: hears of what happens to blocks, if there is somebody to hear it.

        """
        self._is_limited = batching is not None
        # A prompt in chunks would have several moments before its first token.
        limits = replace(batching or _NO_LIMITS, max_num_batched_tokens=_NO_LIMIT, long_prefill_token_threshold=0)
        super().__init__(make_requests(rank, config, limits, kv_event_sink))
        self._timing = timing
        self._blocked: AbstractSet[int] = frozenset()
        # When each running sequence is due; entries of the heap that say something else are old.
        self._due: dict[TokenSequence, float] = {}
        self._heap: list[tuple[float, int, TokenSequence]] = []
        self._order = count()
        # Sequences that were due while their client took no output.
        self._held: list[TokenSequence] = []
        # Whether somebody may be admitted that could not be in the last step.
        self._has_news = False
        self._not_before = 0.0

    def add(self, request: Request, asked: EngineCoreRequest) -> None:
        """Let a request wait for its admission."""
        is_blocked = request.client in self._blocked
        self._requests.add(request, asked, request.accepted_at, leaves_a_token=True, is_blocked=is_blocked)
        self._has_news = True

    def go_on(self, request: Request, asked: EngineCoreRequest, now: float) -> None:  # noqa: ARG002 - it is accepted now
        """Let the next turn of a session wait for its admission."""
        self.add(request, asked)

    def close(self, request_id: str) -> None:
        """Take note that no turn of a session follows the one that is there; what it holds may be what others lack."""
        self._has_news = self._has_news or request_id not in self
        super().close(request_id)

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is."""
        sequence = self._requests.sequences.get(request_id)
        if sequence is not None:
            self._due.pop(sequence, None)
            self._has_news = True
            if len(self._heap) > 2 * len(self._due) + _MOST_OLD:
                self._forget_old()
        return super().take(request_id)

    def take_all(self) -> list[Request]:
        """Remove every request."""
        self._due.clear()
        self._heap.clear()
        self._held.clear()
        return super().take_all()

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when somebody or a transfer is due next, `now` if somebody may be admitted or heard again, or None."""
        transfer_due = self._requests.transfer_due
        if not self._requests.by_id:
            return transfer_due
        if self._has_news or not self._blocked <= blocked:
            return now
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        if not self._heap:
            return transfer_due
        due = max(self._heap[0][0], self._not_before)
        return due if transfer_due is None else min(due, transfer_due)

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:  # noqa: ARG002 - each has its time
        """Let everybody who is due say what they have to, and admit whom there is room for."""
        self._note_blocked(blocked)
        self._release(now)
        self._requests.end_transfers(now)
        step = self._scheduler.schedule(now)
        self._has_news = bool(step.preempted)
        for sequence in step.preempted:
            # One that a reset preempted may have been aborted since.
            if not sequence.is_finished:
                self._due.pop(sequence, None)
                sequence.is_blocked = self._client(sequence) in blocked
        factor = self._timing.load_factor(self._requests.num_running)
        for sequence in (*step.new, *step.resumed):
            uncached = sequence.num_prompt_tokens - sequence.num_cached_tokens
            self._put_off(sequence, now + self._timing.first_token_s(self._key(sequence), uncached, factor))
        result = self._scheduler.update(step)
        self._requests.begin_transfers(step, result, now)
        spoken = self._requests.say(result, loosely=True)
        self._put_off_all(result, factor)
        self._requests.publish()
        self._has_news = self._has_news or bool(spoken.finished and self._requests.num_waiting)
        self._not_before = now + _TICK_S
        # As with a real scheduler, statistics change although nobody says anything.
        spoken.is_reported = self._is_limited and not spoken.said
        return spoken

    def settle(self, spoken: Spoken, now: float) -> None:
        """Go on after a step: everybody goes on by themselves."""

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        load = super().load()
        return load if self._is_limited else replace(load, kv_cache_usage=0.0)

    def take_stats(self) -> SchedulerStats:
        """Return that, and queries and hits of the prefix cache since the call before."""
        stats = super().take_stats()
        return stats if self._is_limited else replace(stats, kv_cache_usage=0.0)

    def reset_prefix_cache(self, now: float, *, reset_running: bool) -> bool:
        """Forget what is cached; tell whether that was possible.

        Args:
            now: the time, in engine seconds.
            reset_running: preempt whatever runs first, whose cache cannot be forgotten.

        """
        self._has_news = True
        return super().reset_prefix_cache(now, reset_running=reset_running) if self._is_limited else True

    # Moments.

    def _put_off(self, sequence: TokenSequence, due: float) -> None:
        """Let a sequence stay where it is until then."""
        sequence.is_blocked = True
        self._due[sequence] = due
        heappush(self._heap, (due, next(self._order), sequence))

    def _put_off_all(self, result: StepResult, factor: float) -> None:
        """Let those who have said something wait for their next moment, and forget those who have ended."""
        for sequence in result.sequences:
            due = self._due.pop(sequence, None)
            if due is not None and sequence.status is Status.RUNNING:
                position = sequence.num_output_tokens
                self._put_off(sequence, due + self._timing.inter_token_s(self._key(sequence), position, factor))

    def _release(self, now: float) -> None:
        """Let those go on who are due, unless their client takes no output."""
        while self._heap and self._heap[0][0] <= now:
            due, _, sequence = heappop(self._heap)
            if self._due.get(sequence) != due:
                continue
            if self._client(sequence) in self._blocked:
                self._held.append(sequence)
            else:
                sequence.is_blocked = False

    def _note_blocked(self, blocked: AbstractSet[int]) -> None:
        """Let the requests of these clients stay where they are, and those of others go on."""
        changed = self._blocked ^ blocked
        if not changed:
            return
        self._blocked = frozenset(blocked)
        for sequence in self._scheduler.waiting:
            if sequence.status is not Status.PAUSED:
                sequence.is_blocked = self._client(sequence) in blocked
        for sequence in self._take_held(changed - blocked):
            heappush(self._heap, (self._due[sequence], next(self._order), sequence))

    def _forget_old(self) -> None:
        """Remove entries whose moment may be far away, and with them the prompts of requests that are gone."""
        self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
        heapify(self._heap)
        self._held = [sequence for sequence in self._held if sequence in self._due]

    def _take_held(self, clients: AbstractSet[int]) -> Iterable[TokenSequence]:
        held = [sequence for sequence in self._held if sequence in self._due]
        self._held = [sequence for sequence in held if self._client(sequence) not in clients]
        return [sequence for sequence in held if self._client(sequence) in clients]

    def _client(self, sequence: TokenSequence) -> int:
        return self._requests.by_id[sequence.request_id].client

    def _key(self, sequence: TokenSequence) -> int:
        return self._requests.by_id[sequence.request_id].key
