# SPDX-License-Identifier: Apache-2.0
"""Resident memory of the engine's process: at rest, and by running requests."""

import urllib.request
from pathlib import Path

import zmq

from benchmarks.reference import request_id
from benchmarks.report import Table
from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port

_LENGTH = 1_000_000


def measure(running: tuple[int, ...]) -> Table:
    """Measure with so many requests running at once, at a slow pace; 0 is an engine at rest, with its admin port."""
    table = Table("Memory", ("running", "resident MB"))
    for count in running:
        table.add(count, _one(count))
    return table


def _one(running: int) -> float:
    port = free_port()
    flags = (
        "--itl-ms=100",
        f"--max-model-len={2 * _LENGTH}",
        f"--num-gpu-blocks={_LENGTH // 8}",
        f"--admin-port={port}",
        "--no-log-requests",
    )
    with (
        FrontendDouble() as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}", *flags) as engine,
    ):
        frontend.handshake()
        for number in range(running):
            frontend.add(request_id(number), prompt=[number + 1] * 32, max_tokens=_LENGTH)
        _read_messages(frontend._outputs[0], 30 if running else 0)
        # What the admin port needs is loaded a moment after the engine has joined.
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            pass
        status = Path(f"/proc/{engine.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1_000


def _read_messages(socket: zmq.Socket[bytes], count: int) -> None:
    for _ in range(count):
        if socket.poll(10_000):
            socket.recv_multipart(copy=False)
