# SPDX-License-Identifier: Apache-2.0
"""The log: one line per event, as JSON or for a person at a terminal, and the names of all events.

docs/logs.md says which keys an event has. This module knows how a line looks and where it goes; it must not know when
something is worth a line. Prompt text and token ids never get into the log.
"""

import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Event(StrEnum):
    """Every event there is; programs that read the log match these names, so they do not change."""

    ENGINE_JOINING = "engine joining"
    JOIN_INTERRUPTED = "join interrupted"
    ENGINE_READY = "engine ready"
    FRONTEND_STARTING = "frontend starting"
    FRONTEND_LOST = "frontend lost"
    MESSAGE_DROPPED = "message dropped"
    ENGINE_LEAVING = "engine leaving"
    ENGINE_LEFT = "engine left"
    ENGINE_FAILED = "engine failed"
    REQUEST_STARTED = "request started"
    REQUEST_FINISHED = "request finished"
    REQUEST_REFUSED = "request refused"


def configure(
    log_format: Literal["auto", "json", "console"],
    log_level: Literal["debug", "info", "warning", "error"],
    stream: TextIO | None = None,
) -> None:
    """Send the log to `stream` (default: stdout), dropping what is less severe than `log_level`.

    `auto` is console on a terminal and JSON elsewhere. A logger made before this call does not notice it.
    """
    if stream is None:
        stream = sys.stdout
    # Python leaves sys.stdout None when the process was started with stdout closed.
    is_terminal = stream is not None and stream.isatty()
    for_person = log_format == "console" or (log_format == "auto" and is_terminal)
    structlog.configure(
        processors=[structlog.processors.add_log_level, *(_console(colors=is_terminal) if for_person else _json())],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log_level]),
        logger_factory=lambda *_: _Output(stream),
        # A cached logger would go on writing where an earlier call sent it.
        cache_logger_on_first_use=False,
    )


def get_logger() -> FilteringBoundLogger:
    """Return a logger that writes as configured now; events below the level cost it next to nothing."""
    return cast("FilteringBoundLogger", structlog.get_logger().bind())


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, _in_order, structlog.processors.JSONRenderer()]


def _console(*, colors: bool) -> list[Processor]:
    renderer = structlog.dev.ConsoleRenderer(
        colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )
    return [_in_order, _printable, renderer]


def _in_order(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    """Put timestamp, level and event first; the event's own keys keep the order of the call."""
    return {
        "timestamp": datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z",
        "level": event_dict.pop("level"),
        "event": event_dict.pop("event"),
        **event_dict,
    }


def _printable(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    """Escape what could move the cursor of somebody's terminal, for instance in a client's request id."""
    return {
        key: value.encode("unicode_escape").decode() if isinstance(value, str) and not value.isprintable() else value
        for key, value in event_dict.items()
    }


class _Output:
    """Writes finished lines. Losing the log is bad; an engine that stops because of it is worse."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Write one line, or drop it if nobody can read it any more."""
        stream = self._stream
        if stream is None:
            return
        # ValueError is a stream that somebody closed; with other errors, a full disk, the next line may have more luck.
        with suppress(OSError, ValueError):
            try:
                # One call for line and end of line: lines of different threads do not mix.
                stream.write(line + "\n")
                stream.flush()
            except BrokenPipeError:
                self._give_up(stream)

    debug = info = warning = error = critical = msg

    def _give_up(self, stream: TextIO) -> None:
        """Point the stream at nothing, or Python fails to flush it at exit and turns exit code 0 into 120."""
        self._stream = None
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), stream.fileno())
