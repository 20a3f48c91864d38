# SPDX-License-Identifier: Apache-2.0
"""Resident memory of the engine's process: at rest, by running requests, and over a million of them."""

import time
import urllib.request
from collections.abc import Callable
from typing import Final

from benchmarks.arrivals import make_add
from benchmarks.reference import request_id
from benchmarks.report import Table
from benchmarks.rig import PROMPT_TOKENS, Rig, joined
from mockengine.testing.processes import free_port

# Tokens, and outputs: the first one and the last.
_SHORT_REPLY: Final = 2
_IN_FLIGHT: Final = 2_000
# Stages whose memory is compared.
_COMPARED: Final = 3
# The bars; nothing that is kept of a request takes as little as two bytes.
_BAR_IDLE_MB: Final = 90.0
_BAR_GROWTH_MB: Final = 2.0


def measure(running: tuple[int, ...]) -> Table:
    """Measure an engine with its admin port, at rest, then with so many requests running at a slow pace."""
    table = Table("Memory", ("running", "resident MB", "times that at rest", "KB per request"))
    idle_mb = _resident_mb(0)
    table.add(0, idle_mb, 1.0, 0.0)
    table.hold("resident at rest, MB", idle_mb, _BAR_IDLE_MB)
    for count in running:
        resident_mb = _resident_mb(count)
        table.add(count, resident_mb, resident_mb / idle_mb, 1e3 * (resident_mb - idle_mb) / count)
    return table


def measure_growth(stages: int, requests: int) -> Table:
    """Serve so many short requests in one process, in stages; compare its memory at the last and at the first ones."""
    table = Table("Growth", ("requests", "resident MB at first", "at last", "growth MB", "requests/s"))
    with joined() as rig:
        send = _sender(rig)
        resident_mb: list[float] = []
        began = time.monotonic()
        for stage in range(stages):
            _serve(rig, send, range(stage * requests, (stage + 1) * requests))
            resident_mb.append(rig.resident_mb)
        rate = stages * requests / (time.monotonic() - began)
    # The least, since buffers of what was just on its way come and go, by several megabytes.
    first_mb, last_mb = min(resident_mb[:_COMPARED]), min(resident_mb[-_COMPARED:])
    table.add(stages * requests, first_mb, last_mb, last_mb - first_mb, rate)
    table.hold(f"growth over {stages * requests} requests, MB", last_mb - first_mb, _BAR_GROWTH_MB)
    return table


def _resident_mb(running: int) -> float:
    port = free_port()
    with joined("--itl-ms=100", f"--admin-port={port}") as rig:
        rig.run_requests(running)
        if running:
            rig.steps.wait_for_outputs(running)
            rig.steps.read_for(1.0)
        # What the admin port needs is loaded a moment after the engine has joined.
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return rig.resident_mb


def _sender(rig: Rig) -> Callable[[int], None]:
    """Return what sends the request of a number, for a fraction of what it costs the engine."""
    request_type, payload = make_add(0, PROMPT_TOKENS, _SHORT_REPLY)
    before, after = payload.split(request_id(0).encode())

    def send(number: int) -> None:
        rig.send([request_type, before + request_id(number).encode() + after])

    return send


def _serve(rig: Rig, send: Callable[[int], None], numbers: range) -> None:
    """Send these requests, and read every output of each."""
    awaited = 0
    for number in numbers:
        send(number)
        awaited += _SHORT_REPLY
        while awaited >= _SHORT_REPLY * _IN_FLIGHT:
            awaited -= rig.steps.next_outputs()
    while awaited:
        awaited -= rig.steps.next_outputs()
