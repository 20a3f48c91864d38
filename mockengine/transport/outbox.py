# SPDX-License-Identifier: Apache-2.0
"""One way out: a PUSH socket and what it could not take yet."""

from collections import deque
from collections.abc import Sequence

import zmq

from mockengine.transport.sockets import Socket


class Outbox:
    """Messages to one client or to the coordinator, in order.

    When the peer does not read, messages wait here and `is_blocked` tells the engine to make no more of them.

    Attributes:
        buffered_bytes: what waits here; what libzmq and the kernel hold is not known.

    """

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.buffered_bytes = 0
        self._pending: deque[Sequence[bytes]] = deque()

    @property
    def is_blocked(self) -> bool:
        """Whether messages wait for the peer to read."""
        return bool(self._pending)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message now if the peer takes it, else when it does; never waits."""
        if self._pending or not self._try(frames):
            self._pending.append(frames)
            self.buffered_bytes += _size(frames)

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        while self._pending and self._try(self._pending[0]):
            self.buffered_bytes -= _size(self._pending.popleft())

    def close(self, linger_ms: int) -> None:
        """Close the socket, which goes on sending for up to `linger_ms` while its context ends."""
        self.socket.close(linger_ms)

    def _try(self, frames: Sequence[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _size(frames: Sequence[bytes]) -> int:
    return sum(map(len, frames))
