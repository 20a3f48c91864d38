# SPDX-License-Identifier: Apache-2.0
"""The sockets that tie the ranks of this process to one frontend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from mockengine.transport.outbox import Outbox
from mockengine.transport.sockets import OUTPUT_HIGH_WATER_MARK, Context, PeerMonitor, Socket, make_socket
from mockengine.wire.handshake import Init, engine_identity
from mockengine.wire.messages import COORDINATOR_SUBSCRIBE


@dataclass(frozen=True, slots=True)
class Input:
    """A socket that messages for one rank arrive on.

    Attributes:
        rank: position of the rank among those of this process.
        client: index of the API server at the other end; None is the coordinator.
        socket: a DEALER, or an XSUB towards the coordinator.

    """

    rank: int
    client: int | None
    socket: Socket


@dataclass(frozen=True, slots=True)
class StartupWatch:
    """The first rank's handshake socket after READY.

    A frontend closes its end when its start-up is complete, that is when it has heard READY from every rank it counts
    on. Until then it serves nobody. The socket must be closed at once when that happens: it would connect again, and
    take the rank's place in the handshake of the next frontend.

    Attributes:
        socket: on which nothing more is said.
        monitor: tells when the frontend has closed its end.
        linger_ms: how long READY may take to leave, should the watch end before.

    """

    socket: Socket
    monitor: PeerMonitor
    linger_ms: int

    def close(self) -> None:
        """Stop watching."""
        self.monitor.close()
        self.socket.close(self.linger_ms)


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
        startup: as long as the frontend may still be starting.

    """

    def __init__(self, context: Context, init: Init) -> None:
        self.init = init
        self.inputs: list[Input] = []
        self.monitors: list[PeerMonitor] = []
        self.startup: StartupWatch | None = None
        self._context = context
        self.outputs = [self._outbox(address) for address in init.outputs]
        self.coordinator = self._outbox(init.coordinator_output) if init.coordinator_output is not None else None

    def add_rank(self, position: int, rank: int, ready_response: bytes) -> Socket | None:
        """Connect one rank and introduce it to every client, before anything else is said on its sockets.

        Args:
            position: of the rank among those of this process.
            rank: its engine index.
            ready_response: what it says of itself.

        Returns:
            The socket on which the coordinator will give the go-ahead, subscribed, or None without a coordinator.

        """
        identity = engine_identity(rank)
        for client, address in enumerate(self.init.inputs):
            socket = make_socket(self._context, zmq.DEALER, address, identity)
            if position == 0:
                self.monitors.append(PeerMonitor(socket))
            socket.connect(address)
            socket.send(ready_response)
            self.inputs.append(Input(position, client, socket))
        if self.init.coordinator_input is None:
            return None
        socket = make_socket(self._context, zmq.XSUB, self.init.coordinator_input, identity)
        socket.connect(self.init.coordinator_input)
        socket.send(COORDINATOR_SUBSCRIBE)
        self.inputs.append(Input(position, None, socket))
        return socket

    @property
    def outboxes(self) -> Iterator[Outbox]:
        """All ways out."""
        yield from self.outputs
        if self.coordinator is not None:
            yield self.coordinator

    @property
    def is_connected(self) -> bool:
        """Whether the frontend is there, as far as has been noticed."""
        for monitor in self.monitors:
            monitor.read()
        return all(monitor.connected for monitor in self.monitors)

    def announce(self, frames: Sequence[bytes]) -> None:
        """Send one message to every client."""
        for outbox in self.outputs:
            outbox.send(frames)

    def close(self, linger_ms: int = 0) -> None:
        """Close everything; what was sent may still leave for up to `linger_ms`."""
        self.end_startup()
        for monitor in self.monitors:
            monitor.close()
        for entry in self.inputs:
            entry.socket.close(linger_ms)
        for outbox in self.outboxes:
            outbox.close(linger_ms)

    def end_startup(self) -> None:
        """Stop watching the frontend's start-up."""
        if self.startup is not None:
            self.startup.close()
            self.startup = None

    def _outbox(self, address: str) -> Outbox:
        socket = make_socket(self._context, zmq.PUSH, address, high_water_mark=OUTPUT_HIGH_WATER_MARK)
        socket.connect(address)
        return Outbox(socket)
