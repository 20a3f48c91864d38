# SPDX-License-Identifier: Apache-2.0
"""What stands before a runner that runs whatever it has: requests are let in only while they may run.

They may not during a pause, nor while the adapters of others have all slots. As in vLLM, one that waits for a slot is
passed over by others that need none.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from mockengine.engine.adapters import Adapters
from mockengine.engine.config import EngineConfig
from mockengine.engine.requests import Request
from mockengine.engine.runner import FreeRunner
from mockengine.engine.said import Spoken
from mockengine.engine.scheduler import PauseState
from mockengine.wire.requests import EngineCoreRequest, LoraRequest
from mockengine.wire.stats import SchedulerStats


class Gate:
    """A `FreeRunner` that can be paused, and whose requests may have adapters.

    Attributes:
        pause_state: what is paused.

    """

    def __init__(self, runner: FreeRunner, adapters: Adapters | None, max_loras: int) -> None:
        """Begin open, with nobody before the gate.

        Args:
            runner: whom it stands before.
            adapters: which are loaded, where there may be any.
            max_loras: how many requests may have that run.

        """
        self.pause_state = PauseState.UNPAUSED
        self._runner = runner
        self._adapters = adapters
        self._max_loras = max_loras
        self._held: dict[str, tuple[Request, EngineCoreRequest]] = {}
        # Adapters of the requests that run, by id of the request.
        self._loras: dict[str, LoraRequest] = {}
        # How many of them have each.
        self._in_slots: Counter[int] = Counter()
        # What loading takes that is part of the next step, and until when that lasts.
        self._to_load_s = 0.0
        self._loaded_at = 0.0
        # Whether a slot is free that others may wait for.
        self._has_room = False
        self._frozen_at = 0.0
        if adapters is not None:
            adapters.in_use = self._loras.values

    @property
    def is_computing(self) -> bool:
        """Never: steps take no time."""
        return self._runner.is_computing

    @property
    def may_step_anytime(self) -> bool:
        """Whether a step may be made before one is due, to report what has happened."""
        return self._runner.may_step_anytime

    @property
    def num_running(self) -> int:
        """Requests that are stepped."""
        return self._runner.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that came since the last step, and those before the gate."""
        return self._runner.num_waiting + len(self._held)

    @property
    def num_paused(self) -> int:
        """None: nothing is held for sessions that wait for input."""
        return 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that may be stepped."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return True
        has_held = bool(self._held) and self.pause_state is PauseState.UNPAUSED
        return not (self._runner.num_running or self._runner.num_waiting or has_held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held or request_id in self._runner

    # Who comes, and who goes.

    def add(self, request: Request, asked: EngineCoreRequest) -> None:
        """Let a request in, or have it wait."""
        self.go_on(request, asked, request.accepted_at)

    def go_on(self, request: Request, asked: EngineCoreRequest, now: float) -> None:
        """Let the next turn of a session in, or have it wait, as any request: there is nothing to go on from."""
        if self._may_run(asked):
            self._enter(request, asked, now)
        else:
            self._held[request.request_id] = request, asked

    def close(self, request_id: str) -> None:
        """Do nothing: nothing is kept for a next turn."""

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is."""
        if request_id in self._held:
            return self._held.pop(request_id)[0]
        request = self._runner.take(request_id)
        # When the others run is for the next step to say.
        self._has_room = self._free_slots([request_id]) or self._has_room
        return request

    def take_all(self) -> list[Request]:
        """Remove every request."""
        held = [request for request, _ in self._held.values()]
        self._held.clear()
        self._loras.clear()
        self._in_slots.clear()
        return [*self._runner.take_all(), *held]

    def abort_all(self) -> list[Request]:
        """Remove every request; there is nothing else."""
        return self.take_all()

    # Steps.

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the next step is due, or None while nobody may be stepped."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return None
        due = now if self._has_room else self._runner.due(now, blocked)
        return self._loaded_at if due is not None and due < self._loaded_at else due

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:
        """Let all that run say their next tokens, once the adapters are loaded of those who were let in."""
        if self._has_room:
            self._let_in(now)
            due = self._runner.due(now, blocked)
            if due is None or due > now:
                return Spoken()
        if self._to_load_s:
            self._loaded_at = now + self._to_load_s
            self._runner.stand_still(self._to_load_s)
            self._to_load_s = 0.0
        if self.pause_state is PauseState.PAUSED_ALL or now < self._loaded_at:
            return Spoken()
        spoken = self._runner.step(now, blocked, most_steps)
        if self._loras and self._free_slots(request.request_id for request, _ in spoken.finished):
            self._let_in(now)
        return spoken

    def settle(self, spoken: Spoken, now: float) -> None:
        """Go on after a step; `now` is its time."""
        self._runner.settle(spoken, now)

    def stand_still(self, seconds: float) -> None:
        """Have everything that is due later come so much later still."""
        self._runner.stand_still(seconds)

    def pause(self, state: PauseState, now: float) -> None:
        """Stop the admission of requests, or everything, or nothing."""
        was, self.pause_state = self.pause_state, state
        if state is PauseState.PAUSED_ALL:
            self._frozen_at = self._frozen_at if was is state else now
        elif was is PauseState.PAUSED_ALL:
            self.stand_still(now - self._frozen_at)
        self._let_in(now)

    def occupy_kv_cache(self, share: float) -> None:
        """Do nothing: there is no cache."""

    def reconfigure(self, config: EngineConfig) -> None:
        """Go on at another pace."""
        self._runner.reconfigure(config)

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request and the tokens that it has said."""
        yield from self._runner.in_flight()
        yield from ((request, request.output_tokens) for request, _ in self._held.values())

    # What is reported.

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait."""
        return self._with_held(self._runner.load())

    def take_stats(self) -> SchedulerStats:
        """Return the statistics that go with a step."""
        return self._with_held(self._runner.take_stats())

    def reset_prefix_cache(
        self,
        now: float,  # noqa: ARG002 - the interface's
        *,
        reset_running: bool,  # noqa: ARG002
        reset_connector: bool = False,  # noqa: ARG002
    ) -> bool:
        """Do nothing: nothing is cached."""
        return True

    def _with_held(self, stats: SchedulerStats) -> SchedulerStats:
        if not self._held:
            return stats
        return replace(stats, num_waiting_reqs=stats.num_waiting_reqs + len(self._held))

    # Slots.

    def _may_run(self, asked: EngineCoreRequest) -> bool:
        """Whether nothing keeps a request from being let in."""
        if self.pause_state is not PauseState.UNPAUSED:
            return False
        lora = asked.lora_request
        return lora is None or lora.int_id in self._in_slots or len(self._in_slots) < self._max_loras

    def _enter(self, request: Request, asked: EngineCoreRequest, now: float) -> None:
        lora = asked.lora_request
        if lora is not None and self._adapters is not None:
            self._loras[request.request_id] = lora
            self._in_slots[lora.int_id] += 1
            self._to_load_s += self._adapters.use(lora)
        self._runner.add(request, now)

    def _let_in(self, now: float) -> None:
        """Let in whom nothing keeps any more, in order."""
        self._has_room = False
        for request, asked in [each for each in self._held.values() if self._may_run(each[1])]:
            if self._may_run(asked):
                del self._held[request.request_id]
                self._enter(request, asked, now)

    def _free_slots(self, request_ids: Iterable[str]) -> bool:
        """Note that requests do not run any more; tell whether that leaves others a slot."""
        num_in_slots = len(self._in_slots)
        for lora in [self._loras.pop(each) for each in request_ids if each in self._loras]:
            self._in_slots[lora.int_id] -= 1
            if not self._in_slots[lora.int_id]:
                del self._in_slots[lora.int_id]
        return bool(self._held) and len(self._in_slots) < num_in_slots
