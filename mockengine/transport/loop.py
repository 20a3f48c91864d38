# SPDX-License-Identifier: Apache-2.0
"""The loop: drain what arrived, step what is due, send, sleep until the next deadline or arrival.

One thread runs every rank of the process. What arrives is drained for a bounded time per turn, and sockets take turns,
so that a flood of requests keeps neither running requests from stepping nor other clients from being heard. While
nothing is due the loop sleeps without waking up.
"""

import time
from collections.abc import Callable
from enum import Enum, auto
from math import floor
from typing import Any, Final, Protocol

import zmq

from mockengine.engine.outgoing import COORDINATOR, Outbound
from mockengine.engine.ranks import Ranks
from mockengine.transport.calamities import Calamities
from mockengine.transport.outbox import Outbox
from mockengine.transport.presence import Presence
from mockengine.transport.session import Input, Session
from mockengine.transport.stop import StopSignal
from mockengine.wire.messages import COORDINATOR_READY, read_message

# Longest time that arrivals may keep running requests waiting, but for the one message that exceeds it.
_DRAIN_S: Final = 0.005
# Longest time that steps may keep arrivals waiting, but for the one step that exceeds it.
_STEPPING_S: Final = 0.001
# Steps without a pace that are made and sent together, by all ranks that have any to make.
_MOST_STEPS: Final = 512
_MILLISECOND_S: Final = 0.001
# What was sent before a signal may still be on its way to the sockets: leaving waits for a silence this long.
_SILENCE_MS: Final = 100
# Longest time that leaving spends on what arrived before it.
_LAST_DRAIN_S: Final = 3.0


class Ending(Enum):
    """Why the loop ended."""

    STOPPED = auto()
    FRONTEND_LOST = auto()


class LoopReporter(Protocol):
    """Hears how the loop goes, and how it ends."""

    def turned(self, now: float) -> None:
        """Hear that the loop goes on, once per turn."""

    def stepped(self, steps: int, lateness_s: float) -> None:
        """Hear that so many steps were made at once, so long after they were due."""

    def client_stalled(self, client: int, buffered_bytes: int) -> None:
        """Hear that a client does not read and makes its requests wait."""

    def output_refused(self, client: int | None, reason: str) -> None:
        """Hear that what listens where a client (None: the coordinator) should is none; said once."""

    def leaving(self, signal_name: str | None, in_flight: int, drain_s: float) -> None:
        """Hear that a signal asked to stop, with `in_flight` requests that have `drain_s` seconds left."""


class Loop:
    """Runs the ranks of this process for one frontend."""

    def __init__(  # noqa: PLR0913 - whatever takes turns comes together here
        self,
        session: Session,
        ranks: Ranks,
        presence: Presence,
        stop: StopSignal,
        poller: zmq.Poller,
        reporter: LoopReporter,
        calamities: Calamities,
        *,
        drain_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Set up the loop.

        Args:
            session: the frontend's sockets.
            ranks: in the order in which the session knows them.
            presence: tells when the frontend is gone.
            stop: the wish to stop.
            poller: what the loop sleeps in; `presence` has its sockets there already.
            reporter: hears of every turn and of the end.
            calamities: what happens to the engine as a whole on purpose.
            drain_s: how long requests may go on after a signal; 0 aborts them at once.
            clock: monotonic, in seconds.

        """
        self._ranks = ranks
        self._presence = presence
        self._stop = stop
        self._poller = poller
        self._reporter = reporter
        self._calamities = calamities
        self._drain_s = drain_s
        self._clock = clock
        self._inputs = session.inputs
        self._next_input = 0
        self._outboxes: dict[int, Outbox] = dict(enumerate(session.outputs))
        if session.coordinator is not None:
            self._outboxes[COORDINATOR] = session.coordinator
        # Destinations that take no more for now.
        self._blocked: set[int] = set()
        # Those of which it has been told that what listens there cannot be spoken to.
        self._refused: set[int] = set()
        self._leave_by: float | None = None
        # When the next step was due, as far as was known before the last sleep.
        self._due: float | None = None
        for entry in self._inputs:
            poller.register(entry.socket, zmq.POLLIN)
        poller.register(stop.fileno(), zmq.POLLIN)
        for outbox in self._outboxes.values():
            outbox.watch(poller)
        calamities.begin(poller, self._clock())

    def run(self) -> Ending:
        """Serve until a signal has been obeyed or the frontend is gone."""
        while True:
            now = self._clock()
            self._reporter.turned(now)
            if self._stop.requested and self._leave_by is None:
                self._begin_leaving(now)
            if self._leave_by is not None and (now >= self._leave_by or not self._ranks.can_go_on):
                self._finish_leaving()
                return Ending.STOPPED
            readable = self._sleep(now)
            self._presence.look(readable, self._clock())
            if self._presence.loss is not None:
                return Ending.FRONTEND_LOST
            self._take_in(readable)
            self._calamities.turn(self._clock())
            self._step_while_due()

    # In.

    def _take_in(self, readable: dict[Any, int]) -> None:
        if self._stop.fileno() in readable:
            self._stop.clear_wakeup()
        now = self._clock()
        self._let_out(readable, now)
        end = now + _DRAIN_S
        for _ in self._inputs:
            entry = self._inputs[self._next_input]
            self._next_input = (self._next_input + 1) % len(self._inputs)
            if entry.socket in readable and not self._drain(entry, end):
                return

    def _drain(self, entry: Input, end: float) -> bool:
        """Take in what arrived on one socket, at least one message; tell whether that was all before `end`."""
        engine = self._ranks.engines[entry.rank]
        client = COORDINATOR if entry.client is None else entry.client
        while True:
            try:
                frames = entry.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            now = self._clock()
            if entry.client is not None or frames != [COORDINATOR_READY]:
                self._send(engine.receive(read_message(frames, client), client, now))
            if now >= end:
                return False

    # Out.

    def _step_while_due(self) -> None:
        """Make the step that is due, and those that are due at once after it, as long as arrivals may wait for them."""
        now = self._clock()
        end = now + _STEPPING_S
        while (deadline := self._ranks.next_deadline(now, self._blocked)) is not None and deadline <= now:
            lateness_s = now - (deadline if self._due is None else min(deadline, self._due))
            self._due = None
            outbound = self._ranks.step(now, self._blocked, self._most_steps())
            self._reporter.stepped(max((len(each.messages) for each in outbound), default=1), lateness_s)
            self._send(outbound)
            now = self._clock()
            if now >= end:
                return

    def _most_steps(self) -> int:
        """Return how many steps each rank may make at once: 64 full bursts would keep arrivals waiting for a second."""
        busy = sum(1 for engine in self._ranks.engines if engine.num_requests)
        return max(1, _MOST_STEPS // max(1, busy))

    def _send(self, outbound: list[Outbound]) -> None:
        for message in outbound:
            outbox = self._outboxes[message.destination]
            outbox.send(message.messages)
            if outbox.is_blocked and message.destination not in self._blocked:
                self._blocked.add(message.destination)
                if message.destination != COORDINATOR:
                    self._reporter.client_stalled(message.destination, outbox.buffered_bytes)

    def _let_out(self, readable: dict[Any, int], now: float) -> None:
        """Send what waits, to those who read again; mend what has broken."""
        for destination, outbox in self._outboxes.items():
            if outbox.is_in(readable) or (outbox.deadline is not None and now >= outbox.deadline):
                outbox.advance(now)
                if outbox.refusal is not None and destination not in self._refused:
                    self._refused.add(destination)
                    self._reporter.output_refused(None if destination == COORDINATOR else destination, outbox.refusal)
                if not outbox.is_blocked:
                    self._blocked.discard(destination)

    # Time.

    def _sleep(self, now: float) -> dict[Any, int]:
        """Sleep until the next deadline or arrival; return what arrived."""
        patience_s = self._patience_s(now)
        if patience_s is None:
            return dict(self._poller.poll())
        whole_ms = floor(1_000 * patience_s)
        if whole_ms > 0:
            readable = dict(self._poller.poll(whole_ms))
            patience_s -= self._clock() - now
            if readable or patience_s > _MILLISECOND_S:
                return readable
        if patience_s > 0:
            # The poller knows whole milliseconds only; what arrives in the rest of one can wait.
            time.sleep(patience_s)
        return dict(self._poller.poll(0))

    def _patience_s(self, now: float) -> float | None:
        """Return how long to sleep at most; None is until something arrives."""
        self._due = self._ranks.next_deadline(now, self._blocked)
        moments = (
            self._due,
            self._presence.next_deadline(),
            self._calamities.next_deadline(now),
            self._leave_by,
            *[outbox.deadline for outbox in self._outboxes.values()],
        )
        due = [moment for moment in moments if moment is not None]
        return min(due) - now if due else None

    # Leaving.

    def _begin_leaving(self, now: float) -> None:
        self._leave_by = now + self._drain_s
        self._reporter.leaving(self._stop.signal_name, self._ranks.num_requests, self._drain_s)
        self._ranks.begin_shutdown()

    def _finish_leaving(self) -> None:
        """Answer what has arrived meanwhile, so that no client waits for an engine that is gone; then end the rest."""
        # Of the inputs alone: other news must not cut the silence short.
        poller = zmq.Poller()
        for entry in self._inputs:
            poller.register(entry.socket, zmq.POLLIN)
        end = self._clock() + _LAST_DRAIN_S
        while self._clock() < end and (readable := dict(poller.poll(_SILENCE_MS))):
            self._take_in(readable)
        now = self._clock()
        self._send(self._ranks.abort_everything(now))
        while (deadline := self._ranks.next_deadline(now, self._blocked)) is not None and deadline <= now:
            self._send(self._ranks.step(now, self._blocked))
