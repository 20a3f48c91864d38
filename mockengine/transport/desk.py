# SPDX-License-Identifier: Apache-2.0
"""What other threads want done to the engine: its own thread does it, between two steps and so never by half."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")

# An engine that works turns within a millisecond or two of being woken.
_PATIENCE_S: Final = 2.0


class DeskClosedError(Exception):
    """The engine's thread did not get to it in time, and does not do it any more."""


class Desk:
    """Takes orders from any thread for the engine's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Begin without any; `wake` makes the engine's thread go through its loop once, if it can."""
        self._wake = wake
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def ask(self, work: Callable[[], T]) -> T:
        """Have something done that takes no longer than a step, and return what comes of it.

        Called from any thread but the engine's.

        Raises:
            DeskClosedError: the engine hangs, or has ended.

        """
        future: Future[T] = Future()
        self._orders.append((work, future))
        self._wake()
        try:
            return future.result(_PATIENCE_S)
        except TimeoutError:
            if future.cancel():
                raise DeskClosedError("the engine does not get to it: it hangs, or ends") from None
            return future.result()

    def work_off(self) -> None:
        """Do what has been ordered; on the engine's thread."""
        while self._orders:
            work, future = self._orders.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is the orderer's to see to
                future.set_exception(error)
