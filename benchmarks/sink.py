# SPDX-License-Identifier: Apache-2.0
"""A whole engine over loopback TCP, to a frontend that reads everything and looks at nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import zmq

from benchmarks.reference import request_id
from benchmarks.report import Table
from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port

_PLAIN_TOKENS: Final = 300_000
# Of a reply: few requests would take minutes to say as much as many do.
_LONGEST: Final = 100_000
# Nothing comes any more when nothing has come for this long.
_SILENCE_MS: Final = 500
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def measure(running: tuple[int, ...], chunk_sizes: tuple[int, ...], tokens: int) -> Table:
    """Measure CPU of the engine's process per token, ZMQ's own thread included, for about so many tokens."""
    table = Table(
        "Engine over loopback TCP",
        ("chunk", "running", "engine ns/token", "plain loop ns/token", "ratio", "tokens/s"),
    )
    for chunk_size in chunk_sizes:
        for count in running:
            ours, rate = _engine(count, chunk_size, min(_LONGEST, max(256, tokens // count)))
            theirs = _plain(count, chunk_size, max(4, _PLAIN_TOKENS // (count * chunk_size)))
            table.add(chunk_size, count, 1e9 * ours, 1e9 * theirs, ours / theirs, rate)
    return table


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _engine(running: int, chunk_size: int, length: int) -> tuple[float, float]:
    """Return CPU seconds per token, and tokens per second, of requests that run from beginning to end."""
    room = 2 * (length + 64)
    flags = (
        f"--output-token-chunk-size={chunk_size}",
        f"--max-model-len={room}",
        f"--num-gpu-blocks={room // 16 + 1}",
        "--no-log-requests",
    )
    with (
        FrontendDouble() as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}", *flags) as engine,
    ):
        frontend.handshake()
        engine.wait_for("engine ready")
        before = cpu_seconds(engine.process.pid)
        for number in range(running):
            frontend.add(request_id(number), prompt=[number + 1] * 32, max_tokens=length)
        lasted_s = _read_all(frontend._outputs[0])
        used = cpu_seconds(engine.process.pid) - before
    return used / (running * length), running * length / lasted_s


def _plain(running: int, chunk_size: int, steps: int) -> float:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        address = f"tcp://127.0.0.1:{free_port()}"
        socket.bind(address)
        command = [sys.executable, "-m", "benchmarks.reference", address, str(running), str(chunk_size), str(steps)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            socket.recv()
            before = cpu_seconds(process.pid)
            _read_all(socket)
            used = cpu_seconds(process.pid) - before
            process.communicate()
    return used / (running * chunk_size * steps)


def _read_all(socket: zmq.Socket[bytes]) -> float:
    """Read until nothing comes any more; return the seconds from the first message to the last."""
    socket.poll(10_000)
    began = last = time.monotonic()
    while socket.poll(_SILENCE_MS):
        socket.recv_multipart(copy=False)
        last = time.monotonic()
    return last - began
