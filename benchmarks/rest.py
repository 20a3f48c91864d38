# SPDX-License-Identifier: Apache-2.0
"""A process before it serves anybody: how soon it is there, and what it takes while nothing happens."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from benchmarks.report import Table
from benchmarks.rig import joined
from benchmarks.steps import Comparison
from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port

# What no engine of this kind does without.
_PLAIN_START: Final = "import msgpack, numpy, zmq"
# The admin port loads what it needs after the engine has joined.
_SETTLES_S: Final = 2.0
# The bars; a process that waits without waking up takes nothing at all.
_BAR_START_S: Final = 1.0
_BAR_IDLE_SHARE: Final = 0.005


def measure(starts: int, idle_s: float) -> Table:
    """Measure so many starts, and an idle process for so many seconds."""
    table = Table("At rest", ("what", "measured", "compared with", "which takes", "ratio"))
    start = compare_start(starts, median)
    imports = f'python -c "{_PLAIN_START}", s'
    table.add("start to READY, s", start.ours_s, imports, start.theirs_s, start.ratio)
    table.hold("start to READY, s", start.ours_s, _BAR_START_S)
    for name, flags in {"": (), " with admin port": (f"--admin-port={free_port()}",)}.items():
        share = _idle_share(flags, idle_s)
        table.add(f"idle{name}, CPU s", share * idle_s, "the time, s", idle_s, share)
        table.hold(f"idle{name}, CPU seconds per second", share, _BAR_IDLE_SHARE)
    return table


def compare_start(starts: int, of_all: Callable[[Sequence[float]], float]) -> Comparison:
    """Measure from the start of the process to READY, a frontend waiting, and a Python that only imports, in turns.

    Args:
        starts: how many of each.
        of_all: which of them counts.

    """
    seconds = [(_start_s(), _plain_start_s()) for _ in range(starts)]
    ours_s, theirs_s = map(of_all, zip(*seconds, strict=True))
    return Comparison(ours_s, theirs_s)


def _start_s() -> float:
    with FrontendDouble() as frontend:
        began = time.monotonic()
        with EngineProcess(f"--handshake-address={frontend.handshake_address}") as engine:
            frontend.greet()
            _, status = frontend.next_status()
            lasted_s = time.monotonic() - began
            engine.kill()
    if status.status != "READY":
        raise ValueError(f"{status.status} came instead of READY")
    return lasted_s


def _plain_start_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _PLAIN_START], check=True)
    return time.monotonic() - began


def _idle_share(flags: tuple[str, ...], lasts_s: float) -> float:
    with joined(*flags) as rig:
        time.sleep(_SETTLES_S)
        used_before_s = rig.cpu_s
        time.sleep(lasts_s)
        return (rig.cpu_s - used_before_s) / lasts_s
