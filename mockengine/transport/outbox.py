# SPDX-License-Identifier: Apache-2.0
"""One way out: a PUSH socket and what it could not take yet."""

from collections import deque
from collections.abc import Sequence

import zmq

from mockengine.transport.sockets import OUTPUT_HIGH_WATER_MARK, Socket


class Outbox:
    """Messages to one client or to the coordinator, in order, and how many of them may wait.

    When the peer does not read, messages wait in libzmq and then here. When they reach the limit, `is_blocked` tells
    the engine to make no more of them, until half of that has left. What must be said all the same, such as the answer
    to a call, is taken whatever waits.

    Attributes:
        buffered_bytes: what waits here, and what libzmq may hold at most.

    """

    def __init__(self, socket: Socket, limit_bytes: int) -> None:
        """Take over a socket whose high-water mark is `OUTPUT_HIGH_WATER_MARK`."""
        self.socket = socket
        self.is_blocked = False
        self._limit_bytes = limit_bytes
        self._pending: deque[Sequence[bytes]] = deque()
        self._pending_bytes = 0
        # Sizes of the latest messages that libzmq took: it may hold these and no others.
        self._taken: deque[int] = deque([0] * OUTPUT_HIGH_WATER_MARK, OUTPUT_HIGH_WATER_MARK)
        self._taken_bytes = 0

    @property
    def has_pending(self) -> bool:
        """Whether messages wait here for the peer to read."""
        return bool(self._pending)

    @property
    def buffered_bytes(self) -> int:
        """What waits here, and what libzmq may hold besides."""
        return self._pending_bytes + self._taken_bytes if self._pending else 0

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message now if the peer takes it, else when it does; never waits."""
        if self._pending or not self._try(frames):
            self._pending.append(frames)
            self._pending_bytes += _size(frames)
            self.is_blocked = self.is_blocked or self.buffered_bytes >= self._limit_bytes

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        while self._pending and self._try(self._pending[0]):
            self._pending_bytes -= _size(self._pending.popleft())
        if self._pending_bytes <= self._limit_bytes // 2:
            self.is_blocked = False

    def close(self, linger_ms: int) -> None:
        """Close the socket, which goes on sending for up to `linger_ms` while its context ends."""
        self.socket.close(linger_ms)

    def _try(self, frames: Sequence[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        size = _size(frames)
        self._taken_bytes += size - self._taken[0]
        self._taken.append(size)
        return True


def _size(frames: Sequence[bytes]) -> int:
    return len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
