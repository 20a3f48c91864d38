# SPDX-License-Identifier: Apache-2.0
"""What happens to the engine as a whole on purpose: it crashes, freezes, does not read, loses its connections, grows.

Rules say what and when (`faults.injector`); here it is done, on the thread of the loop and between its steps, after
what other threads have ordered.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, singledispatchmethod
from math import ceil, inf
from typing import Final

import zmq

from mockengine.engine.ranks import Ranks
from mockengine.faults.fault import EngineFault
from mockengine.faults.injector import Calamity, Injector
from mockengine.faults.of_engine import (
    Crash,
    Disconnect,
    ForAWhile,
    Freeze,
    FreezeRank,
    GrowMemory,
    KvCacheFull,
    StaleWave,
    StopReading,
)
from mockengine.transport.desk import Desk
from mockengine.transport.session import Session
from mockengine.transport.sockets import Socket
from mockengine.transport.stop import StopSignal

# A frozen engine looks so often whether its rule is still there.
_GLANCE_MS: Final = 100
_PAGE_BYTES: Final = 4_096
_MEGABYTE: Final = 1_000_000


class CrashError(BaseException):
    """The process is to end at once.

    Attributes:
        exit_code: the code that it ends with.
        has_notice: whether the frontend is told.

    """

    def __init__(self, exit_code: int, *, has_notice: bool) -> None:
        super().__init__(f"crashes with exit code {exit_code}")
        self.exit_code = exit_code
        self.has_notice = has_notice


@dataclass(slots=True)
class _UnderWay:
    """Something that is over at some time, or when its rule is removed."""

    rule: str
    until: float
    end: Callable[[], None]


class Calamities:
    """Does what rules say to one frontend's session and to the process."""

    def __init__(self, injector: Injector, session: Session, ranks: Ranks, stop: StopSignal, desk: Desk) -> None:
        """Begin with nothing under way.

        Args:
            injector: says what happens.
            session: the frontend's sockets.
            ranks: of this process.
            stop: ends what goes on, since whoever stops an engine wants it to leave.
            desk: what other threads want done.

        """
        self._injector = injector
        self._session = session
        self._ranks = ranks
        self._stop = stop
        self._desk = desk
        self._poller = zmq.Poller()
        self._under_way: list[_UnderWay] = []
        self._now = 0.0

    def begin(self, poller: zmq.Poller, now: float) -> None:
        """Take note of what the loop sleeps in, and that it begins."""
        self._poller = poller
        self._injector.begin(now)

    def next_deadline(self, now: float) -> float | None:
        """Return when `turn` has something to do, or None."""
        moments = [each.until for each in self._under_way if each.until < inf]
        due = self._injector.next_deadline(now)
        return min(moments if due is None else [*moments, due], default=None)

    def turn(self, now: float) -> None:
        """Do what has come due, and end what is over.

        Raises:
            CrashError: the process is to end.

        """
        self._desk.work_off()
        if not self._injector.is_active and not self._under_way:
            return
        self._now = now
        for each in [each for each in self._under_way if now >= each.until or each.rule not in self._injector]:
            self._under_way.remove(each)
            each.end()
        for calamity in self._injector.on_time(now):
            self._do(calamity.what, calamity)

    def close(self) -> None:
        """End everything, since there is no frontend any more."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.end()

    # What is done.

    @singledispatchmethod
    def _do(self, what: EngineFault, calamity: Calamity) -> None:  # noqa: ARG002 - as for those that are known
        raise TypeError(f"nobody does {what.fault}")

    @_do.register
    def _crash(self, what: Crash, calamity: Calamity) -> None:  # noqa: ARG002 - a process is not of a rank
        raise CrashError(what.exit_code, has_notice=what.notice)

    @_do.register
    def _freeze(self, what: Freeze, calamity: Calamity) -> None:
        # Whoever asks for health finds that the loop does not turn.
        poller = zmq.Poller()
        poller.register(self._stop.fileno(), zmq.POLLIN)
        until = inf if what.for_s is None else time.monotonic() + what.for_s
        while (left_s := until - time.monotonic()) > 0 and not self._stop.requested:
            if calamity.rule not in self._injector:
                return
            if poller.poll(min(_GLANCE_MS, ceil(1_000 * min(left_s, 1.0)))):
                self._stop.clear_wakeup()

    @_do.register
    def _freeze_rank(self, what: FreezeRank, calamity: Calamity) -> None:
        first = self._ranks.engines[0].rank
        wanted = what.rank if what.rank is not None else calamity.rank
        rank = first if wanted is None else wanted
        if all(engine.rank != rank for engine in self._ranks.engines):
            return
        self._ranks.freeze(rank)
        muted = self._mute(lambda position: self._ranks.engines[position].rank == rank)
        self._go_on(what, calamity, partial(self._thaw, rank, muted))

    def _thaw(self, rank: int, muted: list[Socket]) -> None:
        self._ranks.thaw(rank)
        self._unmute(muted)

    @_do.register
    def _stop_reading(self, what: StopReading, calamity: Calamity) -> None:
        self._go_on(what, calamity, partial(self._unmute, self._mute(lambda _: True)))

    @_do.register
    def _disconnect(self, what: Disconnect, calamity: Calamity) -> None:
        until = self._now + what.for_s
        self._session.disconnect(until)
        self._under_way.append(_UnderWay(calamity.rule, until, self._session.reconnect))

    @_do.register
    def _grow_memory(self, what: GrowMemory, calamity: Calamity) -> None:
        grown = bytearray(what.megabytes * _MEGABYTE)
        # Memory is taken when it is written to.
        grown[::_PAGE_BYTES] = b"\1" * len(range(0, len(grown), _PAGE_BYTES))
        self._go_on(what, calamity, grown.clear)

    @_do.register
    def _fill_kv_cache(self, what: KvCacheFull, calamity: Calamity) -> None:
        for engine in self._ranks.engines:
            engine.occupy_kv_cache(what.share)
        self._go_on(what, calamity, self._free_kv_cache)

    def _free_kv_cache(self) -> None:
        for engine in self._ranks.engines:
            engine.occupy_kv_cache(0.0)

    @_do.register
    def _make_wave_stale(self, what: StaleWave, calamity: Calamity) -> None:  # noqa: ARG002 - there is nothing to it
        for engine in self._ranks.engines:
            engine.faults.make_wave_stale()

    # How it goes on.

    def _go_on(self, what: ForAWhile, calamity: Calamity, end: Callable[[], None]) -> None:
        until = inf if what.for_s is None else self._now + what.for_s
        self._under_way.append(_UnderWay(calamity.rule, until, end))

    def _mute(self, is_meant: Callable[[int], bool]) -> list[Socket]:
        """Listen no more to the sockets of some ranks; return those that were listened to."""
        muted = list(self._listening(is_meant))
        for socket in muted:
            self._poller.unregister(socket)
        return muted

    def _unmute(self, muted: list[Socket]) -> None:
        for socket in muted:
            if not socket.closed:
                self._poller.register(socket, zmq.POLLIN)

    def _listening(self, is_meant: Callable[[int], bool]) -> Iterator[Socket]:
        for entry in self._session.inputs:
            if is_meant(entry.rank) and entry.socket in self._poller:
                yield entry.socket
