# SPDX-License-Identifier: Apache-2.0
"""Requests get to their last token in the way of vLLM: in steps that take time, one after the other.

A step is scheduled, is computed for as long as the model of time says, and then its result arrives. Where scheduling is
asynchronous, as on a GPU, the next step is scheduled before that. Each step ends so long after the one before it has
ended, or after it was scheduled if nothing was being computed.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from mockengine.engine.adapters import Adapters
from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafted import make_requests
from mockengine.engine.own_sequences import OwnSequences
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduled import KvEventSink, ScheduledRunner
from mockengine.engine.scheduler import PauseState
from mockengine.engine.steps import Pipeline, Step
from mockengine.engine.timing import RequestTiming, StepTiming
from mockengine.wire.requests import EngineCoreRequest

_SYNCHRONOUS: Final = 1
_ASYNCHRONOUS: Final = 2
# What a step takes that computes nothing although requests are there, so that waiting costs no core.
_IDLE_STEP_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that is computed.

    Attributes:
        duration_s: how long that takes.
        ends_at: when it is done.
        changes: how much had happened when it was scheduled, if nobody found anything to do then; else None.

    """

    duration_s: float
    ends_at: float
    changes: int | None


class BatchRunner(ScheduledRunner):
    """Runs requests as vLLM's engine does."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        batching: BatchingConfig,
        timing: StepTiming,
        kv_event_sink: KvEventSink | None,
        adapters: Adapters | None = None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            rank: of the engine.
            config: what it plays.
            batching: its limits and its cache.
            timing: how long steps take.
            kv_event_sink: hears of what happens to blocks, if there is somebody to hear it.
            adapters: which are loaded, where there may be any.

        """
        super().__init__(make_requests(rank, config, batching, kv_event_sink, adapters))
        self._depth = _ASYNCHRONOUS if batching.async_scheduling else _SYNCHRONOUS
        self._pipeline = Pipeline(self._scheduler, self._depth)
        self._tokens_per_step = config.most_tokens_per_step
        self._rank = rank
        self._timing = timing
        self._own = OwnSequences()
        self._held: AbstractSet[int] = frozenset()
        self._under_way: deque[_UnderWay] = deque()
        # Requests that came while a step was computed; the scheduler hears of them when it has ended.
        self._arrived: dict[str, tuple[Request, EngineCoreRequest]] = {}
        # When the next step begins that is scheduled.
        self._begin = 0.0
        self._stepped_at = 0.0
        # Counts what may let somebody go on who could not: somebody goes, comes, reads again, has loaded.
        self._changes = 0
        # Whether those who wait find no room until something of that happens.
        self._is_stuck = False

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way, in which an engine takes in nothing but aborts."""
        return bool(self._under_way)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that may be stepped, and every step has ended."""
        return not self._under_way and not self._scheduler.has_requests and super().is_idle

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, for room in the cache, or for something else."""
        return super().num_waiting + len(self._arrived)

    def __contains__(self, request_id: str) -> bool:
        return super().__contains__(request_id) or request_id in self._arrived

    def add(self, request: Request, asked: EngineCoreRequest) -> None:
        """Let a request wait for its admission, once the step that is under way has ended."""
        if self._under_way:
            self._arrived[request.request_id] = request, asked
        else:
            self._take_in(request, asked, request.accepted_at)

    def go_on(self, request: Request, asked: EngineCoreRequest, now: float) -> None:
        """Let the next turn of a session wait for its admission, between two steps."""
        self._take_in(request, asked, now)

    def close(self, request_id: str) -> None:
        """Take note that no turn of a session follows the one that is there, if there is one."""
        self._note_change()
        if request_id in self._arrived:
            self._arrived[request_id][0].is_resumable = False
        super().close(request_id)

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is; what is being computed for it is dropped."""
        if request_id in self._arrived:
            return self._arrived.pop(request_id)[0]
        self._note_change()
        if self._own.members and request_id in self._requests.sequences:
            self._own.forget(self._requests.sequences[request_id])
        return super().take(request_id)

    def abort_all(self) -> list[Request]:
        """Remove every request; the steps that are under way end in their time."""
        arrived, self._arrived = self._arrived, {}
        self._own.clear()
        self._note_change()
        return [*super().take_all(), *(request for request, _ in arrived.values())]

    def take_all(self) -> list[Request]:
        """Remove every request; nothing is computed any more."""
        requests = self.abort_all()
        while self._under_way:
            self._under_way.popleft()
            self._pipeline.finish()
        return requests

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the oldest step under way ends, `now` if one can be scheduled, when others can go on, or None."""
        if self._under_way:
            return self._under_way[0].ends_at
        is_held_up = self._requests.are_all_of(blocked) or (self._is_stuck and blocked == self._held)
        if not self._scheduler.has_requests or is_held_up:
            own_due = None if self.pause_state is PauseState.PAUSED_ALL else self._own.due
            moments = [each for each in (self._requests.transfer_due, own_due) if each is not None]
            return min(moments, default=None)
        return now

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:  # noqa: ARG002 - each has its time
        """Take in the result of the step that has ended, if one has."""
        self._hold(blocked)
        self._begin = self._stepped_at = now
        if not self._under_way:
            self._release(now)
            # What frontends hear of steps that end they hear of a transfer too.
            return Spoken(is_reported=self._end_transfers(now))
        if self._under_way[0].ends_at > now:
            return Spoken()
        ended = self._under_way.popleft()
        result = self._pipeline.finish()
        spoken = self._requests.say(result)
        spoken.is_reported = True
        if self._own.members:
            self._own.said(result, ended.ends_at, ended.duration_s, self._held)
        self._requests.begin_transfers(None, result, now)
        self._requests.publish()
        self._end_transfers(now)
        if ended.changes is None:
            # It may have left room.
            self._note_change()
        waits = bool(self._held or self._scheduler.num_paused or self._own.members)
        waits = waits or self._requests.transfer_due is not None
        self._is_stuck = waits and (ended.changes == self._changes or self._is_asleep)
        self._release(now)
        # From when it should have been, unless that has been missed by a whole step.
        self._begin = ended.ends_at if now - ended.ends_at < ended.duration_s else now
        return spoken

    def settle(self, spoken: Spoken, now: float) -> None:
        """Take in who has arrived meanwhile, and schedule what can be; `now` may be after the step that has ended."""
        self._requests.speakers.regroup(spoken.said)
        if spoken.is_reported or not self._under_way:
            arrived, self._arrived = self._arrived, {}
            for request, asked in arrived.values():
                self._take_in(request, asked, now)
        if not self._is_stuck and not self._requests.are_all_of(self._held):
            self._start(now, self._begin if now == self._stepped_at else now)

    def stand_still(self, seconds: float) -> None:
        """Let those be later by that who have moments of their own; steps are anyway."""
        self._own.stand_still(seconds)

    def pause(self, state: PauseState, now: float) -> None:
        """Stop the admission of requests, or everything, or nothing."""
        super().pause(state, now)
        self._note_change()

    def reconfigure(self, config: EngineConfig) -> None:
        """Go on with other times and limits, from the next step that is scheduled on."""
        timing = config.timing_of(self._rank)
        if not isinstance(timing, RequestTiming):
            self._timing = timing
        if config.batching is not None:
            self.limit(config.batching)
        self._note_change()

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request and the tokens that it has said."""
        yield from super().in_flight()
        yield from ((request, request.output_tokens) for request, _ in self._arrived.values())

    def occupy_kv_cache(self, share: float) -> None:
        """Have that share of the KV cache held by nobody, as far as it is free; 0 frees it."""
        super().occupy_kv_cache(share)
        self._note_change()

    def reset_prefix_cache(self, now: float, *, reset_running: bool, reset_connector: bool = False) -> bool:
        """Forget what is cached; tell whether that was possible."""
        self._note_change()
        return super().reset_prefix_cache(now, reset_running=reset_running, reset_connector=reset_connector)

    def _end_transfers(self, now: float) -> bool:
        """End the transfers that are over, after which others may find room; tell whether there was any."""
        if not self._requests.end_transfers(now):
            return False
        self._note_change()
        return True

    @property
    def _is_asleep(self) -> bool:
        """Whether requests are there, and all of them wait for a moment of their own or for the step under way."""
        return self._own.holds_all(len(self._requests.by_id))

    def _release(self, now: float) -> None:
        """Let those go on whose own moment has come."""
        if not self._own.members or self.pause_state is PauseState.PAUSED_ALL:
            return
        if self._own.release(now, self._held):
            self._note_change()

    def _note_change(self) -> None:
        self._changes += 1
        self._is_stuck = False

    def _take_in(self, request: Request, asked: EngineCoreRequest, now: float) -> None:
        self._note_change()
        self._requests.add(request, asked, now, leaves_a_token=False, is_blocked=request.client in self._held)
        self._own.add(self._requests.sequences[request.request_id], request)

    def _start(self, now: float, begin: float) -> None:
        """Schedule steps until the result of the oldest one has to be waited for."""
        has_to_wait = False
        while not has_to_wait and len(self._under_way) < self._depth:
            step, has_to_wait = self._pipeline.start(now)
            if step is None:
                return
            self._requests.begin_transfers(step, None, now)
            if self._own.members:
                self._own.scheduled(step, now, self._held)
                has_to_wait = has_to_wait or self._is_asleep
            if self._under_way:
                begin = max(begin, self._under_way[-1].ends_at)
            duration_s = self._duration_s(step) + self._requests.load_adapters(step)
            # Whoever lost its blocks has left them to others.
            found_nothing = step.is_empty and not step.preempted
            self._under_way.append(_UnderWay(duration_s, begin + duration_s, self._changes if found_nothing else None))

    def _duration_s(self, step: Step) -> float:
        if not step.is_empty:
            return self._timing.duration_s(step.load(self._tokens_per_step))
        return _IDLE_STEP_S if self._requests.by_id else 0.0

    def _hold(self, blocked: AbstractSet[int]) -> None:
        """Let the requests of these clients stay where they are, and those of others go on."""
        changed = self._held ^ blocked
        if changed:
            self._held = frozenset(blocked)
            self._note_change()
            for request_id, request in self._requests.by_id.items():
                if request.client in changed:
                    sequence = self._requests.sequences[request_id]
                    sequence.is_blocked = request.client in blocked or self._own.holds(sequence)
