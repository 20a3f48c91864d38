# SPDX-License-Identifier: Apache-2.0
"""The log: how lines look, where they go, and that losing them harms nobody."""

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from mockengine import logs
from mockengine.logs import Event

_PAGE = Path(__file__).parents[1] / "docs" / "logs.md"
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_DEADLINE_S = 10.0
# Logs more than a pipe holds and exits with a code that says whether logging raised, and whether all was written.
_PROGRAM = """
import sys
from mockengine import logs
logs.configure("json", "info")
log = logs.get_logger()
for number in range(2000):
    log.info("engine ready", number=number)
raise SystemExit(7 if logs.flush(float(sys.argv[1])) else 8)
"""
# Logs to a file that takes 950 bytes, and then more.
_FULL_FOR_A_WHILE = """
import resource
from mockengine import logs
logs.configure("json", "info")
log = logs.get_logger()
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (950, most))
for number in range(50):
    log.info("engine ready", number=number)
assert logs.flush(10)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.info("engine ready", number=50)
assert logs.flush(10)
"""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Disk(io.StringIO):
    is_full = True

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def write(self, text: str) -> int:
        self.is_asked.set()
        self.answers.wait(_DEADLINE_S)
        if self.is_full:
            raise OSError("no space left")
        return super().write(text)


class _Pipe:
    """A log that goes into a pipe, which nobody reads unless asked to."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w")

    def read_some(self) -> bytes:
        return os.read(self.reader, 65_536)

    def read_until(self, condition: Callable[[], bool]) -> bytes:
        text, end = b"", time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "the condition does not come true"
            text += self.read_some()
        return text

    def read_all(self) -> bytes:
        """Return what is read until everything is written, and close the pipe."""
        pieces: list[bytes] = []

        def read() -> None:
            while piece := self.read_some():
                pieces.append(piece)

        thread = threading.Thread(target=read)
        thread.start()
        written = logs.flush(_DEADLINE_S)
        self.stream.close()
        thread.join(_DEADLINE_S)
        assert written
        return b"".join(pieces)


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def pipe() -> Iterator[_Pipe]:
    pipe = _Pipe()
    yield pipe
    # A thread that is still in a write ends it with the reader's going.
    os.close(pipe.reader)
    logs.flush(_DEADLINE_S)
    pipe.stream.close()


def _exit_code(stdout: int, flush_s: float = _DEADLINE_S) -> int:
    command = [sys.executable, "-c", _PROGRAM, str(flush_s)]
    return subprocess.run(command, check=False, timeout=60, stdout=stdout).returncode


def _written(stream: io.StringIO) -> str:
    assert logs.flush(_DEADLINE_S)
    return stream.getvalue()


def _queued() -> int:
    output = structlog.get_config()["logger_factory"]
    assert isinstance(output, logs._Output)
    return len(output._queue)


def _check_nothing_is_missing(text: bytes) -> tuple[int, list[int]]:
    """Return the number of lines that were logged and the counts of those that were dropped, checking their places."""
    logged, dropped = 0, []
    for line in text.splitlines():
        entry = json.loads(line)
        if entry["event"] == Event.LOG_LINES_DROPPED:
            dropped.append(entry["count"])
            logged += entry["count"]
        else:
            assert entry["number"] == logged
            logged += 1
    return logged, dropped


def _raised(error: Exception) -> Exception:
    with pytest.raises(type(error)):
        raise error
    return error


def test_a_line_is_one_json_object_with_its_keys_in_order() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY, engines=[0], clients=1, coordinator=False, join_s=0.25)

    line, end = _written(stream).split("\n")
    (_, timestamp), *pairs = json.loads(line, object_pairs_hook=list)
    assert end == ""
    assert _TIMESTAMP.fullmatch(timestamp)
    assert pairs == [
        ("level", "info"),
        ("event", "engine ready"),
        ("engines", [0]),
        ("clients", 1),
        ("coordinator", False),
        ("join_s", 0.25),
    ]


def test_an_exception_is_text_in_json() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)

    logs.get_logger().error(Event.ENGINE_FAILED, reason="a defect", exc_info=_raised(ValueError("lost\nmarbles")))

    [line] = _written(stream).splitlines()
    parsed = json.loads(line)
    assert list(parsed) == ["timestamp", "level", "event", "reason", "exception"]
    assert parsed["exception"].startswith("Traceback (most recent call last):\n")
    assert parsed["exception"].endswith("ValueError: lost\nmarbles")


def test_json_is_ascii_whatever_is_logged() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)

    logs.get_logger().info(Event.REQUEST_STARTED, request_id="é\ud800\x1b\n", frame=b"\xff")

    assert _written(stream).isascii()
    assert json.loads(_written(stream))["request_id"] == "é\ud800\x1b\n"


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_console_has_no_colour_where_none_is_wanted(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    stream = _Terminal()
    logs.configure("auto", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY)

    assert "\x1b[" not in _written(stream)


def test_auto_is_console_in_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    logs.configure("auto", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY, clients=1)

    assert re.sub(r"\x1b\[\d+m", "", _written(stream))[27:] == " [info     ] engine ready                   clients=1\n"
    assert "\x1b[" in _written(stream)


def test_auto_is_json_elsewhere() -> None:
    stream = io.StringIO()
    logs.configure("auto", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY)

    assert json.loads(_written(stream))["event"] == "engine ready"


def test_console_has_no_colour_elsewhere() -> None:
    stream = io.StringIO()
    logs.configure("console", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY, clients=1)

    assert _written(stream)[27:] == " [info     ] engine ready                   clients=1\n"


def test_json_is_json_on_a_terminal_too() -> None:
    stream = _Terminal()
    logs.configure("json", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY)

    assert json.loads(_written(stream))["event"] == "engine ready"


def test_a_client_cannot_write_to_the_terminal() -> None:
    stream = _Terminal()
    logs.configure("console", "info", stream)

    logs.get_logger().info(Event.REQUEST_STARTED, request_id="\x1b]0;owned\x07\r\u202e")

    assert r"\x1b]0;owned\x07\r\u202e" in _written(stream)


def test_an_exception_is_readable_on_the_console() -> None:
    stream = io.StringIO()
    logs.configure("console", "info", stream)

    logs.get_logger().error(Event.ENGINE_FAILED, exc_info=ValueError("lost"))

    assert _written(stream).splitlines()[-1] == "ValueError: lost"


@pytest.mark.parametrize(
    ("level", "logged"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_less_severe_levels_are_dropped(level: str, logged: list[str]) -> None:
    stream = io.StringIO()
    logs.configure("json", level, stream)  # type: ignore[arg-type]

    log = logs.get_logger()
    for method in (log.debug, log.info, log.warning, log.error):
        method(Event.ENGINE_READY)

    assert [json.loads(line)["level"] for line in _written(stream).splitlines()] == logged


def test_a_second_configuration_holds_for_new_loggers() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("json", "info", first)
    logs.get_logger().info(Event.ENGINE_READY)
    _written(first)
    logs.configure("json", "info", second)
    logs.get_logger().info(Event.ENGINE_LEFT)

    assert [json.loads(_written(stream))["event"] for stream in (first, second)] == ["engine ready", "engine left"]


# Losing lines.


def test_all_that_is_logged_is_written_in_its_order(pipe: _Pipe) -> None:
    logs.configure("json", "info", pipe.stream)
    for number in range(5_000):
        logs.get_logger().info(Event.ENGINE_READY, number=number)

    assert _check_nothing_is_missing(pipe.read_all()) == (5_000, [])


def test_a_reader_that_goes_away_does_not_stop_the_engine() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert _exit_code(writer) == 7
    finally:
        os.close(writer)


def test_a_reader_that_stalls_stops_neither_the_engine_nor_its_end() -> None:
    reader, writer = os.pipe()
    try:
        assert _exit_code(writer, flush_s=0.1) == 8
    finally:
        os.close(writer)
        os.close(reader)


def test_a_full_disk_does_not_stop_the_engine() -> None:
    with Path("/dev/full").open("wb") as full:
        assert _exit_code(full.fileno()) == 7


@pytest.mark.parametrize(("lines", "characters"), [(12_000, 0), (200, 100_000)], ids=["many", "large"])
def test_lines_for_which_there_is_no_room_are_counted(pipe: _Pipe, lines: int, characters: int) -> None:
    logs.configure("json", "info", pipe.stream)
    for number in range(lines):
        logs.get_logger().info(Event.ENGINE_READY, number=number, hint="x" * characters)

    # The engine logs nothing more; what was lost is told all the same.
    logged, dropped = _check_nothing_is_missing(pipe.read_all())

    assert logged == lines
    assert len(dropped) == 1


def test_lost_lines_are_told_before_the_next_line_that_is_not(pipe: _Pipe) -> None:
    logs.configure("json", "info", pipe.stream)
    log = logs.get_logger()
    for number in range(12_000):
        log.info(Event.ENGINE_READY, number=number)
    first = pipe.read_until(lambda: _queued() < 9_000)
    log.info(Event.ENGINE_READY, number=12_000)

    logged, dropped = _check_nothing_is_missing(first + pipe.read_all())

    assert logged == 12_001
    assert len(dropped) == 1


def test_lines_that_a_full_disk_cost_are_counted() -> None:
    disk = _Disk()
    logs.configure("json", "info", disk)
    log = logs.get_logger()
    for number in range(3):
        log.info(Event.ENGINE_READY, number=number)
        assert logs.flush(_DEADLINE_S)
    disk.is_full = False
    log.info(Event.ENGINE_READY, number=3)

    assert _check_nothing_is_missing(_written(disk).encode()) == (4, [3])


def test_a_disk_that_stays_full_leaves_nothing_to_write() -> None:
    disk = _Disk()
    disk.answers.clear()
    logs.configure("json", "info", disk)
    logs.get_logger().info(Event.ENGINE_READY)
    assert disk.is_asked.wait(_DEADLINE_S)
    logs.get_logger().info(Event.ENGINE_READY)
    # The first line fails while the other waits: neither loss can be told, which is not tried for ever.
    disk.answers.set()

    assert logs.flush(_DEADLINE_S)


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("wb") as stream:
        subprocess.run([sys.executable, "-c", _FULL_FOR_A_WHILE], check=True, timeout=60, stdout=stream)

    *before, cut, loss, after = file.read_text().splitlines()
    assert [json.loads(line)["number"] for line in before] == list(range(len(before)))
    assert cut.startswith('{"timestamp"')
    assert not cut.endswith("}")
    assert json.loads(loss)["event"] == Event.LOG_LINES_DROPPED
    assert json.loads(after)["number"] == 50


def test_lost_lines_are_told_to_a_person_too() -> None:
    disk = _Disk()
    logs.configure("console", "info", disk)
    logs.get_logger().info(Event.ENGINE_READY)
    assert logs.flush(_DEADLINE_S)
    disk.is_full = False
    logs.get_logger().info(Event.ENGINE_READY)

    assert _written(disk).splitlines()[0][27:] == " [warning  ] log lines dropped              count=1"


def test_an_output_that_never_blocks_loses_nothing(pipe: _Pipe) -> None:
    os.set_blocking(pipe.stream.fileno(), False)
    logs.configure("json", "info", pipe.stream)
    for number in range(5_000):
        logs.get_logger().info(Event.ENGINE_READY, number=number)

    assert _check_nothing_is_missing(pipe.read_all()) == (5_000, [])


def test_a_character_that_the_output_does_not_know_is_escaped(pipe: _Pipe) -> None:
    pipe.stream.reconfigure(encoding="ascii")
    logs.configure("console", "info", pipe.stream)
    logs.get_logger().info(Event.REQUEST_STARTED, request_id="é")

    assert pipe.read_all().endswith(rb"request_id=\xe9" + b"\n")


def test_a_process_that_can_have_no_more_threads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = io.StringIO()
    logs.configure("json", "info", stream)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        logs.get_logger().info(Event.ENGINE_READY, number=0)
        assert not logs.flush(0.01)
    logs.get_logger().info(Event.ENGINE_READY, number=1)

    assert _check_nothing_is_missing(_written(stream).encode()) == (2, [])


def test_a_stream_that_is_closed_does_not_stop_the_engine() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)
    stream.close()

    logs.get_logger().info(Event.ENGINE_READY)
    assert logs.flush(_DEADLINE_S)


def test_a_process_without_stdout_does_not_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    logs.configure("auto", "info")

    logs.get_logger().info(Event.ENGINE_READY)
    assert logs.flush(_DEADLINE_S)


def test_nothing_is_left_to_write_where_nothing_was_configured() -> None:
    structlog.reset_defaults()

    assert logs.flush(0)


# The page.


def _section(event: Event) -> str:
    [section] = re.findall(
        rf"^### `{event}`\n(.*?)(?=^##|\Z)", _PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return str(section)


@pytest.mark.parametrize("event", Event, ids=str)
def test_every_event_is_documented_with_a_line_that_has_its_keys(event: Event) -> None:
    section = _section(event)
    documented = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    [line] = re.findall(r"```json\n(.*)\n```", section)
    example = json.loads(line)

    assert list(example)[:3] == ["timestamp", "level", "event"]
    assert _TIMESTAMP.fullmatch(example["timestamp"])
    assert (example["level"], example["event"]) == (section.strip().partition(".")[0].partition(",")[0], event)
    assert list(example)[3:] == [key for key, kind in documented if key in example or "maybe" not in kind]


def test_the_page_names_no_other_event() -> None:
    named = re.findall(r"^### `(.*)`$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(named) == sorted(Event)
