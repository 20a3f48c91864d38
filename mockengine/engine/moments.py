# SPDX-License-Identifier: Apache-2.0
"""Requests each have moments of their own: a time to their first token, and times between tokens.

Limits and cache are those of vLLM's scheduler, or none. A request that is admitted gets its slot and its blocks at
once, and its prompt is computed but for the last token; that one is scheduled when the first output is due, and
everything after it when it is due. Since no step has a duration, none has a budget of tokens either.

What is due at almost the same time is said in one step. Moments follow from moments, so that being late by the rest of
a tick does not add up.
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from mockengine.engine.adapters import Adapters
from mockengine.engine.agenda import Agenda
from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafted import make_requests
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduled import KvEventSink, ScheduledRunner
from mockengine.engine.scheduler import PauseState
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import StepResult
from mockengine.engine.timing import RequestTiming
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats

# Steps are at least so far apart: a fraction of any time between tokens that is worth simulating.
_TICK_S: Final = 0.000_5
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
        adapters: Adapters | None = None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            rank: of the engine.
            config: what it plays.
            batching: its limits and its cache; None is without any.
            timing: when requests say something.
            kv_event_sink: hears of what happens to blocks, if there is somebody to hear it.
            adapters: which are loaded, where there may be any.

        """
        self._is_limited = batching is not None
        # A prompt in chunks would have several moments before its first token.
        limits = replace(batching or _NO_LIMITS, max_num_batched_tokens=_NO_LIMIT, long_prefill_token_threshold=0)
        super().__init__(make_requests(rank, config, limits, kv_event_sink, adapters))
        self._rank = rank
        self._timing = timing
        self._blocked: AbstractSet[int] = frozenset()
        # When each running sequence is due.
        self._agenda: Agenda[TokenSequence] = Agenda()
        # Sequences that were due while their client took no output.
        self._held: dict[TokenSequence, None] = {}
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
            self._forget(sequence)
            self._has_news = True
        return super().take(request_id)

    def take_all(self) -> list[Request]:
        """Remove every request."""
        self._agenda.clear()
        self._held.clear()
        return super().take_all()

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when somebody or a transfer is due next, `now` if somebody may be admitted or heard again, or None."""
        transfer_due = self._requests.transfer_due
        if not self._requests.by_id or self.pause_state is PauseState.PAUSED_ALL:
            return transfer_due
        if self._has_news or not self._blocked <= blocked:
            return now
        earliest = self._agenda.earliest
        if earliest is None:
            return transfer_due
        due = max(earliest, self._not_before)
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
                self._forget(sequence)
                sequence.is_blocked = self._client(sequence) in blocked
        factor = self._timing.load_factor(self._requests.num_running)
        loaded_at = now + self._requests.load_adapters(step)
        for sequence in (*step.new, *step.resumed):
            self._put_off(sequence, self._first_moment(sequence, loaded_at, factor))
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

    def pause(self, state: PauseState, now: float) -> None:
        """Stop the admission of requests, or everything, or nothing."""
        super().pause(state, now)
        self._has_news = True

    def stand_still(self, seconds: float) -> None:
        """Let everybody be due so much later."""
        self._agenda.put_off(seconds)
        for request in self._requests.by_id.values():
            if request.moments is not None:
                request.moments.put_off(seconds)

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        load = super().load()
        return load if self._is_limited else replace(load, kv_cache_usage=0.0)

    def take_stats(self) -> SchedulerStats:
        """Return that, and queries and hits of the prefix cache since the call before."""
        stats = super().take_stats()
        return stats if self._is_limited else replace(stats, kv_cache_usage=0.0)

    def reconfigure(self, config: EngineConfig) -> None:
        """Go on with other times and limits; moments that are set already stay."""
        timing = config.timing_of(self._rank)
        if isinstance(timing, RequestTiming):
            self._timing = timing
        if config.batching is not None:
            self.limit(replace(config.batching, max_num_batched_tokens=_NO_LIMIT))
        self._has_news = True

    def occupy_kv_cache(self, share: float) -> None:
        """Have that share of the KV cache held by nobody, as far as it is free; 0 frees it."""
        super().occupy_kv_cache(share)
        self._has_news = True

    def reset_prefix_cache(self, now: float, *, reset_running: bool, reset_connector: bool = False) -> bool:
        """Forget what is cached; tell whether that was possible; without limits nothing is."""
        self._has_news = True
        if not self._is_limited:
            return True
        return super().reset_prefix_cache(now, reset_running=reset_running, reset_connector=reset_connector)

    # Moments.

    def _first_moment(self, sequence: TokenSequence, now: float, factor: float) -> float:
        """Return when a sequence that is admitted now says something for the first time, or goes on."""
        request = self._requests.by_id[sequence.request_id]
        cached = sequence.num_cached_tokens if request.cached_tokens is None else request.cached_tokens
        usual_s = self._timing.first_token_s(request.key, sequence.num_prompt_tokens - cached, factor)
        return now + usual_s if request.moments is None else request.moments.begin(now, usual_s)

    def _put_off(self, sequence: TokenSequence, due: float) -> None:
        """Let a sequence stay where it is until then."""
        sequence.is_blocked = True
        self._agenda.put(sequence, due)

    def _put_off_all(self, result: StepResult, factor: float) -> None:
        """Let those who have said something wait for their next moment, and forget those who have ended."""
        for sequence in result.sequences:
            due = self._agenda.forget(sequence)
            if due is not None and sequence.status is Status.RUNNING:
                request = self._requests.by_id[sequence.request_id]
                usual_s = self._timing.inter_token_s(request.key, sequence.num_output_tokens, factor)
                due = due + usual_s if request.moments is None else request.moments.advance(usual_s)
                self._put_off(sequence, due)

    def _release(self, now: float) -> None:
        """Let those go on who are due, unless everything is paused or their client takes no output."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return
        for sequence in self._agenda.take(now):
            if self._client(sequence) in self._blocked:
                self._held[sequence] = None
            else:
                sequence.is_blocked = False

    def _note_blocked(self, blocked: AbstractSet[int]) -> None:
        """Let the requests of these clients stay where they are, and those of others go on."""
        if self._blocked == blocked:
            return
        self._blocked = frozenset(blocked)
        for sequence in self._scheduler.waiting:
            if sequence.status is not Status.PAUSED:
                sequence.is_blocked = self._client(sequence) in blocked
        for sequence in [each for each in self._held if self._client(each) not in blocked]:
            del self._held[sequence]
            self._agenda.put_back(sequence)

    def _forget(self, sequence: TokenSequence) -> None:
        self._agenda.forget(sequence)
        self._held.pop(sequence, None)

    def _client(self, sequence: TokenSequence) -> int:
        return self._requests.by_id[sequence.request_id].client
