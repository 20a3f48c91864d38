# SPDX-License-Identifier: Apache-2.0
"""How late steps are when they have a pace, as the engine's own metrics count it, and whether the pace drifts."""

import re
import time
import urllib.request

import zmq

from benchmarks.reference import request_id
from benchmarks.report import Table
from benchmarks.sink import cpu_seconds
from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port

_BUCKET = re.compile(r'^mockengine_step_lateness_seconds_bucket\{le="(\S+)"\} (\S+)$', re.MULTILINE)


def measure(running: tuple[int, ...], itl_ms: float, lasts_s: float) -> Table:
    """Measure for so many seconds each, with a frontend that reads."""
    columns = ("running", "p50 ms, at most", "p99 ms, at most", "steps made / due", "engine CPU %")
    table = Table(f"Lateness of steps {itl_ms:g} ms apart", columns)
    for count in running:
        table.add(count, *_one(count, itl_ms, lasts_s))
    return table


def _one(running: int, itl_ms: float, lasts_s: float) -> tuple[float, float, float, float]:
    length = round(10 * 1_000 * lasts_s / itl_ms)
    port = free_port()
    flags = (
        f"--itl-ms={itl_ms}",
        f"--max-model-len={2 * length + 64}",
        f"--num-gpu-blocks={length // 8 + 5}",
        f"--admin-port={port}",
        "--no-log-requests",
    )
    with (
        FrontendDouble() as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}", *flags) as engine,
    ):
        frontend.handshake()
        for number in range(running):
            frontend.add(request_id(number), prompt=[number + 1] * 32, max_tokens=length)
        _read_for(frontend._outputs[0], 0.5)
        before, cpu, began = _buckets(port), cpu_seconds(engine.process.pid), time.monotonic()
        _read_for(frontend._outputs[0], lasts_s)
        lasted_s, used = time.monotonic() - began, cpu_seconds(engine.process.pid) - cpu
        after = _buckets(port)
    counts = [(bound, after[bound] - before[bound]) for bound in after]
    steps = counts[-1][1]
    return (
        1e3 * _quantile(counts, 0.5),
        1e3 * _quantile(counts, 0.99),
        steps * itl_ms / 1e3 / lasted_s,
        100 * used / lasted_s,
    )


def _read_for(socket: zmq.Socket[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if socket.poll(round(1_000 * left)):
            socket.recv_multipart(copy=False)


def _buckets(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return {bound: float(count) for bound, count in _BUCKET.findall(response.read().decode())}


def _quantile(counts: list[tuple[str, float]], share: float) -> float:
    """Return the bound, in seconds, within which that share of the steps stayed."""
    return next(float(bound) for bound, count in counts if count >= share * counts[-1][1])
