# SPDX-License-Identifier: Apache-2.0
"""How requests get from their arrival to their last token: one interface, and the way that knows no limits.

`FreeRunner` is an engine without a scheduler: whatever is there runs, in steps of one pace; `gate` decides who is let
in. `batching` has the way of vLLM's scheduler.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Protocol

from mockengine.engine.config import EngineConfig
from mockengine.engine.own_lane import OwnLane
from mockengine.engine.pace import Pace
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduler import PauseState
from mockengine.engine.speakers import Speakers
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats


class Runner(Protocol):
    """Runs the requests of one rank."""

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way, in which an engine takes in nothing but aborts."""

    @property
    def may_step_anytime(self) -> bool:
        """Whether a step may be made before one is due, to report what has happened."""

    @property
    def num_running(self) -> int:
        """Requests that are stepped."""

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not stepped yet."""

    @property
    def num_paused(self) -> int:
        """Sessions that wait for input and hold something meanwhile."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that may be stepped: there are no requests, or paused ones alone."""

    @property
    def pause_state(self) -> PauseState:
        """What is paused."""

    def __contains__(self, request_id: str) -> bool: ...

    def add(self, request: Request, asked: EngineCoreRequest) -> None:
        """Take in a request, which was asked for like this."""

    def go_on(self, request: Request, asked: EngineCoreRequest, now: float) -> None:
        """Take in the next turn of a session, between two steps; `asked` has the whole prompt."""

    def close(self, request_id: str) -> None:
        """Take note that no turn of a session follows the one that is there, if there is one."""

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is, and what a session of its id holds."""

    def take_all(self) -> list[Request]:
        """Remove every request, and what sessions hold; nothing is computed any more."""

    def abort_all(self) -> list[Request]:
        """Remove likewise every request; a step that is under way ends in its time."""

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the next step is due, `now` or earlier being at once, or None while nothing can be done.

        Args:
            now: the time, in engine seconds.
            blocked: clients that take no more output for now.

        """

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:
        """Make the step that is due.

        Args:
            now: the time, in engine seconds.
            blocked: clients that take no more output for now.
            most_steps: how many steps may be made at once, where they have no time of their own and differ in tokens
                alone.

        Returns:
            What was said; when that is encoded, `settle` is to be called.

        """

    def settle(self, spoken: Spoken, now: float) -> None:
        """Go on after a step; `now` is its time, or a later one until which nobody could go on."""

    def pause(self, state: PauseState, now: float) -> None:
        """Stop the admission of requests, or everything, or nothing, from `now` on."""

    def stand_still(self, seconds: float) -> None:
        """Let what is due at moments of its own be due so much later."""

    def occupy_kv_cache(self, share: float) -> None:
        """Have that share of the KV cache held by nobody, as far as it is free; 0 frees it. None has none to hold."""

    def reconfigure(self, config: EngineConfig) -> None:
        """Go on with other times and limits, from the next step on; what is due already stays so."""

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request and the tokens that it has said."""

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait."""

    def take_stats(self) -> SchedulerStats:
        """Return the statistics that go with a step, which count since the call before."""

    def reset_prefix_cache(self, now: float, *, reset_running: bool, reset_connector: bool = False) -> bool:
        """Forget what is cached; tell whether that was possible.

        Args:
            now: the time, in engine seconds.
            reset_running: preempt whatever runs first, whose cache cannot be forgotten.
            reset_connector: forget what other instances have too.

        """


class FreeRunner:
    """Runs everything that is there, a chunk of tokens for each request in every step.

    Those that have moments of their own speak beside the steps.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._speakers = Speakers(config.output_token_chunk_size)
        self._waiting: dict[str, Request] = {}
        self._own = OwnLane(config.itl_s)
        # Of the requests that step together.
        self._num_of_client: Counter[int] = Counter()
        self._num_requests = 0
        self._pace = Pace(config.itl_s)
        self._has_pace = config.itl_s > 0
        # Whether those who step together have done so since the pace was asked.
        self._has_stepped = False
        self._last_load = SchedulerStats()

    @property
    def is_computing(self) -> bool:
        """Never: its steps take no time."""
        return False

    @property
    def may_step_anytime(self) -> bool:
        """Never: every step lets everybody speak."""
        return False

    @property
    def num_running(self) -> int:
        """Requests that are stepped."""
        return self._num_requests - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that came since the last step."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._own.requests or request_id in self._speakers

    def add(self, request: Request, now: float) -> None:
        """Take in a request, which runs from the next step on, or from now on if it has moments of its own."""
        self._num_requests += 1
        if request.moments is not None:
            self._own.add(request, request.moments, now)
        else:
            self._waiting[request.request_id] = request
            self._num_of_client[request.client] += 1

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is."""
        request = self._own.take(request_id)
        if request is not None:
            self._speakers.take(request_id)
            self._num_requests -= 1
            return request
        request = self._speakers.take(request_id) or self._waiting.pop(request_id, None)
        if request is not None:
            self._note_gone(request)
        return request

    def take_all(self) -> list[Request]:
        """Remove every request."""
        requests = [*self._speakers.take_all(), *self._waiting.values(), *self._own.take_all()]
        self._waiting.clear()
        self._num_of_client.clear()
        self._num_requests = 0
        return requests

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the next step is due, or None while nobody is there whose client takes output."""
        due = self._step_due(now, blocked)
        own_due = self._own.due(blocked) if self._own.requests else None
        return due if own_due is None or (due is not None and due <= own_due) else own_due

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:
        """Let every request whose client takes output say its next tokens; without a pace, as often as can be."""
        if not self._own.requests:
            return self._step_together(now, blocked, most_steps)
        due, own_due = self._step_due(now, blocked), self._own.due(blocked)
        is_own_due = own_due is not None and own_due <= now
        spoken = Spoken()
        if due is not None and due <= now:
            spoken = self._step_together(now, blocked, 1 if is_own_due else most_steps)
        if is_own_due:
            self._speak_apart(spoken, now, blocked)
        return spoken

    def settle(self, spoken: Spoken, now: float) -> None:
        """Go on after a step; `now` is its time."""
        self._speakers.regroup(spoken.said)
        if not self._num_of_client:
            self._pace.rest()
        elif self._has_stepped:
            self._pace.stepped(now)
        self._has_stepped = False

    def stand_still(self, seconds: float) -> None:
        """Let those be later by that who have moments of their own; steps that were missed are left out anyway."""
        self._own.stand_still(seconds)

    def occupy_kv_cache(self, share: float) -> None:
        """Do nothing: there is no cache."""

    def reconfigure(self, config: EngineConfig) -> None:
        """Go on at another pace."""
        self._pace = Pace(config.itl_s)
        self._has_pace = config.itl_s > 0
        self._own.usual_itl_s = config.itl_s

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request and the tokens that it has said."""
        yield from self._speakers.in_flight()
        waiting = [*self._waiting.values(), *(request for request, _ in self._own.requests.values())]
        yield from ((each, each.output_tokens) for each in waiting if each.request_id not in self._speakers)

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait."""
        counts = (self.num_running, self.num_waiting)
        if counts != (self._last_load.num_running_reqs, self._last_load.num_waiting_reqs):
            self._last_load = SchedulerStats(num_running_reqs=counts[0], num_waiting_reqs=counts[1])
        return self._last_load

    def take_stats(self) -> SchedulerStats:
        """Return how many requests run and wait: nothing else is counted."""
        return self.load()

    def _step_due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when those who step together do so next."""
        return self._pace.due(now) if any(client not in blocked for client in self._num_of_client) else None

    def _step_together(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:
        """Let those speak who step together."""
        for request in self._waiting.values():
            request.tell_scheduled(now)
        self._speakers.add(self._waiting)
        self._waiting.clear()
        steps = 1 if self._has_pace else self._speakers.most_steps(blocked, most_steps)
        spoken = self._speakers.say(blocked, steps)
        for request, _ in spoken.finished:
            self._note_gone(request)
        self._has_stepped = True
        return spoken

    def _speak_apart(self, spoken: Spoken, now: float, blocked: AbstractSet[int]) -> None:
        """Let those speak too whose own moment has come."""
        due = self._own.take_due(now, blocked)
        said = self._speakers.say_loosely(due)
        self._num_requests -= len(said.finished)
        spoken.add(said)
        self._own.said(due)
        usual = self._own.take_usual(due)
        for request in usual:
            request.moments = None
            self._num_of_client[request.client] += 1
        self._speakers.add({request.request_id: request for request in usual})

    def _note_gone(self, request: Request) -> None:
        self._num_requests -= 1
        self._num_of_client[request.client] -= 1
        if not self._num_of_client[request.client]:
            del self._num_of_client[request.client]
