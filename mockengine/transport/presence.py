# SPDX-License-Identifier: Apache-2.0
"""Whether the frontend is still there: the only thing that tells is the state of connections.

Three stages:

1. *Starting.* Its handshake stays open until it has heard READY from every rank it counts on; then its API servers
   bind their sockets, which can take half a minute more.
2. *Serving.* All its clients are connected.
3. *Lost.* A client's connection broke and has not come back within the grace period.

A frontend that ends while it is starting, or is replaced before its loss is noticed, breaks no connection that could be
seen. But a frontend's handshake address is open only while it starts, so while there is doubt the address is probed,
without a word and under no rank's name: once it is open again, the next frontend is waiting there.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import zmq

from mockengine.transport.session import Session
from mockengine.transport.sockets import Context, PeerMonitor, Socket, make_socket

_FIRST_REMINDER_S: Final = 10.0
_REMINDER_S: Final = 30.0
# vLLM's own limit for engines to become ready (VLLM_ENGINE_READY_TIMEOUT_S): nothing that starts takes longer.
_STARTUP_LIMIT_S: Final = 600.0
# A new frontend opens its handshake address within this time of opening any other.
_LEAST_DOUBT_S: Final = 1.0


class PresenceReporter(Protocol):
    """Hears of a frontend that does not come up."""

    def frontend_starting(self, waited_s: float, open_handshakes: int, unreachable: Sequence[str]) -> None:
        """Hear that the frontend has not completed its start-up although every rank here is ready.

        Args:
            waited_s: since every rank is ready, in seconds.
            open_handshakes: number of ranks whose handshake the frontend holds open.
            unreachable: input addresses that are not connected.

        """


class Presence:
    """Watches one frontend.

    Attributes:
        loss: why the frontend counts as gone, or None.
        is_replaced: whether the next frontend is there already, perhaps behind the same addresses.

    """

    def __init__(
        self,
        context: Context,
        session: Session,
        handshake_address: str,
        reporter: PresenceReporter,
        poller: zmq.Poller,
        *,
        grace_s: float,
        now: float,
    ) -> None:
        """Begin to watch.

        Args:
            context: the process's context.
            session: the frontend's sockets.
            handshake_address: where the next frontend will wait.
            reporter: hears of a frontend that does not come up.
            poller: gets the sockets to watch.
            grace_s: how long a broken connection may take to come back.
            now: the time, in seconds of the monotonic clock.

        """
        self.loss: str | None = None
        self.is_replaced = False
        self._context = context
        self._session = session
        self._address = handshake_address
        self._reporter = reporter
        self._poller = poller
        self._grace_s = grace_s
        self._started = now
        self._next_reminder: float | None = now + _FIRST_REMINDER_S
        self._lost_since: float | None = None
        self._doubt_until: float | None = None
        self._was_complete = False
        self._probe: tuple[Socket, PeerMonitor] | None = None
        for monitor in self._watched():
            poller.register(monitor.events, zmq.POLLIN)
        # What has happened before leaves no event for the poller.
        session.look()
        self._note_connections(now)
        self._keep_probing(now)

    def look(self, readable: dict[Any, int], now: float) -> None:
        """Take in what the poller saw, and what the time says."""
        if any(monitor.events in readable for monitor in self._watched()):
            self._session.look()
            self._close_ended_handshakes()
            self._note_connections(now)
        if self._probe is not None and self._probe[1].events in readable:
            self._probe[1].read()
            if self._probe[1].connected:
                self.is_replaced = True
                self.loss = "another frontend waits at the handshake address"
        self._keep_probing(now)
        self._judge(now)

    def next_deadline(self) -> float | None:
        """Return when `look` is to be called although nothing has happened."""
        moments = (
            self._next_reminder,
            None if self._lost_since is None else self._lost_since + self._grace_s,
            self._doubt_until,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def close(self) -> None:
        """Stop watching."""
        for monitor in self._watched():
            self._poller.unregister(monitor.events)
        self._end_probe()

    def _watched(self) -> list[PeerMonitor]:
        return [*self._session.monitors, *(handshake.monitor for handshake in self._session.handshakes)]

    def _close_ended_handshakes(self) -> None:
        for handshake in list(self._session.handshakes):
            handshake.monitor.read()
            if handshake.monitor.was_lost:
                self._poller.unregister(handshake.monitor.events)
                handshake.close()
                self._session.handshakes.remove(handshake)

    def _note_connections(self, now: float) -> None:
        if self._session.is_connected:
            if self._lost_since is not None:
                # It may be another frontend on the same ports, which would wait for its engines in vain.
                self._doubt_until = now + max(self._grace_s, _LEAST_DOUBT_S)
            self._lost_since = None
        elif self._lost_since is None and self._session.was_lost:
            self._lost_since = now
        if not self._was_complete and self._session.is_connected and not self._session.handshakes:
            self._was_complete = True
            self._next_reminder = None

    def _keep_probing(self, now: float) -> None:
        if self._doubt_until is not None and now >= self._doubt_until:
            self._doubt_until = None
        is_in_doubt = self._doubt_until is not None or not self._session.is_connected
        if not is_in_doubt or self._session.handshakes:
            self._end_probe()
        elif self._probe is None:
            socket = make_socket(self._context, zmq.DEALER, self._address)
            self._probe = (socket, PeerMonitor(socket))
            self._poller.register(self._probe[1].events, zmq.POLLIN)
            socket.connect(self._address)

    def _end_probe(self) -> None:
        if self._probe is not None:
            socket, monitor = self._probe
            self._poller.unregister(monitor.events)
            monitor.close()
            socket.close(0)
            self._probe = None

    def _judge(self, now: float) -> None:
        if self._lost_since is not None and now >= self._lost_since + self._grace_s:
            self.loss = "the connection to the frontend is gone"
        if self._next_reminder is None or now < self._next_reminder:
            return
        self._next_reminder = now + _REMINDER_S
        connected = self._session.connected_clients
        addresses = self._session.init.inputs
        unreachable = [address for client, address in enumerate(addresses) if client not in connected]
        if now >= self._started + _STARTUP_LIMIT_S and unreachable:
            self.loss = f"its input sockets were never reached within {_STARTUP_LIMIT_S:g} s: {', '.join(unreachable)}"
        else:
            self._reporter.frontend_starting(now - self._started, len(self._session.handshakes), unreachable)
