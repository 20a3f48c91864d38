# SPDX-License-Identifier: Apache-2.0
"""The short form: the ratios that tell whether a change has made the engine slower, in less than a minute."""

import time
from typing import Final

from benchmarks import arrivals, lateness, logprobs, rest, scheduling, sink, steps
from benchmarks.expected import Measures
from benchmarks.rig import joined

_STEP_S: Final = 0.6
_WINDOW_S: Final = 0.2
_REQUESTS: Final = 2_000
_STARTS: Final = 3
_ITL_MS: Final = 5.0
_LATE_RUNNING: Final = 256
# Many short windows: on a busy machine some are quiet.
_LATE_WINDOWS: Final = 16
_LATE_WINDOW_S: Final = 0.25


def _lateness() -> float:
    """Return the p99 of the quietest window, in that of a program that does nothing but sleep."""
    with joined(f"--itl-ms={_ITL_MS}") as rig:
        grid = lateness.start(rig, _LATE_RUNNING, _ITL_MS)
        windows = [lateness.listen(rig, grid, _LATE_WINDOW_S).made_ms for _ in range(_LATE_WINDOWS)]
    sleeps = [_oversleeping_ms() for _ in range(_LATE_WINDOWS)]
    ours, theirs = (min(lateness.quantile(each, 0.99) for each in all_of) for all_of in (windows, sleeps))
    return ours / theirs


def _oversleeping_ms() -> list[float]:
    """Return by how much each sleep of a window was longer than asked for."""
    late_ms: list[float] = []
    for _ in range(round(1e3 * _LATE_WINDOW_S / _ITL_MS)):
        began = time.monotonic()
        time.sleep(_ITL_MS / 1e3)
        late_ms.append(1e3 * (time.monotonic() - began) - _ITL_MS)
    return late_ms


RATIOS: Final[Measures] = {
    "step alone, 256 running, in plain loops": lambda: steps.compare(256, 1, _STEP_S).ratio,
    "step alone, 4096 running, in plain loops": lambda: steps.compare(4_096, 1, _STEP_S).ratio,
    "step with 5 logprobs, 256 running, in plain loops": lambda: logprobs.compare(256, 5, _STEP_S).ratio,
    "over TCP, 64 running, in plain loops": lambda: sink.compare(64, 1, _WINDOW_S)[0].ratio,
    "over TCP, 256 running, in plain loops": lambda: sink.compare(256, 1, _WINDOW_S)[0].ratio,
    "with the scheduler, 256 running, in plain loops": lambda: scheduling.compare(256, async_scheduling=True).ratio,
    "ADD, in msgpack's decoding": lambda: arrivals.compare_add(_REQUESTS).ratio,
    "prompt of 44000 tokens, in msgpack's decoding": lambda: arrivals.compare_prompt(44_000).ratio,
    "prompt of 128000 tokens, in msgpack's decoding": lambda: arrivals.compare_prompt(128_000).ratio,
    "start to READY, in imports of a plain loop": lambda: rest.compare_start(_STARTS, min).ratio,
    "lateness p99, 256 running, in that of plain sleeps": _lateness,
}
"""What measures each; less is better in all of them."""
