# SPDX-License-Identifier: Apache-2.0
"""The loop: drain what arrived, step what is due, send, sleep until the next deadline or arrival.

One thread runs every rank of the process. What arrives is drained in bounded portions, so that a flood of requests
cannot keep running ones from stepping. While nothing is due the loop sleeps without waking up.
"""

from collections.abc import Callable
from enum import Enum, auto
from math import ceil
from typing import Any, Final, Protocol

import zmq

from mockengine.engine.core import COORDINATOR, Outbound
from mockengine.engine.ranks import Ranks
from mockengine.transport.session import Input, Session
from mockengine.transport.stop import StopSignal
from mockengine.wire.messages import COORDINATOR_READY, read_message

_MESSAGES_PER_TURN: Final = 256
# A frontend completes its start-up some milliseconds after the last rank's READY.
_STARTUP_REMINDER_S: Final = 10.0


class Ending(Enum):
    """Why the loop ended."""

    STOPPED = auto()
    FRONTEND_LOST = auto()


class LoopReporter(Protocol):
    """Hears of what the loop sees of the frontend and of its end."""

    def frontend_starting(self, waited_s: float) -> None:
        """Hear that the frontend has not completed its start-up although every rank here is ready."""

    def leaving(self, signal_name: str, in_flight: int, drain_s: float) -> None:
        """Hear that a signal asked to stop, with `in_flight` requests that have `drain_s` seconds left."""


class Loop:
    """Runs the ranks of this process for one frontend."""

    def __init__(
        self,
        session: Session,
        ranks: Ranks,
        stop: StopSignal,
        reporter: LoopReporter,
        *,
        grace_s: float,
        drain_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Set up the loop.

        Args:
            session: the frontend's sockets.
            ranks: in the order in which the session knows them.
            stop: the wish to stop.
            reporter: hears of it.
            grace_s: how long a lost connection may take to come back.
            drain_s: how long requests may go on after a signal; 0 aborts them at once.
            clock: monotonic, in seconds.

        """
        self._session = session
        self._ranks = ranks
        self._stop = stop
        self._reporter = reporter
        self._grace_s = grace_s
        self._drain_s = drain_s
        self._clock = clock
        self._started = clock()
        self._startup_reminder = self._started + _STARTUP_REMINDER_S
        self._lost_since: float | None = None
        self._leave_by: float | None = None
        self._blocked: set[int] = set()
        self._poller = zmq.Poller()
        self._inputs: dict[Any, Input] = {entry.socket: entry for entry in session.inputs}
        for socket in self._inputs:
            self._poller.register(socket, zmq.POLLIN)
        for monitor in session.monitors:
            self._poller.register(monitor.events, zmq.POLLIN)
        if session.startup is not None:
            self._poller.register(session.startup.monitor.events, zmq.POLLIN)
        self._poller.register(stop.fileno(), zmq.POLLIN)

    def run(self) -> Ending:
        """Serve until a signal has been obeyed or the frontend is gone."""
        while True:
            now = self._clock()
            if self._stop.requested and self._leave_by is None:
                self._begin_leaving(now)
            if self._has_left(now):
                return Ending.STOPPED
            if self._lost_since is not None and now >= self._lost_since + self._grace_s:
                return Ending.FRONTEND_LOST
            self._take_in(dict(self._poller.poll(self._patience_ms(now))))
            now = self._clock()
            if self._session.startup is not None and now >= self._startup_reminder:
                self._reporter.frontend_starting(now - self._started)
                self._startup_reminder = now + _STARTUP_REMINDER_S
            deadline = self._ranks.next_deadline(now, self._blocked)
            if deadline is not None and deadline <= now:
                self._send(self._ranks.step(now, self._blocked))

    # In.

    def _take_in(self, readable: dict[Any, int]) -> None:
        if self._stop.fileno() in readable:
            self._stop.clear_wakeup()
        for socket, entry in self._inputs.items():
            if socket in readable:
                self._drain(entry)
        if any(monitor.events in readable for monitor in self._session.monitors):
            self._look_for_frontend()
        startup = self._session.startup
        if startup is not None and startup.monitor.events in readable:
            startup.monitor.read()
            if startup.monitor.was_lost:
                self._poller.unregister(startup.monitor.events)
                self._session.end_startup()
        if self._blocked:
            self._flush()

    def _drain(self, entry: Input) -> None:
        engine = self._ranks.engines[entry.rank]
        client = COORDINATOR if entry.client is None else entry.client
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = entry.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if entry.client is None and frames == [COORDINATOR_READY]:
                continue
            self._send(engine.receive(read_message(frames, client), client, self._clock()))

    def _look_for_frontend(self) -> None:
        if self._session.is_connected:
            self._lost_since = None
        elif self._lost_since is None and any(
            monitor.was_lost and not monitor.connected for monitor in self._session.monitors
        ):
            self._lost_since = self._clock()

    # Out.

    def _send(self, outbound: list[Outbound]) -> None:
        for message in outbound:
            if message.destination == COORDINATOR:
                if self._session.coordinator is not None:
                    self._session.coordinator.send(message.frames)
                continue
            outbox = self._session.outputs[message.destination]
            outbox.send(message.frames)
            if outbox.is_blocked and message.destination not in self._blocked:
                self._blocked.add(message.destination)
                self._poller.register(outbox.socket, zmq.POLLOUT)

    def _flush(self) -> None:
        for client in list(self._blocked):
            outbox = self._session.outputs[client]
            outbox.flush()
            if not outbox.is_blocked:
                self._blocked.remove(client)
                self._poller.unregister(outbox.socket)

    # Time.

    def _patience_ms(self, now: float) -> int | None:
        """Return how long to sleep at most; None is until something arrives."""
        moments = [
            self._ranks.next_deadline(now, self._blocked),
            None if self._lost_since is None else self._lost_since + self._grace_s,
            self._leave_by,
            None if self._session.startup is None else self._startup_reminder,
        ]
        due = [moment for moment in moments if moment is not None]
        return max(0, ceil(1_000 * (min(due) - now))) if due else None

    # Leaving.

    def _begin_leaving(self, now: float) -> None:
        self._leave_by = now + self._drain_s
        self._reporter.leaving(self._stop.signal_name or "", self._ranks.num_requests, self._drain_s)
        self._ranks.begin_shutdown()

    def _has_left(self, now: float) -> bool:
        """Once time is up or nothing runs any more, end the rest; tell whether leaving is done."""
        if self._leave_by is None or (now < self._leave_by and self._ranks.num_requests):
            return False
        # What has arrived meanwhile is answered too, so that no client waits for an engine that is gone.
        self._take_in(dict(self._poller.poll(0)))
        self._send(self._ranks.abort_everything(now))
        while self._ranks.next_deadline(now, self._blocked) is not None:
            self._send(self._ranks.step(now, self._blocked))
        return True
