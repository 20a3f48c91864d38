# SPDX-License-Identifier: Apache-2.0
"""The engine as a child process, with its log at hand."""

import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mockengine.testing.processes import DEADLINE_S, ChildProcess


class EngineProcess(ChildProcess):
    """`python -m mockengine` while the context lasts."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the engine with flags as on the command line and `MOCKENGINE_*` variables."""
        super().__init__([sys.executable, "-m", "mockengine", *arguments, "--log-format=json"], environment)

    @property
    def log(self) -> list[dict[str, Any]]:
        """Every log entry so far, oldest first."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

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

        def found() -> list[dict[str, Any]]:
            return [entry for entry in self.logged(event) if condition(entry)]

        self.wait_until(lambda: bool(found()), f"log entry {event!r}", deadline_s)
        return found()[0]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the engine."""
        self.process.send_signal(number)
