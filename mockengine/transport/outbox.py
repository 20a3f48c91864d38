# SPDX-License-Identifier: Apache-2.0
"""One way out: messages in order, and what the peer has not taken yet."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

import zmq

from mockengine.transport.connection import Connection
from mockengine.transport.zmtp import frame_all, frame_header
from mockengine.wire.batch import Buffer, Burst, Messages

_SMALL_BYTES: Final = 4_096
# Messages that are offered to the kernel at once.
_MOST_OFFERED: Final = 256


class Outbox:
    """Messages to one client or to the coordinator, in order, and how many of them may wait.

    When the peer does not read, messages wait in the kernel and then here. When they reach the limit, `is_blocked`
    tells the engine to make no more of them, until half of that has left. What must be said all the same, such as the
    answer to a call, is taken whatever waits. When the connection breaks, the message that had been begun is said again
    on the next one; those that the kernel had as a whole are lost.

    Attributes:
        is_blocked: whether nothing should be sent that can wait.
        buffered_bytes: what waits here.

    """

    def __init__(self, address: str, limit_bytes: int) -> None:
        """Connect to nothing yet: `advance` does.

        Raises:
            AddressError: it is neither `tcp://host:port` nor `ipc://path`.

        """
        self.is_blocked = False
        self.buffered_bytes = 0
        self._connection = Connection(address, self._begin_anew)
        self._limit_bytes = limit_bytes
        self._pending: deque[bytes] = deque()
        # Of the first pending message, bytes that the kernel has.
        self._begun_bytes = 0
        self._poller: zmq.Poller | None = None
        # What the poller knows: a descriptor and events.
        self._watched: tuple[int, int] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether messages wait here for the peer to read."""
        return bool(self._pending)

    @property
    def has_left(self) -> bool:
        """Whether the peer's machine has everything that was said, as far as this side can know."""
        return not self._pending and self._connection.has_left

    @property
    def is_of_rust(self) -> bool | None:
        """Whether the peer is a Rust frontend, which takes an engine that returns; None while it has not told."""
        minor_version = self._connection.minor_version if self._connection.is_open else None
        return None if minor_version is None else minor_version == 0

    @property
    def deadline(self) -> float | None:
        """When `advance` is to be called although nothing has happened, in seconds of the monotonic clock."""
        return self._connection.deadline

    @property
    def refusal(self) -> str | None:
        """Why the last peer that could not be spoken to was none, if there was one."""
        return self._connection.refusal

    def send(self, messages: Messages) -> None:
        """Send messages now as far as the peer takes them, the rest when it does; never waits.

        Args:
            messages: in order; their buffers may change once this has returned.

        """
        taken = 0
        if not self._pending and self._connection.is_open and self._connection.pay():
            buffers = _all_framed(messages)
            taken = self._connection.write(buffers)
            if taken == sum(map(len, buffers)):
                return
        for message in messages:
            whole = b"".join(_framed(message))
            if taken >= len(whole):
                taken -= len(whole)
                continue
            # The first of those that wait may have been begun.
            self._keep(whole)
            self._begun_bytes += taken
            self.buffered_bytes -= taken
            taken = 0
        self._note_interest()

    def advance(self, now: float) -> None:
        """Do what has become possible; call it at first, when the poller says so, and at `deadline`.

        Args:
            now: the time, in seconds of the monotonic clock.

        """
        self._connection.advance(now)
        if self._connection.is_open:
            self._flush()
        self._note_interest()

    def interrupt(self, until: float) -> None:
        """Break the connection, and connect again at that time; messages wait here meanwhile."""
        self._connection.interrupt(until)
        self._note_interest()

    def close(self) -> None:
        """Drop what waits here; what the kernel has already goes on leaving."""
        self._connection.close()
        self._poller = None
        self._pending.clear()
        self.buffered_bytes = 0

    # The poller.

    def watch(self, poller: zmq.Poller) -> None:
        """Have this poller wait for whatever is waited for, from now on, and no other one."""
        self._unwatch()
        self._poller = poller
        self._note_interest()

    def is_in(self, ready: Mapping[Any, int]) -> bool:
        """Tell whether a poller has seen something that `advance` is to be called for."""
        return self._watched is not None and self._watched[0] in ready

    def _note_interest(self) -> None:
        descriptor = self._connection.fileno
        is_writing = self._connection.awaits_writing or (self._pending and self._connection.is_open)
        events = zmq.POLLIN | zmq.POLLOUT if is_writing else zmq.POLLIN
        watched = None if descriptor is None else (descriptor, events)
        if self._poller is not None and watched != self._watched:
            self._unwatch()
            if watched is not None:
                self._poller.register(*watched)
            self._watched = watched

    def _unwatch(self) -> None:
        if self._poller is not None and self._watched is not None:
            self._poller.unregister(self._watched[0])
        self._watched = None

    # Sending.

    def _keep(self, message: bytes) -> None:
        self._pending.append(message)
        self.buffered_bytes += len(message)
        self.is_blocked = self.is_blocked or self.buffered_bytes >= self._limit_bytes

    def _flush(self) -> None:
        """Write what waits, as far as the kernel takes it."""
        takes_more = True
        while takes_more:
            has_paid = self._begun_bytes == 0 and self._connection.pay()
            if not self._pending or not (has_paid or self._begun_bytes):
                break
            # What is owed must not wait longer than for the message that has been begun.
            buffers: list[Buffer] = list(islice(self._pending, _MOST_OFFERED if has_paid else 1))
            buffers[0] = memoryview(buffers[0])[self._begun_bytes :]
            taken = self._connection.write(buffers)
            takes_more = taken == sum(map(len, buffers))
            self._forget(taken)
        if self.buffered_bytes <= self._limit_bytes // 2:
            self.is_blocked = False

    def _forget(self, taken: int) -> None:
        """Remove the pending messages that the kernel has; remember how much it has of the next one."""
        self.buffered_bytes -= taken
        taken += self._begun_bytes
        while self._pending and taken >= len(self._pending[0]):
            taken -= len(self._pending.popleft())
        self._begun_bytes = taken

    def _begin_anew(self) -> None:
        """Take back what was begun: its connection ends."""
        self._unwatch()
        self.buffered_bytes += self._begun_bytes
        self._begun_bytes = 0


def _all_framed(messages: Messages) -> list[Buffer]:
    """Return the buffers of all messages as they go over the wire, few of them."""
    if isinstance(messages, Burst) and messages.frame_bytes < _SMALL_BYTES:
        return [frame_all(messages.frames, messages.frame_bytes)]
    buffers = [buffer for message in messages for buffer in _framed(message)]
    # Many small buffers cost the kernel more than putting them together costs here.
    is_small = sum(map(len, buffers)) < _SMALL_BYTES * len(buffers)
    return [b"".join(buffers)] if is_small else buffers


def _framed(message: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers of a message as they go over the wire."""
    if len(message) == 1:
        return [frame_header(len(message[0])), message[0]]
    *others, last = message
    framed = [part for frame in others for part in (frame_header(len(frame), more=True), frame)]
    return [*framed, frame_header(len(last)), last]
