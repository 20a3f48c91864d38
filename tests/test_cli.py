# SPDX-License-Identifier: Apache-2.0
"""The command line: commands, exit codes, help, and what is not imported for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mockengine import __version__
from mockengine.cli import main
from mockengine.settings import Description, Settings, as_text, describe

_DESCRIPTIONS = describe()
# A frontend that is not there.
_SMOKE = "smoke --url http://127.0.0.1:1"
# Runs a command line and prints which of the modules that cost much it has imported.
_IMPORTS = """
import sys
from mockengine.cli import main
main(sys.argv[1:])
print(*sorted({"numpy", "zmq", "msgpack", "structlog", "yaml", "pydantic"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("MOCKENGINE_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the list of what was served; serving ends at once with exit code 5."""
    served: list[Settings] = []

    def run(settings: Settings) -> int:
        served.append(settings)
        return 5

    monkeypatch.setattr("mockengine.service.run", run)
    return served


@pytest.mark.parametrize("argv", [["--engine-count", "2"], ["serve", "--engine-count", "2"]])
def test_serve_is_the_default_command(argv: list[str], served: list[Settings]) -> None:
    assert main(argv) == 5
    assert served == [Settings(engine_count=2)]


def test_nothing_at_all_serves_with_the_defaults(served: list[Settings]) -> None:
    assert main([]) == 5
    assert served == [Settings()]


def test_the_arguments_of_the_process_are_the_default(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mockengine", "--seed=4"])
    monkeypatch.setenv("MOCKENGINE_VOCAB_SIZE", "10")

    assert main() == 5
    assert served == [Settings(seed=4, vocab_size=10)]


@pytest.mark.parametrize("command", [[], ["serve"], ["settings"]])
def test_problems_with_the_settings_exit_with_2_and_start_nothing(
    command: list[str], served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*command, "--seed", "x", "--rejoin=maybe"])

    assert (code, served) == (2, [])
    assert capsys.readouterr() == (
        "",
        (
            "mockengine: the settings have 2 problems:\n"
            "  --rejoin: maybe is not allowed (use true or false)\n"
            "  --seed: x is not allowed (use a whole number from 0 to 18446744073709551615)\n"
        ),
    )


def test_an_engine_that_cannot_start_where_it_is_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "state.json"

    assert main(["--state-file", str(path)]) == 1
    assert capsys.readouterr().err.startswith(
        f"mockengine: state_file {path} cannot be used: No such file or directory"
    )


def test_an_unknown_command_exits_with_2_and_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre", "--seed", "x"]) == 2
    assert capsys.readouterr() == (
        "",
        "mockengine: there is no command 'sevre' (use serve, settings, health, ctl, scenario, smoke, fit, or --help)\n",
    )


@pytest.mark.parametrize("argv", [["--version"], ["serve", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr() == (f"mockengine {__version__}\n", "")


# Help.


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["serve", "--help"], ["settings", "-h"], ["--seed=x", "--help"]])
def test_help_exits_with_0_whatever_else_is_there(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    output = capsys.readouterr()
    assert output.out.startswith("usage: mockengine [serve] [FLAGS]\n")
    assert output.err == ""


@pytest.mark.parametrize("setting", _DESCRIPTIONS.values(), ids=_DESCRIPTIONS)
def test_help_tells_all_about_a_setting(setting: Description, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    words = " ".join(capsys.readouterr().out.split())

    assert f" {setting.flag}, --no-" in words if setting.is_switch else f" {setting.flag} VALUE " in words
    assert setting.sentence in words
    assert f"{setting.variable}, default {setting.default}, allowed: {setting.allowed}" in words


def test_help_has_a_heading_for_each_group_and_no_long_lines(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()

    groups = {f"{setting.group}:" for setting in _DESCRIPTIONS.values()}
    assert groups <= set(lines)
    assert max(map(len, lines)) <= 110


# Settings.


def test_settings_are_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--start-rank=2", "--no-rejoin"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]

    origins = {"start_rank": "--start-rank", "rejoin": "--no-rejoin"}
    expected = dict(Settings(start_rank=2, rejoin=False)) | {"data_parallel_size": 3}
    assert header.split() == ["SETTING", "VALUE", "FROM"]
    assert rows == [[name, as_text(value), origins.get(name, "default")] for name, value in expected.items()]
    assert {line.index(row[2], header.index("FROM")) for line, row in zip(lines, rows, strict=True)} == {
        header.index("FROM")
    }


def test_settings_are_printed_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("log_level: error\n")
    monkeypatch.setenv("MOCKENGINE_CONFIG", str(file))
    monkeypatch.setenv("MOCKENGINE_ENGINE_COUNT", "4")

    assert main(["settings", "--json", "--join-timeout-s", "1.5"]) == 0

    assert json.loads(capsys.readouterr().out) == {
        name: {"value": value, "from": "default"} for name, value in Settings()
    } | {
        "log_level": {"value": "error", "from": f"{file}:1"},
        "engine_count": {"value": 4, "from": "MOCKENGINE_ENGINE_COUNT"},
        "data_parallel_size": {"value": 4, "from": "default"},
        "join_timeout_s": {"value": 1.5, "from": "--join-timeout-s"},
    }


# Where output goes.


def _shell(arguments: str) -> tuple[int, str, str]:
    """Run a command line with redirections and return exit code, stdout and stderr."""
    command = ["/bin/sh", "-c", f'exec "$0" -m mockengine {arguments}', sys.executable]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "settings", "settings --json", "smoke --help", "fit --help"]
)
def test_output_that_nobody_reads_to_the_end_is_no_error(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mockengine", *arguments.split()]
    try:
        done = subprocess.run(command, check=False, timeout=60, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "settings", "settings --json", "smoke --help", f"{_SMOKE} --json"]
)
@pytest.mark.parametrize(
    ("redirection", "complaint"),
    [
        (">/dev/full", "mockengine: stdout: No space left on device\n"),
        (">&-", "mockengine: stdout is closed, so there is nowhere to print to\n"),
    ],
)
def test_output_that_cannot_be_written_is_a_failure(arguments: str, redirection: str, complaint: str) -> None:
    assert _shell(f"{arguments} {redirection}") == (1, "", complaint)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        *(("--bad", 2), ("settings --bad", 2), ("nonsense", 2), ("smoke --bad", 2), (_SMOKE, 1)),
        *(("fit --bad", 2), ("fit no-such-file", 1)),
    ],
)
def test_a_complaint_that_cannot_be_written_leaves_the_exit_code(
    arguments: str, exit_code: int, redirection: str
) -> None:
    assert _shell(f"{arguments} {redirection}") == (exit_code, "", "")


@pytest.mark.parametrize("redirection", [">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_without_any_output_the_exit_code_is_left(redirection: str) -> None:
    assert _shell(f"--help {redirection}") == (1, "", "")


def test_a_character_that_stdout_does_not_know_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")

    exit_code, stdout, stderr = _shell("settings --handshake-address ipc:///tmp/é")

    assert (exit_code, stderr) == (0, "")
    assert r"ipc:///tmp/\xe9 " in stdout


def test_smoke_says_what_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMOKE.split(), "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["ok"] is False
    assert output.err == ""


# Start-up.


@pytest.mark.parametrize(
    ("argv", "imported"),
    [
        (["--help"], "pydantic"),
        (["settings"], "pydantic"),
        (["--sed", "1"], "pydantic"),
        (["--version"], ""),
        (["health", "--admin-port=1"], "pydantic"),
        (["smoke", "--help"], ""),
        (_SMOKE.split(), ""),
        (["nonsense"], ""),
    ],
)
def test_a_command_imports_only_what_it_needs(argv: list[str], imported: str) -> None:
    command = [sys.executable, "-c", _IMPORTS, *argv]
    done = subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    assert done.stderr.splitlines()[-1] == imported


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "mockengine", "--version"]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == (f"mockengine {__version__}\n", "")
