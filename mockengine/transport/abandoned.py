# SPDX-License-Identifier: Apache-2.0
"""Finds a frontend whose engine was killed, and tells it that its requests are lost, if nothing better can be done.

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
# A Rust frontend opens its handshake address first.
_LITTLE_DOUBT_S: Final = 0.5
_LINGER_MS: Final = 1_000


class AbandonedFrontend:
    """The frontend that an engine before this one served, as long as it may still wait for that one.

    It is looked for while its successor is waited for. A frontend keeps its handshake address open only while it
    starts, so while one is open there, nobody is told anything: whoever listens at the old addresses is the next one.

    """

    def __init__(
        self, context: Context, outputs: Sequence[str], notice: Sequence[bytes] | None, on_told: Callable[[], None]
    ) -> None:
        """Begin to look for it.

        Args:
            context: the process's context.
            outputs: the addresses that it gave to the engine before this one.
            notice: the frames to send to each of them; None is to tell nobody.
            on_told: called when it has been told.

        """
        self._notice = notice
        self._on_told = on_told
        self._sockets: list[Socket] = []
        self._monitors: list[PeerMonitor] = []
        self._there_since: float | None = None
        # Whether it has been tried to go on serving it.
        self._was_tried = False
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
        if self._there_since is None:
            return None
        return self._there_since + (_LEAST_DOUBT_S if self._was_tried else _LITTLE_DOUBT_S)

    def look(self, now: float, *, another_starts: bool, resume: Callable[[], bool]) -> bool:
        """Take in what has happened; once it is there and no other one starts, resume or tell it.

        Args:
            now: the time, in seconds of the monotonic clock.
            another_starts: whether a frontend waits for engines.
            resume: goes on serving it, and tells whether that could be done.

        Returns:
            Whether it is served again.

        """
        for monitor in self._monitors:
            monitor.read()
        is_there = [monitor.connected for monitor in self._monitors]
        if not any(is_there) or another_starts:
            self._there_since = None
            return False
        if self._there_since is None:
            self._there_since = now
        if now >= self._there_since + _LITTLE_DOUBT_S and not self._was_tried:
            self._was_tried = True
            if all(is_there) and resume():
                self.close()
                return True
        if now >= self._there_since + _LEAST_DOUBT_S:
            self._tell(is_there)
        return False

    def _tell(self, is_there: Sequence[bool]) -> None:
        if self._notice is None:
            self.close()
            return
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
