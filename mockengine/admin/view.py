# SPDX-License-Identifier: Apache-2.0
"""What the admin port is handed of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mockengine.status import Counts, Status


@dataclass(frozen=True, slots=True)
class View:
    """The engine as the admin port sees it, from another thread.

    Attributes:
        version: of mockengine.
        status: tells how the engine is now.
        counts: what has happened so far.
        log_lines_dropped: tells how many lines of the log were lost so far.
        last_lines: returns the last lines of the log, oldest first.
        wake: makes the engine's thread go through its loop once, if it can.

    """

    version: str
    status: Callable[[], Status]
    counts: Counts
    log_lines_dropped: Callable[[], int]
    last_lines: Callable[[], Sequence[str]]
    wake: Callable[[], None]
