# SPDX-License-Identifier: Apache-2.0
"""The log: one line per event, as JSON or for a person at a terminal, and the names of all events.

docs/logs.md says which keys an event has. This module knows how a line looks and where it goes; it must not know when
something is worth a line. Prompt text and token ids never get into the log.
"""

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal, Self, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# What may wait for a reader: seconds of a busy log, and little enough memory. docs/logs.md states them.
_MAX_LINES: Final = 10_000
# Kept for people to look at.
_LAST_LINES: Final = 30
_MAX_CHARACTERS: Final = 8_000_000
# What an empty pipe takes at once. Smaller writes do not keep up: after each one the thread waits some milliseconds
# until a busy engine lets go of the interpreter.
_MAX_WRITE: Final = 65_536


class Event(StrEnum):
    """Every event there is; programs that read the log match these names, so they do not change."""

    ENGINE_JOINING = "engine joining"
    JOIN_INTERRUPTED = "join interrupted"
    ENGINE_READY = "engine ready"
    FRONTEND_STARTING = "frontend starting"
    FRONTEND_LOST = "frontend lost"
    ENGINE_RESUMED = "engine resumed"
    ABANDONED_FRONTEND_TOLD = "abandoned frontend told"
    STATE_NOT_KEPT = "state not kept"
    CLIENT_STALLED = "client stalled"
    OUTPUT_REFUSED = "output refused"
    REPLAY_REFUSED = "replay refused"
    MESSAGE_DROPPED = "message dropped"
    ENGINE_LEAVING = "engine leaving"
    ENGINE_LEFT = "engine left"
    ENGINE_FAILED = "engine failed"
    RELEASE_CONTRADICTED = "release contradicted"
    PROFILE_DIFFERS = "profile differs"
    SETTINGS_CHANGED = "settings changed"
    SCRIPT_RELOADED = "script reloaded"
    SCRIPT_REFUSED = "script refused"
    FAULT_FIRED = "fault fired"
    REQUEST_STARTED = "request started"
    REQUEST_FINISHED = "request finished"
    REQUEST_REFUSED = "request refused"
    KV_TRANSFER_IGNORED = "kv transfer ignored"
    ADMIN_REQUEST_FAILED = "admin request failed"
    LOG_LINES_DROPPED = "log lines dropped"


def configure(
    log_format: Literal["auto", "json", "console"],
    log_level: Literal["debug", "info", "warning", "error"],
    stream: TextIO | None = None,
) -> None:
    """Send the log to `stream` (default: stdout), dropping what is less severe than `log_level`.

    `auto` is console on a terminal and JSON elsewhere. A logger made before this call does not notice it. Lines are
    written by a thread that the first one starts; `flush` waits for it.
    """
    if stream is None:
        stream = sys.stdout
    # Python leaves sys.stdout None when the process was started with stdout closed.
    is_terminal = stream is not None and stream.isatty()
    for_person = log_format == "console" or (log_format == "auto" and is_terminal)
    processors = [
        structlog.processors.add_log_level,
        *(_console(colors=is_terminal and _likes_colors()) if for_person else _json()),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=_wrapper(log_level),
        logger_factory=_Output(stream, lambda count: _loss_line(processors, count)),
        # A cached logger would go on writing where an earlier call sent it.
        cache_logger_on_first_use=False,
    )


def set_level(log_level: Literal["debug", "info", "warning", "error"]) -> None:
    """Drop what is less severe than that from now on, for loggers that are made after this call."""
    structlog.configure(**structlog.get_config() | {"wrapper_class": _wrapper(log_level)})


def _wrapper(log_level: Literal["debug", "info", "warning", "error"]) -> type[Any]:
    return structlog.make_filtering_bound_logger(_LEVELS[log_level])


def get_logger() -> FilteringBoundLogger:
    """Return a logger that writes as configured now; events below the level cost it next to nothing."""
    return cast("FilteringBoundLogger", structlog.get_logger().bind())


def flush(deadline_s: float) -> bool:
    """Wait until all that was logged is written, at most `deadline_s` seconds; return whether it is.

    What is not written when the process ends is lost; it ends all the same.
    """
    output = structlog.get_config()["logger_factory"]
    return output.flush(deadline_s) if isinstance(output, _Output) else True


def last_lines() -> Sequence[str]:
    """Return the last lines that were logged since `configure`, oldest first."""
    output = structlog.get_config()["logger_factory"]
    return output.last_lines if isinstance(output, _Output) else ()


def lines_dropped() -> int:
    """Return how many lines were lost since `configure`."""
    output = structlog.get_config()["logger_factory"]
    return output.lines_dropped if isinstance(output, _Output) else 0


def _likes_colors() -> bool:
    """Tell whether nothing speaks against colours: NO_COLOR (no-color.org), or a terminal that knows none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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


def _loss_line(processors: Sequence[Processor], count: int) -> str:
    """Return the line that stands for `count` lost ones; made here, because a logger would only queue it."""
    entry: Any = {"event": Event.LOG_LINES_DROPPED, "count": count}
    for process in processors:
        entry = process(None, "warning", entry)
    return str(entry)


class _Output:
    """Hands finished lines to a thread that writes them, so that a reader who stalls does not stall whoever logs.

    Losing the log is bad; an engine that stops because of it is worse. So lines are dropped when too many of them wait
    or when they cannot be written, and a line in their place says how many. It serves structlog as the factory too.
    """

    def __init__(self, stream: TextIO | None, loss_line: Callable[[int], str]) -> None:
        self._stream = stream
        self._loss_line = loss_line
        self._lock = threading.Lock()
        self._queued = threading.Condition(self._lock)
        self._written = threading.Condition(self._lock)
        # Each text, and what is lost with it: lines that are new, and lines that were lost before, which it tells of.
        self._queue: deque[tuple[str, int, int]] = deque()
        self._queued_characters = 0
        self._lost = 0
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self.lines_dropped = 0
        self._is_writing = False
        # Whether a disk became full in the middle of a line.
        self._is_line_cut = False
        self._thread: threading.Thread | None = None

    def __call__(self, *_: Any) -> Self:
        return self

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines, whether they could be written or not."""
        with self._lock:
            return tuple(self._last)

    def msg(self, line: str) -> None:
        """Leave one line to the thread, or drop it; never waits for the stream and never raises."""
        with self._lock:
            self._last.append(line)
            if self._stream is None:
                self.lines_dropped += 1
                return
            if len(self._queue) >= _MAX_LINES or self._queued_characters >= _MAX_CHARACTERS:
                self._lost += 1
                self.lines_dropped += 1
                return
            self._queue_loss()
            self._append(line, 1, 0)
            if self._thread is None:
                self._start()
            self._queued.notify()

    debug = info = warning = error = critical = msg

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is left to write, at most `deadline_s` seconds; return whether that is so."""
        with self._lock:
            return self._written.wait_for(lambda: not self._queue and not self._is_writing, deadline_s)

    def _append(self, line: str, new: int, lost_before: int) -> None:
        self._queue.append((line + "\n", new, lost_before))
        self._queued_characters += len(line) + 1

    def _queue_loss(self) -> None:
        if self._lost:
            self._append(self._loss_line(self._lost), 0, self._lost)
            self._lost = 0

    def _start(self) -> None:
        # A daemon: stuck in a write, it does not keep the process from ending.
        thread = threading.Thread(target=self._work, name="log", daemon=True)
        # RuntimeError is a limit on threads; the next line tries again.
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            text, new, lost_before = self._take()
            try:
                self._write(text)
            except BrokenPipeError:
                self._give_up(new)
            except (OSError, ValueError):
                # A full disk, with which the next line may have more luck, or a stream that somebody closed.
                with self._lock:
                    self._lost += new + lost_before
                    self.lines_dropped += new
            else:
                with self._lock:
                    if not self._queue:
                        # Perhaps no line comes that would bring the loss up.
                        self._queue_loss()

    def _take(self) -> tuple[str, int, int]:
        """Wait for lines, and return what one write may hold and, as in the queue, what is lost if it fails."""
        with self._lock:
            self._is_writing = False
            self._written.notify_all()
            while not self._queue:
                self._queued.wait()
            self._is_writing = True
            text, new, lost_before = self._queue.popleft()
            taken = [text]
            size = len(text)
            while self._queue and size + len(self._queue[0][0]) <= _MAX_WRITE:
                text, more_new, more_lost_before = self._queue.popleft()
                taken.append(text)
                size += len(text)
                new += more_new
                lost_before += more_lost_before
            self._queued_characters -= size
            return "".join(taken), new, lost_before

    def _write(self, text: str) -> None:
        stream = cast("TextIO", self._stream)
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:
            stream.write(text)
            stream.flush()
            return
        # Past the stream's buffer: Python waits for its lock at exit, for ever if a write is stuck.
        rest = text.encode(stream.encoding, "backslashreplace")
        if self._is_line_cut:
            rest = b"\n" + rest
        while rest:
            try:
                written = os.write(descriptor, rest)
                self._is_line_cut = rest[written - 1 : written] != b"\n"
                rest = rest[written:]
            except BlockingIOError:
                # Somebody who shares the other end made it non-blocking.
                _wait_for_room(descriptor)

    def _give_up(self, lines: int) -> None:
        """Stop logging: the reader has gone for good, with `lines` that were on their way."""
        with self._lock:
            self._stream = None
            self.lines_dropped += lines + sum(new for _, new, _ in self._queue)
            self._queue.clear()


def _wait_for_room(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    poller.poll()
