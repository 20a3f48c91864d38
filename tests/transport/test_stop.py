# SPDX-License-Identifier: Apache-2.0
"""The wish to stop: who may have it, and which comes first."""

import os
import select
import signal
import subprocess
import sys

from mockengine.transport.stop import StopSignal

_FAILS_AND_GETS_A_SIGNAL = """
import os, signal
from mockengine.transport.stop import StopSignal
with StopSignal() as stop:
    stop.fail(RuntimeError("a defect"))
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.signal_name, stop.failure)
"""


def _is_readable(stop: StopSignal) -> bool:
    return bool(select.select([stop.fileno()], [], [], 0)[0])


def test_a_wake_up_is_heard_once_and_asks_for_nothing() -> None:
    with StopSignal() as stop:
        for _ in range(100_000):
            # More than the descriptor holds.
            stop.wake()
        assert _is_readable(stop)
        stop.clear_wakeup()
        assert not _is_readable(stop)
        assert not stop.requested


def test_the_first_signal_and_the_first_failure_are_kept() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.request("SIGINT")
        first, second = RuntimeError("first"), RuntimeError("second")
        stop.fail(first)
        stop.fail(second)
        assert (stop.signal_name, stop.failure) == ("SIGTERM", first)


def test_a_failure_wakes_whoever_sleeps() -> None:
    with StopSignal() as stop:
        stop.fail(RuntimeError("a defect"))
        assert stop.requested
        assert stop.signal_name is None
        assert _is_readable(stop)


def test_a_signal_after_a_failure_is_the_first_signal() -> None:
    command = [sys.executable, "-c", _FAILS_AND_GETS_A_SIGNAL]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "SIGTERM a defect\n"


def test_who_is_gone_is_not_woken() -> None:
    with StopSignal() as stop:
        pass
    stop.wake()
    stop.fail(RuntimeError("too late"))
