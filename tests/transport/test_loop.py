# SPDX-License-Identifier: Apache-2.0
"""The loop alone, with ranks that the test makes and a clock that only the test moves."""

from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from mockengine.engine.outgoing import Outbound
from mockengine.engine.ranks import Ranks
from mockengine.journal import Journal
from mockengine.transport.calamities import Calamities
from mockengine.transport.loop import Ending, Loop
from mockengine.transport.presence import Presence
from mockengine.transport.session import Session
from mockengine.transport.stop import StopSignal


class _Clock:
    """A clock that goes on by `tick_s` whenever it is read."""

    def __init__(self, tick_s: float) -> None:
        self.now = 100.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self.now += self._tick_s
        return self.now


class _Ranks:
    """Ranks with one step after the other due, which end the loop after some steps."""

    def __init__(self, stop: StopSignal, due: list[float], busy: int = 0) -> None:
        self.num_requests = 0
        self.engines = tuple(SimpleNamespace(num_requests=number < busy) for number in range(64))
        self.allowed_steps: list[int] = []
        self._stop = stop
        self._due = due

    def next_deadline(self, _now: float, _blocked: AbstractSet[int]) -> float | None:
        return self._due[0] if self._due else None

    def step(self, _now: float, _blocked: AbstractSet[int], most_steps: int) -> list[Outbound]:
        self.allowed_steps.append(most_steps)
        del self._due[0]
        if not self._due:
            self._stop.request("SIGTERM")
        return []

    def begin_shutdown(self) -> None:
        pass

    def abort_everything(self, _now: float) -> list[Outbound]:
        return []


class _NothingThere:
    """A session without sockets, and a frontend that stays."""

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    coordinator = None
    loss = None

    def look(self, _readable: dict[Any, int], _now: float) -> None:
        pass

    def next_deadline(self, *_: float) -> float | None:
        return None

    def begin(self, *_: object) -> None:
        pass

    turn = begin


class _Log:
    def info(self, *_: Any, **__: Any) -> None:
        pass


def _run(due: list[float], tick_s: float) -> Journal:
    with StopSignal() as stop:
        return _run_ranks(_Ranks(stop, due), stop, tick_s)


def _run_ranks(ranks: _Ranks, stop: StopSignal, tick_s: float) -> Journal:
    journal = Journal(cast("Any", _Log()), log_requests=False, chunk_size=1)
    nothing = _NothingThere()
    loop = Loop(
        cast("Session", nothing),
        cast("Ranks", ranks),
        cast("Presence", nothing),
        stop,
        zmq.Poller(),
        journal,
        cast("Calamities", nothing),
        drain_s=0,
        clock=_Clock(tick_s),
    )
    assert loop.run() is Ending.STOPPED
    return journal


def test_lateness_is_counted_from_when_a_step_was_due() -> None:
    lateness = _run(due=[99.5, 100.0], tick_s=0.0).counts.lateness
    assert lateness.sum_s == pytest.approx(0.5)
    assert sum(lateness.buckets) == 2


def test_what_arrivals_take_makes_a_step_late() -> None:
    # The clock is read between the sleep and the step, as if taking messages in had taken time.
    lateness = _run(due=[0.0], tick_s=0.25).counts.lateness
    assert lateness.sum_s == pytest.approx(101.0, abs=1.0)


def test_every_turn_is_told() -> None:
    assert _run(due=[99.0, 99.0, 99.0], tick_s=1.0).turned_at > 103.0


@pytest.mark.parametrize(("busy", "allowed"), [(1, 512), (2, 256), (64, 8)])
def test_ranks_that_have_something_to_say_share_what_is_said_at_once(busy: int, allowed: int) -> None:
    with StopSignal() as stop:
        ranks = _Ranks(stop, [0.0], busy)
        _run_ranks(ranks, stop, tick_s=0.0)
    assert ranks.allowed_steps == [allowed]
