# SPDX-License-Identifier: Apache-2.0
"""What the engine's thread must hear while it sleeps in a poller: SIGTERM, SIGINT, and calls from other threads.

pyzmq's poll goes on sleeping after a Python signal handler has run, so the handler alone would stop nothing; the
wake-up socket, which the poller watches, ends its sleep.
"""

import os
import signal
import socket
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """The wish of whoever started the process that it ends. A second signal ends it on the spot.

    Used as a context manager in the main thread: handlers are installed within and restored after. `request` does
    what a first signal does, from any thread; so does `fail`, for a thread that cannot go on.

    Attributes:
        signal_name: the first signal that arrived, or None.
        failure: the first reason why the process cannot go on, or None.

    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.failure: BaseException | None = None
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._restore: list[tuple[signal.Signals, Any]] = []
        self._former_wakeup_fd = -1

    @property
    def requested(self) -> bool:
        """Whether the process is to end."""
        return self.signal_name is not None or self.failure is not None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with every signal."""
        return self._reader.fileno()

    def request(self, name: str) -> None:
        """Ask to stop for the reason of that name."""
        self.signal_name = self.signal_name or name
        self.wake()

    def fail(self, error: BaseException) -> None:
        """Ask to stop because of an error in another thread."""
        self.failure = self.failure or error
        self.wake()

    def wake(self) -> None:
        """Make whoever polls the descriptor go through its loop once."""
        # One that is full wakes whoever polls it; a closed one has nobody to wake.
        with suppress(OSError):
            self._writer.send(b"\0")

    def close(self) -> None:
        """Free the descriptors."""
        self._reader.close()
        self._writer.close()

    def clear_wakeup(self) -> None:
        """Make the descriptor unreadable until the next signal."""
        with suppress(BlockingIOError):
            while self._reader.recv(64):
                pass

    def __enter__(self) -> Self:
        self._former_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._restore = [(number, signal.signal(number, self._handle)) for number in _SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._restore:
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup_fd)
        self.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is not None:
            os._exit(128 + number)
        self.signal_name = signal.Signals(number).name
