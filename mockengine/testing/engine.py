# SPDX-License-Identifier: Apache-2.0
"""The engine as a child process, with its log at hand, for tests and demos."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

DEADLINE_S: Final = 10.0
"""How long every wait lasts at most, unless told otherwise."""

_LINES_SHOWN: Final = 20


class EngineProcess:
    """`python -m mockengine` while the context lasts.

    Attributes:
        process: the child, in a process group of its own, so that a Ctrl-C meant for its parent does not reach it.

    """

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the engine.

        Args:
            arguments: flags, as on the command line.
            environment: `MOCKENGINE_*` variables; none are taken from the parent's environment.

        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOCKENGINE_")}
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter, and the caller's flags
            [sys.executable, "-m", "mockengine", *arguments, "--log-format=json"],
            env={**inherited, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> list[dict[str, Any]]:
        """Every log entry so far, oldest first."""
        return [json.loads(line) for line in self._so_far() if line.startswith("{")]

    @property
    def output(self) -> str:
        """Everything it has written so far, tracebacks included."""
        return "\n".join(self._so_far())

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the log's entries of one event so far."""
        return [entry for entry in self.log if entry["event"] == event]

    def wait_for(
        self,
        event: str,
        condition: Callable[[dict[str, Any]], bool] = lambda _entry: True,
        deadline_s: float = DEADLINE_S,
    ) -> dict[str, Any]:
        """Wait for a log entry of that event for which the condition holds, and return the first.

        Raises:
            TimeoutError: none came; the text shows the end of the log.

        """
        end = time.monotonic() + deadline_s
        while True:
            for entry in self.logged(event):
                if condition(entry):
                    return entry
            left_s = end - time.monotonic()
            if left_s <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                raise TimeoutError(f"no {event!r} within {deadline_s:g} s; it wrote:\n{self._tail()}")
            with self._news:
                self._news.wait(min(left_s, 0.05))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the engine."""
        self.process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait until it has ended and return its exit code.

        Raises:
            TimeoutError: it has not; the text shows the end of its log.

        """
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the engine did not end within {deadline_s:g} s; it wrote:\n{self._tail()}") from error
        self._reader.join(deadline_s)
        return code

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """Ask it to leave with SIGTERM, unless it has ended, and return its exit code."""
        if self.process.poll() is None:
            self.send_signal(signal.SIGTERM)
        return self.wait(deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _so_far(self) -> Sequence[str]:
        with self._news:
            return list(self._lines)

    def _tail(self) -> str:
        return "\n".join(self._so_far()[-_LINES_SHOWN:])

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
