# SPDX-License-Identifier: Apache-2.0
"""How each kind of socket is made (protocol section 1.1), and how the loss of its peer is seen."""

import resource
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_UNLIMITED: Final = 0
# Messages that libzmq may hold for a frontend that does not read: few, since it knows nothing of bytes. What it does
# not take waits in the outbox, which does.
OUTPUT_HIGH_WATER_MARK: Final = 16
# libzmq allows 1023 by default; 64 ranks with as many API servers need 4096 inputs.
MAX_SOCKETS: Final = 65_535
# A frontend whose machine vanished sends no FIN; the kernel finds out within half a minute or so.
_KEEPALIVE_IDLE_S: Final = 15
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3

_UP = frozenset({zmq.Event.HANDSHAKE_SUCCEEDED})
_DOWN = frozenset({zmq.Event.DISCONNECTED})
# TCP or the file of a Unix socket; whether the other side speaks ZMQ is not known yet.
_REACHED = frozenset({zmq.Event.CONNECTED})


def make_context() -> Context:
    """Make the context of the process, with room for as many sockets as ranks and clients can need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A socket costs up to three descriptors.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 3 * MAX_SOCKETS)), hard))
    context = Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def make_socket(
    context: Context, kind: int, address: str, identity: bytes | None = None, high_water_mark: int = _UNLIMITED
) -> Socket:
    """Make a socket that is to connect to `address`; the caller connects it, after a monitor is attached or not.

    Args:
        context: the process's context.
        kind: `zmq.DEALER`, `zmq.PUSH` or `zmq.XSUB`.
        address: `tcp://…` or `ipc://…`.
        identity: of the rank, where the peer addresses ranks.
        high_water_mark: messages held when the peer does not read; 0 is unlimited, as in a real engine.

    """
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(high_water_mark)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
    return socket


class PeerMonitor:
    """Whether the peer of one connecting socket is there.

    Attributes:
        events: the socket to poll for news; then call `read`.
        connected: whether the connection stands now.
        was_lost: whether a standing connection has ever broken.
        was_reached: whether something has ever accepted a connection, be it a ZMQ socket or not.
        was_connected: whether that has ever been a ZMQ socket.

    """

    def __init__(self, socket: Socket) -> None:
        wanted = _UP | _DOWN | _REACHED
        self.events: zmq.Socket[Any] = socket.get_monitor_socket(sum(wanted))
        self.connected = False
        self.was_lost = False
        self.was_reached = False
        self.was_connected = False
        self._socket = socket

    def read(self) -> None:
        """Take in what has happened since the last call."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart())["event"]
            if event in _UP:
                self.connected = self.was_connected = True
            elif event in _DOWN:
                self.was_lost = self.was_lost or self.connected
                self.connected = False
            else:
                self.was_reached = True

    def close(self) -> None:
        """Stop watching."""
        self._socket.disable_monitor()
        self.events.close(0)
