# SPDX-License-Identifier: Apache-2.0
"""Tells a frontend whose engine was killed that its requests are lost.

Such a frontend does not notice (protocol section 10): it answers 200 on /health while every request hangs, and it
takes no other engine. What it listens to is its output sockets, on which anybody may say that the engine is dead.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, Final

import zmq

from mockengine.transport.sockets import Context, PeerMonitor, Socket, make_socket

# A frontend that starts opens its handshake address within this time of opening any other.
_LEAST_DOUBT_S: Final = 1.0
_LINGER_MS: Final = 1_000


class AbandonedFrontend:
    """The frontend that an engine before this one served, as long as it may still wait for that one.

    It is looked for while its successor is waited for. A frontend keeps its handshake address open only while it
    starts, so while one is open there, nobody is told anything: whoever listens at the old addresses is the next one.

    """

    def __init__(
        self, context: Context, outputs: Sequence[str], notice: Sequence[bytes], on_told: Callable[[], None]
    ) -> None:
        """Begin to look for it.

        Args:
            context: the process's context.
            outputs: the addresses that it gave to the engine before this one.
            notice: the frames to send to each of them.
            on_told: called when it has been told.

        """
        self._notice = notice
        self._on_told = on_told
        self._sockets: list[Socket] = []
        self._monitors: list[PeerMonitor] = []
        self._there_since: float | None = None
        for address in outputs:
            socket = make_socket(context, zmq.PUSH, address)
            self._sockets.append(socket)
            self._monitors.append(PeerMonitor(socket))
            # An address that is none is reached by nobody; what remembered it may have been damaged.
            with suppress(zmq.ZMQError, UnicodeError):
                socket.connect(address)

    @property
    def events(self) -> list[zmq.Socket[Any]]:
        """Sockets to poll for news; then call `look`."""
        return [monitor.events for monitor in self._monitors]

    def next_deadline(self) -> float | None:
        """Return when `look` is to be called although nothing has happened."""
        return None if self._there_since is None else self._there_since + _LEAST_DOUBT_S

    def look(self, now: float, *, another_starts: bool) -> None:
        """Take in what has happened, and tell the frontend if it is there and no other one starts."""
        for monitor in self._monitors:
            monitor.read()
        is_there = [monitor.connected for monitor in self._monitors]
        if not any(is_there) or another_starts:
            self._there_since = None
        elif self._there_since is None:
            self._there_since = now
        elif now >= self._there_since + _LEAST_DOUBT_S:
            # One of its API servers may have gone before.
            for socket in compress(self._sockets, is_there):
                socket.send_multipart(self._notice)
            self._on_told()
            self.close(_LINGER_MS)

    def close(self, linger_ms: int = 0) -> None:
        """Look no longer; what was said may still leave for `linger_ms`."""
        for monitor in self._monitors:
            monitor.close()
        for socket in self._sockets:
            socket.close(linger_ms)
        self._monitors.clear()
        self._sockets.clear()
        self._there_since = None
