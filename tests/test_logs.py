# SPDX-License-Identifier: Apache-2.0
"""The log: how lines look, where they go, and that losing them harms nobody."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from mockengine import logs
from mockengine.logs import Event

_PAGE = Path(__file__).parents[1] / "docs" / "logs.md"
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
# Logs a few lines and exits with a code that says whether logging raised.
_PROGRAM = """
from mockengine import logs
logs.configure("json", "info")
log = logs.get_logger()
for number in range(1000):
    log.info("engine ready", number=number)
raise SystemExit(7)
"""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def _exit_code(stdout: int) -> int:
    return subprocess.run([sys.executable, "-c", _PROGRAM], check=False, timeout=60, stdout=stdout).returncode


def _raised(error: Exception) -> Exception:
    with pytest.raises(type(error)):
        raise error
    return error


def test_a_line_is_one_json_object_with_its_keys_in_order() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY, engines=[0], clients=1, coordinator=False, join_s=0.25)

    line, end = stream.getvalue().split("\n")
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

    [line] = stream.getvalue().splitlines()
    parsed = json.loads(line)
    assert list(parsed) == ["timestamp", "level", "event", "reason", "exception"]
    assert parsed["exception"].startswith("Traceback (most recent call last):\n")
    assert parsed["exception"].endswith("ValueError: lost\nmarbles")


def test_json_is_ascii_whatever_is_logged() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)

    logs.get_logger().info(Event.REQUEST_STARTED, request_id="é\ud800\x1b\n", frame=b"\xff")

    assert stream.getvalue().isascii()
    assert json.loads(stream.getvalue())["request_id"] == "é\ud800\x1b\n"


def test_auto_is_console_in_colour_on_a_terminal() -> None:
    stream = _Terminal()
    logs.configure("auto", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY, clients=1)

    assert (
        re.sub(r"\x1b\[\d+m", "", stream.getvalue())[27:] == " [info     ] engine ready                   clients=1\n"
    )
    assert "\x1b[" in stream.getvalue()


def test_auto_is_json_elsewhere() -> None:
    stream = io.StringIO()
    logs.configure("auto", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY)

    assert json.loads(stream.getvalue())["event"] == "engine ready"


def test_console_has_no_colour_elsewhere() -> None:
    stream = io.StringIO()
    logs.configure("console", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY, clients=1)

    assert stream.getvalue()[27:] == " [info     ] engine ready                   clients=1\n"


def test_json_is_json_on_a_terminal_too() -> None:
    stream = _Terminal()
    logs.configure("json", "info", stream)

    logs.get_logger().info(Event.ENGINE_READY)

    assert json.loads(stream.getvalue())["event"] == "engine ready"


def test_a_client_cannot_write_to_the_terminal() -> None:
    stream = _Terminal()
    logs.configure("console", "info", stream)

    logs.get_logger().info(Event.REQUEST_STARTED, request_id="\x1b]0;owned\x07\r\u202e")

    assert r"\x1b]0;owned\x07\r\u202e" in stream.getvalue()


def test_an_exception_is_readable_on_the_console() -> None:
    stream = io.StringIO()
    logs.configure("console", "info", stream)

    logs.get_logger().error(Event.ENGINE_FAILED, exc_info=ValueError("lost"))

    assert stream.getvalue().splitlines()[-1] == "ValueError: lost"


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

    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == logged


def test_a_second_configuration_holds_for_new_loggers() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("json", "info", first)
    logs.get_logger().info(Event.ENGINE_READY)
    logs.configure("json", "info", second)
    logs.get_logger().info(Event.ENGINE_LEFT)

    assert [json.loads(stream.getvalue())["event"] for stream in (first, second)] == ["engine ready", "engine left"]


def test_a_reader_that_goes_away_does_not_stop_the_engine() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert _exit_code(writer) == 7
    finally:
        os.close(writer)


def test_a_full_disk_does_not_stop_the_engine() -> None:
    with Path("/dev/full").open("wb") as full:
        assert _exit_code(full.fileno()) == 7


def test_a_stream_that_is_closed_does_not_stop_the_engine() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)
    stream.close()

    logs.get_logger().info(Event.ENGINE_READY)


def test_a_process_without_stdout_does_not_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    logs.configure("auto", "info")

    logs.get_logger().info(Event.ENGINE_READY)


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
