# SPDX-License-Identifier: Apache-2.0
"""What may be asked of a running engine, and done to it, from another thread.

Whatever touches the engine's state is done by its own thread, between two steps; what takes longer than a step is
prepared before.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from structlog.typing import FilteringBoundLogger

from mockengine import logs
from mockengine.engine.core import EngineCore
from mockengine.engine.observer import Served
from mockengine.engine.ranks import Ranks
from mockengine.engine.reception import make_planner
from mockengine.engine_setup import EngineSetup, SetupError, set_up_again
from mockengine.faults.injector import Calamity, Injector, check_needs
from mockengine.faults.of_engine import Crash
from mockengine.faults.rules import Rule, RulesError
from mockengine.settings import LIVE
from mockengine.settings_sources import SettingsError, changed
from mockengine.transport.desk import Desk
from mockengine.wire.handshake import Init


class RefusedError(Exception):
    """What was asked for cannot be done; `problems` has a line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class UnknownError(Exception):
    """There is no such rank or rule; the text says which there are."""


class Journalled(Protocol):
    """Hears of changes, and may write less or more from now on."""

    def settings_changed(self, changes: Mapping[str, object]) -> None:
        """Hear which settings have other values now."""

    def reconfigure(self, log: FilteringBoundLogger, *, log_requests: bool) -> None:
        """Write to another log, and requests or not."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """One rank.

    Attributes:
        engine: its index.
        running, waiting: requests.
        kv_cache_usage: share of the blocks in use, 0 to 1.
        is_paused: by a control route.
        is_draining: by an order.
        wave: number of the wave, where there are waves.

    """

    engine: int
    running: int
    waiting: int
    kv_cache_usage: float
    is_paused: bool
    is_draining: bool
    wave: int


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request in flight, without what it says.

    Attributes:
        request_id: the frontend's id.
        engine: rank that serves it.
        client: index of the API server that asked.
        prompt_tokens, output_tokens: how many, the latter so far.
        max_tokens: what was asked; None is as many as the context allows.
        age_s: since it was accepted, in seconds.

    """

    request_id: str
    engine: int
    client: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None
    age_s: float


class Remote:
    """Asks and changes one engine."""

    def __init__(self, setup: EngineSetup, desk: Desk, journal: Journalled, wake: Callable[[], None]) -> None:
        """Begin while no frontend is served.

        Args:
            setup: the engine as it is.
            desk: has things done by the engine's thread.
            journal: hears of changes.
            wake: makes the engine's thread go through its loop.

        """
        self.setup = setup
        self._desk = desk
        self._journal = journal
        self._wake = wake
        self._served: tuple[Ranks, Init] | None = None
        self._changing = threading.Lock()

    # For the engine's thread.

    def serving(self, ranks: Ranks, init: Init) -> None:
        """Take note that a frontend is served."""
        self._served = ranks, init

    def joining(self) -> None:
        """Take note that there is none."""
        self._served = None

    # Settings.

    def settings(self) -> Mapping[str, Any]:
        """Return all settings in effect, secrets aside."""
        return self.setup.settings.model_dump(mode="json")

    def change_settings(self, changes: Mapping[str, object]) -> Mapping[str, Any]:
        """Have settings in effect that may change while the engine runs; all of them or, with anything wrong, none.

        Raises:
            RefusedError: any of them cannot be.

        """
        with self._changing:
            return self._change_settings(changes)

    def _change_settings(self, changes: Mapping[str, object]) -> Mapping[str, Any]:
        try:
            settings = changed(self.setup.settings, changes)
            setup = set_up_again(self.setup, settings)
        except SettingsError as error:
            raise RefusedError(error.problems) from error
        except SetupError as error:
            raise RefusedError([str(error)]) from error
        # Another frontend may have come while this was prepared for the one before.
        while not self._desk.ask(self._effect_of(setup)):
            pass
        self._journal.settings_changed({name: getattr(settings, name) for name in LIVE & changes.keys()})
        return self.settings()

    def _effect_of(self, setup: EngineSetup) -> Callable[[], bool]:
        """Prepare that a setup takes effect, which does nothing, and says so, once another frontend is served."""
        served = self._served
        config = None if served is None else setup.config(served[1])
        planner = None if config is None else make_planner(config)

        def take_effect() -> bool:
            if served is not self._served:
                return False
            self.setup = setup
            logs.set_level(setup.settings.log_level)
            self._journal.reconfigure(logs.get_logger(), log_requests=setup.settings.log_requests)
            if served is not None and config is not None and planner is not None:
                for engine in served[0].engines:
                    engine.reconfigure(config, planner)
            return True

        return take_effect

    # Faults.

    @property
    def injector(self) -> Injector:
        """What decides what goes wrong."""
        return self.setup.injector

    def put_fault(self, rule: Rule) -> None:
        """Add a rule, or replace the one of its name.

        Raises:
            RefusedError: this engine cannot follow it.

        """
        settings = self.setup.settings
        try:
            check_needs(
                [rule], has_tokenizer=settings.tokenizer is not None, has_load_model=settings.load_model != "off"
            )
        except RulesError as error:
            raise RefusedError(error.problems) from error
        self.injector.put(rule)
        self._wake()

    def remove_fault(self, name: str) -> None:
        """Remove a rule, and end what it has begun; raises `UnknownError` where there is none."""
        if not self.injector.remove(name):
            raise UnknownError(self._no_rule(name))
        self._wake()

    def fire_fault(self, name: str) -> None:
        """Let a rule strike whatever its conditions; raises `UnknownError` where there is none."""
        if not self.injector.fire(name):
            raise UnknownError(self._no_rule(name))
        self._wake()

    def ends_process(self, name: str) -> bool:
        """Tell whether the process ends when a rule strikes; raises `UnknownError` where there is none."""
        rule = next((each for each in self.injector.rules if each.name == name), None)
        if rule is None:
            raise UnknownError(self._no_rule(name))
        return isinstance(rule.what, Crash)

    def _no_rule(self, name: str) -> str:
        names = [rule.name for rule in self.injector.rules]
        return f"there is no rule {name} (there {'are ' + ', '.join(names) if names else 'is none'})"

    # Ranks and requests.

    def engines(self) -> list[EngineState]:
        """Return every rank that serves a frontend."""
        return self._desk.ask(lambda: [_state_of(engine) for engine in self._engines])

    def requests(self) -> list[RequestState]:
        """Return every request in flight."""
        return self._desk.ask(self._requests)

    def drain(self, rank: int, *, begins: bool) -> EngineState:
        """Have a rank refuse new requests, or take them again; raises `UnknownError` where there is none."""

        def take_effect() -> EngineState:
            engine = next((each for each in self._engines if each.rank == rank), None)
            if engine is None:
                raise UnknownError(self._no_rank(rank))
            engine.is_draining = begins
            return _state_of(engine)

        return self._desk.ask(take_effect)

    def check_rank(self, rank: int) -> None:
        """Raise `UnknownError` where there is no such rank."""
        if rank not in self._ranks:
            raise UnknownError(self._no_rank(rank))

    def crash(self, rank: int, *, notice: bool, exit_code: int) -> None:
        """Have the process of a rank end at once; raises `UnknownError` where there is none."""
        self.check_rank(rank)
        self.injector.add(Calamity("crash", Crash(notice=notice, exit_code=exit_code), rank))
        self._wake()

    @property
    def _ranks(self) -> Sequence[int]:
        settings = self.setup.settings
        return range(settings.start_rank, settings.start_rank + settings.engine_count)

    def _no_rank(self, rank: int) -> str:
        if self._served is None:
            return f"there is no frontend that rank {rank} serves (wait until /ready answers 200)"
        return f"there is no rank {rank} here (there are {', '.join(map(str, self._ranks))})"

    @property
    def _engines(self) -> Sequence[EngineCore]:
        return () if self._served is None else self._served[0].engines

    def _requests(self) -> list[RequestState]:
        now = time.monotonic()
        return [_request_of(served, now - at) for engine in self._engines for served, at in engine.in_flight()]


def _state_of(engine: EngineCore) -> EngineState:
    return EngineState(
        engine=engine.rank,
        running=engine.num_running,
        waiting=engine.num_waiting,
        kv_cache_usage=engine.load().kv_cache_usage,
        is_paused=engine.is_paused,
        is_draining=engine.is_draining,
        wave=engine.wave.number,
    )


def _request_of(served: Served, age_s: float) -> RequestState:
    return RequestState(
        request_id=served.request_id,
        engine=served.engine,
        client=served.client,
        prompt_tokens=served.prompt_tokens,
        output_tokens=served.output_tokens,
        max_tokens=served.max_tokens,
        age_s=round(age_s, 3),
    )
