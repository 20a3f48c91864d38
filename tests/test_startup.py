# SPDX-License-Identifier: Apache-2.0
"""Signals that come while the process is starting: they end it as they would end an engine, without a traceback."""

import signal
import subprocess
import sys
import time

import pytest

# Enters the program as the console script does, and gets a signal at the import of the module named first.
_PROGRAM = """
import os, sys
name, number = sys.argv.pop(1), int(sys.argv.pop(1))

class Signaller:
    def find_spec(self, module, path=None, target=None):
        if module == name:
            os.kill(os.getpid(), number)
            print("the signal has not ended the process")

sys.meta_path.insert(0, Signaller())
from mockengine.__main__ import main
sys.exit(main())
"""
_ENGINE = ["--handshake-address", "tcp://127.0.0.1:1"]


def _end(module: str, number: signal.Signals, argv: list[str]) -> tuple[int, str]:
    """Return exit code and output of a process that gets the signal when it imports `module`."""
    command = [sys.executable, "-c", _PROGRAM, module, str(int(number)), *argv]
    done = subprocess.run(command, check=False, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("module", "argv"),
    [("mockengine.cli", []), ("pydantic", ["serve"]), ("mockengine.service", _ENGINE), ("numpy", []), ("zmq", _ENGINE)],
    ids=["cli", "pydantic", "service", "numpy", "zmq"],
)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=str)
def test_an_engine_that_is_starting_ends_as_one_that_runs(
    module: str, argv: list[str], number: signal.Signals, exit_code: int
) -> None:
    assert _end(module, number, argv) == (exit_code, "")


@pytest.mark.parametrize(
    ("module", "argv"),
    [("pydantic", ["settings"]), ("http.client", ["smoke", "--url", "http://127.0.0.1:1"])],
    ids=["settings", "smoke"],
)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=str)
def test_any_other_command_that_is_ended_does_not_claim_success(
    module: str, argv: list[str], number: signal.Signals, exit_code: int
) -> None:
    assert _end(module, number, argv) == (exit_code, "")


@pytest.mark.parametrize("entry", [["-m", "mockengine"], ["-c", "from mockengine.__main__ import main; exit(main())"]])
def test_sigterm_at_any_time_ends_the_process_quietly(entry: list[str]) -> None:
    for step in range(16):
        command = [sys.executable, *entry, *_ENGINE]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # Not a wait for a condition: any moment will do.
        time.sleep(0.02 * step)
        process.terminate()
        _, stderr = process.communicate(timeout=60)

        # At first there is no program yet that could handle it, only Python.
        assert process.returncode in (0, -signal.SIGTERM)
        assert stderr == ""


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("2", "2")])
def test_numpy_starts_no_threads_unless_told_to(given: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
    program = "import os; from mockengine.__main__ import main; main(); print(os.environ['OPENBLAS_NUM_THREADS'])"
    command = [sys.executable, "-c", program, "--version"]

    assert subprocess.check_output(command, timeout=60, text=True).splitlines()[-1] == used
