# SPDX-License-Identifier: Apache-2.0
"""A whole engine, sockets included, in a thread of the test: quick to start, and its log is at hand."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

from structlog.typing import FilteringBoundLogger

from mockengine.journal import Journal
from mockengine.service import StartError, play
from mockengine.settings import Settings
from mockengine.testing.double import FrontendDouble
from mockengine.transport.stop import StopSignal

DEADLINE_S = 10.0


class _Log:
    """Remembers what is logged."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def info(self, event: str, **keys: Any) -> None:
        self.entries.append({"event": str(event), **keys})

    warning = error = info


class EngineThread:
    """An engine that runs while the context lasts.

    Attributes:
        exit_code: what the process would have ended with, once it has ended.
        error: why it did not start, if it did not.
        journal: what it reports to.

    """

    def __init__(self, frontend: FrontendDouble | None = None, **settings: Any) -> None:
        if frontend is not None:
            settings = {
                "handshake_address": frontend.handshake_address,
                "engine_count": frontend.ranks,
                "rejoin_grace_s": 0.1,
                **settings,
            }
        self.exit_code: int | None = None
        self.error: StartError | None = None
        self._settings = Settings(**settings)
        self._log = _Log()
        self._stop = StopSignal()
        self.journal = Journal(cast("FilteringBoundLogger", self._log), log_requests=True, chunk_size=1)
        self._thread = threading.Thread(target=self._play, name="engine")

    def __enter__(self) -> Self:
        # Engine and test share one interpreter; by default they would hand it over every 5 ms only.
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._stop.close()
        sys.setswitchinterval(self._switch_interval_s)

    def stop(self) -> None:
        """Ask it to leave and wait until it has."""
        if self._thread.is_alive():
            self._stop.request("SIGTERM")
        self.wait()

    def ask_to_stop(self) -> None:
        """Ask it to leave without waiting."""
        self._stop.request("SIGTERM")

    def wait(self) -> None:
        """Wait until it has left by itself."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"the engine did not end within {DEADLINE_S:g} s"

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the log's entries of one event so far."""
        return [entry for entry in list(self._log.entries) if entry["event"] == event]

    def wait_for(self, event: str, condition: Callable[[dict[str, Any]], bool] = lambda _entry: True) -> dict[str, Any]:
        """Wait for a log entry of that event for which the condition holds, and return the first."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for entry in self.logged(event):
                if condition(entry):
                    return entry
            time.sleep(0.002)
        raise AssertionError(f"no {event!r} within {DEADLINE_S:g} s; the log holds {self._log.entries}")

    def wait_until_logged(self, event: str, *, times: int) -> None:
        """Wait until that many entries of an event have been logged."""
        self.wait_for(event, lambda _entry: len(self.logged(event)) >= times)

    def _play(self) -> None:
        try:
            self.exit_code = play(self._settings, self._stop, self.journal)
        except StartError as error:
            self.error = error
