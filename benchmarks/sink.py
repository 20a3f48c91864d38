# SPDX-License-Identifier: Apache-2.0
"""A whole engine over loopback TCP, to a frontend that reads everything and looks at nothing."""

import subprocess
import sys
import time
from typing import Final

import zmq

from benchmarks.report import Table
from benchmarks.rig import Rig, cpu_seconds, joined
from benchmarks.steps import Comparison
from mockengine.testing.processes import free_port

TITLE: Final = "Engine over loopback TCP"

_PLAIN_TOKENS: Final = 200_000
_LEAST_PLAIN_STEPS: Final = 4
_TURNS: Final = 3
# The bar: requests running, and the engine's cost in that of the plain loop.
_BAR_RUNNING: Final = 256
_BAR_RATIO: Final = 1 / 8


def measure(running: tuple[int, ...], chunk_sizes: tuple[int, ...], window_s: float) -> Table:
    """Measure CPU of the engine's whole process per token, in some windows of so many seconds each."""
    columns = ("chunk", "running", "engine ns/token", "plain loop ns/token", "ratio", "tokens/s")
    table = Table(TITLE, columns)
    for chunk_size in chunk_sizes:
        for count in running:
            cost, rate = compare(count, chunk_size, window_s)
            table.add(chunk_size, count, 1e9 * cost.ours_s, 1e9 * cost.theirs_s, cost.ratio, rate)
            if (chunk_size, count) == (1, _BAR_RUNNING):
                table.hold(f"CPU per token over TCP, {count} running, in plain loops", cost.ratio, _BAR_RATIO)
    return table


def compare(running: int, chunk_size: int, window_s: float) -> tuple[Comparison, float]:
    """Measure the cost of a token, in turns, and how many come per second.

    The engine stands still while the plain loop runs.
    """
    costs: list[tuple[float, float]] = []
    rates: list[float] = []
    steps = max(_LEAST_PLAIN_STEPS, _PLAIN_TOKENS // (running * chunk_size))
    with joined(f"--output-token-chunk-size={chunk_size}") as rig:
        rig.run_requests(running)
        rig.steps.wait_for_outputs(running)
        rig.pause()
        rig.steps.read_rest()
        for _ in range(_TURNS):
            used_s, lasted_s, steps_made = _window(rig, window_s)
            tokens = steps_made * running * chunk_size
            costs.append((used_s / tokens, _plain(running, chunk_size, steps)))
            rates.append(tokens / lasted_s)
    ours_s, theirs_s = map(min, zip(*costs, strict=True))
    return Comparison(ours_s, theirs_s), max(rates)


def _window(rig: Rig, lasts_s: float) -> tuple[float, float, int]:
    """Let a paused engine run for a while; return CPU and other seconds that it took, and steps that it made."""
    rig.resume()
    began, used_before_s = time.monotonic(), rig.cpu_s
    made_at = rig.steps.read_for(lasts_s)
    ended, used_s = time.monotonic(), rig.cpu_s - used_before_s
    rig.pause()
    # What had been said by then may have been on its way still.
    made_at += rig.steps.read_rest()
    return used_s, ended - began, sum(began <= moment <= ended for moment in made_at)


def _plain(running: int, chunk_size: int, steps: int) -> float:
    """Return the CPU seconds of one token of the plain loop."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        address = f"tcp://127.0.0.1:{free_port()}"
        socket.bind(address)
        command = [sys.executable, "-m", "benchmarks.reference", address, str(running), str(chunk_size), str(steps)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            socket.recv()
            used_before_s = cpu_seconds(process.pid)
            for _ in range(steps):
                socket.recv(copy=False)
            used_s = cpu_seconds(process.pid) - used_before_s
            process.communicate()
    return used_s / (running * chunk_size * steps)
