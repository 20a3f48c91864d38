# SPDX-License-Identifier: Apache-2.0
"""How each kind of socket is made (protocol section 1.1), and how the loss of its peer is seen."""

import resource
import socket as kernel
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# As in a real engine.
_UNLIMITED: Final = 0
# What the kernel may hold of what is sent, before messages wait here: whoever waits for the last of it waits for this.
_SEND_BUFFER_BYTES: Final = 2**18
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


def make_socket(context: Context, kind: int, address: str, identity: bytes | None = None) -> Socket:
    """Make a socket for `address`; the caller connects or binds it, after a monitor is attached or not.

    Args:
        context: the process's context.
        kind: of ZMQ's kinds, such as `zmq.DEALER`.
        address: `tcp://…` or `ipc://…`.
        identity: of the rank, where the peer addresses ranks.

    """
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(_UNLIMITED)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
    return socket


def set_up_tcp(made: kernel.socket) -> None:
    """Give a socket of the kernel what `make_socket` gives one of ZMQ, and have it send at once what it gets."""
    made.setsockopt(kernel.IPPROTO_TCP, kernel.TCP_NODELAY, 1)
    made.setsockopt(kernel.SOL_SOCKET, kernel.SO_SNDBUF, _SEND_BUFFER_BYTES)
    made.setsockopt(kernel.SOL_SOCKET, kernel.SO_KEEPALIVE, 1)
    made.setsockopt(kernel.IPPROTO_TCP, kernel.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    made.setsockopt(kernel.IPPROTO_TCP, kernel.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    made.setsockopt(kernel.IPPROTO_TCP, kernel.TCP_KEEPCNT, _KEEPALIVE_PROBES)


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
