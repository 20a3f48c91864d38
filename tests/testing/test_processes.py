# SPDX-License-Identifier: Apache-2.0
"""Child processes: heard while they run, gone afterwards with all that they started."""

import os
import signal
import sys

import pytest

from mockengine.testing.processes import ChildProcess

GRANDCHILD = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - a kernel interface, not a path of ours
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_is_kept_and_the_exit_code_returned() -> None:
    with ChildProcess(_python("print('one'); print('two'); raise SystemExit(3)")) as child:
        assert child.wait() == 3
        assert child.lines == ["one", "two"]


def test_wait_for_a_condition_fails_at_once_when_the_process_has_ended() -> None:
    with (
        ChildProcess(_python("print('last words')")) as child,
        pytest.raises(TimeoutError, match="no miracle: the process ended with 0 and wrote:\nlast words"),
    ):
        child.wait_until(lambda: False, "miracle", deadline_s=60)


def test_wait_for_a_condition_ends_with_its_deadline() -> None:
    with (
        ChildProcess(_python("import time; time.sleep(60)")) as child,
        pytest.raises(TimeoutError, match=r"no miracle within 0\.1 s"),
    ):
        child.wait_until(lambda: False, "miracle", deadline_s=0.1)


def test_grandchildren_end_with_the_context() -> None:
    with ChildProcess(_python(GRANDCHILD)) as child:
        child.wait_until(lambda: bool(child.lines), "pid of the grandchild")
        grandchild = int(child.lines[0])
        assert _is_running(grandchild)
    assert not _is_running(grandchild)


def test_process_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    with ChildProcess(_python(code)) as child:
        child.wait_until(lambda: bool(child.lines), "first line")
        assert child.stop(deadline_s=0.2) == -signal.SIGKILL


def test_everything_ends_when_the_parent_is_killed() -> None:
    parent = (
        "import sys, time; from mockengine.testing.processes import ChildProcess\n"
        f"child = ChildProcess([sys.executable, '-c', {GRANDCHILD!r}])\n"
        "child.wait_until(lambda: bool(child.lines), 'pid')\n"
        "print(child.process.pid, child.lines[0], flush=True)\n"
        "time.sleep(60)"
    )
    with ChildProcess(_python(parent)) as outer:
        outer.wait_until(lambda: bool(outer.lines), "pids")
        pids = [int(pid) for pid in outer.lines[0].split()]
        os.kill(outer.process.pid, signal.SIGKILL)
        outer.process.wait()
        end = ChildProcess(_python("import time; time.sleep(30)"))
        with end:
            end.wait_until(lambda: not any(map(_is_running, pids)), "end of the orphans")


def test_settings_of_the_parent_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKENGINE_SEED", "7")
    code = "import os; print([name for name in os.environ if name.startswith('MOCKENGINE_')])"
    with ChildProcess(_python(code), {"MOCKENGINE_ENGINE_COUNT": "2"}) as child:
        child.wait()
        assert child.lines == ["['MOCKENGINE_ENGINE_COUNT']"]
