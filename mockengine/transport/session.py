# SPDX-License-Identifier: Apache-2.0
"""The sockets that tie the ranks of this process to one frontend."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

import zmq

from mockengine.transport.outbox import Outbox
from mockengine.transport.sockets import Context, PeerMonitor, Socket, make_socket
from mockengine.wire.handshake import Init, engine_identity
from mockengine.wire.messages import COORDINATOR_SUBSCRIBE

# Whoever watches the engine sees that it goes on although it waits for somebody to read.
_TURN_S: Final = 0.25
# Nothing tells that the kernel has sent the last of it.
_LAST_BYTES_S: Final = 0.005


class FlushReporter(Protocol):
    """Hears that flushing goes on."""

    def turned(self, now: float) -> None:
        """Hear it, now and then."""


@dataclass(frozen=True, slots=True)
class Input:
    """A socket that messages for one rank arrive on.

    Attributes:
        rank: position of the rank among those of this process.
        client: index of the API server at the other end; None is the coordinator.
        socket: a DEALER, or an XSUB towards the coordinator.
        address: that it is connected to.
        introduction: what it says first on every connection.

    """

    rank: int
    client: int | None
    socket: Socket
    address: str
    introduction: bytes


@dataclass(frozen=True, slots=True)
class Handshake:
    """One rank's handshake socket, on which it has said all that it had to say.

    A frontend closes its end when it has heard READY from every rank it counts on. The socket must then be closed at
    once and without lingering: it would connect again, and say to the next frontend, in the name of the rank, what was
    meant for this one.
    """

    socket: Socket
    monitor: PeerMonitor

    def close(self) -> None:
        """Close it; what has not been sent is dropped."""
        self.monitor.close()
        self.socket.close(0)


class Session:
    """One frontend's sockets: an input per rank and client, an output per client, two to its coordinator if it has one.

    Ranks share the outputs, since what they send says itself which rank it is from. The first rank's inputs are
    watched for the loss of the frontend: all ranks' inputs end at the same sockets.

    Attributes:
        init: the addresses this session is about.
        inputs: all sockets to read.
        outputs: by client index.
        coordinator: towards the coordinator, or None.
        monitors: of the first rank's inputs, by client index.
        handshakes: of each rank, until the frontend has closed its end.
        is_resumed: whether the frontend was served by an engine before this one, which was killed.

    """

    def __init__(self, context: Context, init: Init, limit_bytes: int) -> None:
        """Open nothing yet.

        Args:
            context: the process's context.
            init: what the frontend said.
            limit_bytes: what may wait for a client that does not read before its requests wait too.

        """
        self.init = init
        self.inputs: list[Input] = []
        self.outputs: list[Outbox] = []
        self.coordinator: Outbox | None = None
        self.monitors: list[PeerMonitor] = []
        self.handshakes: list[Handshake] = []
        self.is_resumed = False
        self._context = context
        self._limit_bytes = limit_bytes

    def open_outputs(self) -> None:
        """Begin to connect what all ranks share.

        Raises:
            AddressError: an address that nothing can be sent to.

        """
        self.outputs += [Outbox(address, self._limit_bytes) for address in self.init.outputs]
        if self.init.coordinator_output is not None:
            self.coordinator = Outbox(self.init.coordinator_output, self._limit_bytes)
        for outbox in self.outboxes:
            outbox.advance(time.monotonic())

    def are_of_rust(self, most_s: float) -> bool:
        """Wait for so long at most until all outputs have told what they are; tell whether that is a Rust frontend."""
        end = time.monotonic() + most_s
        poller = zmq.Poller()
        for outbox in self.outputs:
            outbox.watch(poller)
        while any(outbox.is_of_rust is None for outbox in self.outputs) and (now := time.monotonic()) < end:
            if poller.sockets:
                poller.poll(ceil(1_000 * (end - now)))
            else:
                time.sleep(_LAST_BYTES_S)
            for outbox in self.outputs:
                outbox.advance(time.monotonic())
        return all(outbox.is_of_rust for outbox in self.outputs)

    def add_rank(self, position: int, rank: int, ready_response: bytes) -> Socket | None:
        """Connect one rank and introduce it to every client, before anything else is said on its sockets.

        Args:
            position: of the rank among those of this process.
            rank: its engine index.
            ready_response: what it says of itself.

        Returns:
            The socket on which the coordinator will give the go-ahead, subscribed, or None without a coordinator.

        Raises:
            zmq.ZMQError: an address that cannot be connected to.

        """
        identity = engine_identity(rank)
        for client, address in enumerate(self.init.inputs):
            socket = make_socket(self._context, zmq.DEALER, address, identity)
            self.inputs.append(Input(position, client, socket, address, ready_response))
            if position == 0:
                self.monitors.append(PeerMonitor(socket))
            socket.connect(address)
            socket.send(ready_response)
        if self.init.coordinator_input is None:
            return None
        socket = make_socket(self._context, zmq.XSUB, self.init.coordinator_input, identity)
        self.inputs.append(Input(position, None, socket, self.init.coordinator_input, COORDINATOR_SUBSCRIBE))
        socket.connect(self.init.coordinator_input)
        socket.send(COORDINATOR_SUBSCRIBE)
        return socket

    @property
    def outboxes(self) -> Iterator[Outbox]:
        """All ways out."""
        yield from self.outputs
        if self.coordinator is not None:
            yield self.coordinator

    def look(self) -> None:
        """Take in what has happened to the connections; the properties below tell what was seen."""
        for monitor in self.monitors:
            monitor.read()

    @property
    def connected_clients(self) -> list[int]:
        """Clients that are there."""
        return [client for client, monitor in enumerate(self.monitors) if monitor.connected]

    @property
    def is_connected(self) -> bool:
        """Whether every client is there."""
        return len(self.connected_clients) == len(self.init.inputs)

    @property
    def was_lost(self) -> bool:
        """Whether a client that was there has gone, for a while or for good."""
        return any(monitor.was_lost for monitor in self.monitors)

    def disconnect(self, until: float) -> None:
        """Break every connection; ways out connect again at that time, and ways in when `reconnect` is called."""
        for entry in self.inputs:
            entry.socket.disconnect(entry.address)
        for outbox in self.outboxes:
            outbox.interrupt(until)

    def reconnect(self) -> None:
        """Connect the ways in again, and introduce the ranks as at first."""
        for entry in self.inputs:
            if not entry.socket.closed:
                entry.socket.connect(entry.address)
                entry.socket.send(entry.introduction)

    def announce(self, frames: Sequence[bytes]) -> None:
        """Send one message to every client."""
        for outbox in self.outputs:
            outbox.send([frames])

    def flush(self, most_s: float, reporter: FlushReporter) -> bool:
        """Send what waits for peers that do not read, as far as they do within `most_s`; tell whether all has left."""
        end = time.monotonic() + most_s
        poller = zmq.Poller()
        for outbox in self.outboxes:
            outbox.watch(poller)
        while waiting := [outbox for outbox in self.outboxes if not outbox.has_left]:
            now = time.monotonic()
            reporter.turned(now)
            if now >= end:
                return False
            moments = [outbox.deadline for outbox in waiting if outbox.deadline is not None]
            patience_s = _TURN_S if any(outbox.has_pending for outbox in waiting) else _LAST_BYTES_S
            patience_s = max(0, min(patience_s, min(moments, default=end) - now, end - now))
            if poller.sockets:
                poller.poll(ceil(1_000 * patience_s))
            else:
                # No connection stands, and a poller without anything to wait for does not wait.
                time.sleep(patience_s)
            for outbox in self.outboxes:
                outbox.advance(time.monotonic())
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close everything; what ranks have said may still leave for up to `linger_ms` while the context ends."""
        for handshake in self.handshakes:
            handshake.close()
        for monitor in self.monitors:
            monitor.close()
        for entry in self.inputs:
            entry.socket.close(linger_ms)
        for outbox in self.outboxes:
            outbox.close()
