# SPDX-License-Identifier: Apache-2.0
"""Requests get to their last token in the way of vLLM: in steps that take time, one after the other.

A step is scheduled, is computed for as long as the model of time says, and then its result arrives. Where scheduling is
asynchronous, as on a GPU, the next step is scheduled before that. Each step ends so long after the one before it has
ended, or after it was scheduled if nothing was being computed.
"""

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduled import KvEventSink, ScheduledRequests
from mockengine.engine.steps import Pipeline, Step
from mockengine.engine.timing import StepLoad, StepTiming
from mockengine.replies import TokenSource
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats

_SYNCHRONOUS: Final = 1
_ASYNCHRONOUS: Final = 2
# What a step takes that computes nothing although requests are there, so that waiting costs no core.
_IDLE_STEP_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that is computed: how long that takes, and when it is done."""

    duration_s: float
    ends_at: float


class BatchRunner:
    """Runs requests as vLLM's engine does."""

    def __init__(
        self,
        config: EngineConfig,
        batching: BatchingConfig,
        source: TokenSource,
        timing: StepTiming,
        kv_event_sink: KvEventSink | None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            config: what the engine plays.
            batching: its limits and its cache.
            source: of tokens.
            timing: how long steps take.
            kv_event_sink: hears of what happens to blocks, if there is somebody to hear it.

        """
        self._requests = ScheduledRequests(config, batching, source, kv_event_sink)
        self._scheduler = self._requests.scheduler
        self._pipeline = Pipeline(self._scheduler, _ASYNCHRONOUS if batching.async_scheduling else _SYNCHRONOUS)
        self._chunk_size = config.output_token_chunk_size
        self._timing = timing
        self._held: AbstractSet[int] = frozenset()
        self._under_way: deque[_UnderWay] = deque()
        # Requests that came while a step was computed; the scheduler hears of them when it has ended.
        self._arrived: dict[str, tuple[Request, EngineCoreRequest]] = {}
        self._begin = 0.0
        self._blocked: AbstractSet[int] = frozenset()

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way, in which an engine takes in nothing but aborts."""
        return bool(self._under_way)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._requests.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, for room in the cache, or for something else."""
        return self._requests.num_waiting + len(self._arrived)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests.by_id or request_id in self._arrived

    def add(self, request: Request, asked: EngineCoreRequest) -> None:
        """Let a request wait for its admission, once the step that is under way has ended."""
        if self._under_way:
            self._arrived[request.request_id] = request, asked
        else:
            self._take_in(request, asked, request.accepted_at)

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is; what is being computed for it is dropped."""
        if request_id in self._arrived:
            return self._arrived.pop(request_id)[0]
        return self._requests.take(request_id)

    def take_all(self) -> list[Request]:
        """Remove every request; nothing is computed any more."""
        arrived, self._arrived = self._arrived, {}
        requests = [*self._requests.take_all(), *(request for request, _ in arrived.values())]
        while self._under_way:
            self._under_way.popleft()
            self._pipeline.finish()
        return requests

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the oldest step under way ends, or `now` if one can be scheduled, or None."""
        if self._under_way:
            return self._under_way[0].ends_at
        if not self._scheduler.has_requests or self._requests.are_all_of(blocked):
            return None
        return now

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:  # noqa: ARG002 - each has its time
        """Take in the result of the step that has ended, if one has."""
        self._hold(blocked)
        self._blocked = blocked
        self._begin = now
        if not self._under_way or self._under_way[0].ends_at > now:
            return Spoken()
        ended = self._under_way.popleft()
        spoken = self._requests.say(self._pipeline.finish())
        spoken.is_reported = True
        self._requests.publish()
        # From when it should have been, unless that has been missed by a whole step.
        self._begin = ended.ends_at if now - ended.ends_at < ended.duration_s else now
        return spoken

    def settle(self, spoken: Spoken, now: float) -> None:
        """Take in who has arrived meanwhile, and schedule what can be."""
        self._requests.speakers.regroup(spoken.said)
        if spoken.is_reported or not self._under_way:
            arrived, self._arrived = self._arrived, {}
            for request, asked in arrived.values():
                self._take_in(request, asked, now)
        if not self._requests.are_all_of(self._blocked):
            self._start(now, self._begin)

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        return self._requests.load()

    def take_stats(self) -> SchedulerStats:
        """Return that, and queries and hits of the prefix cache since the call before."""
        return self._requests.take_stats()

    def reset_prefix_cache(self, now: float, *, reset_running: bool) -> bool:
        """Forget what is cached; tell whether that was possible.

        Args:
            now: the time, in engine seconds.
            reset_running: preempt whatever runs first, whose cache cannot be forgotten.

        """
        return self._scheduler.reset_prefix_cache(reset_running, now)

    def _take_in(self, request: Request, asked: EngineCoreRequest, now: float) -> None:
        self._requests.add(request, asked, now, leaves_a_token=False, is_blocked=request.client in self._held)

    def _start(self, now: float, begin: float) -> None:
        """Schedule steps until the result of the oldest one has to be waited for."""
        has_to_wait = False
        while not has_to_wait:
            step, has_to_wait = self._pipeline.start(now)
            if step is None:
                return
            if self._under_way:
                begin = self._under_way[-1].ends_at
            duration_s = self._duration_s(step)
            self._under_way.append(_UnderWay(duration_s, begin + duration_s))

    def _duration_s(self, step: Step) -> float:
        if not step.is_empty:
            return self._timing.duration_s(StepLoad(*step.load(self._chunk_size)))
        return _IDLE_STEP_S if self._requests.by_id else 0.0

    def _hold(self, blocked: AbstractSet[int]) -> None:
        """Let the requests of these clients stay where they are, and those of others go on."""
        changed = self._held ^ blocked
        if changed:
            self._held = frozenset(blocked)
            for request_id, request in self._requests.by_id.items():
                if request.client in changed:
                    self._requests.sequences[request_id].is_blocked = request.client in blocked
