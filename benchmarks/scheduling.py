# SPDX-License-Identifier: Apache-2.0
"""What a step costs with vLLM's scheduler and KV cache (`load_model=vllm`): no socket, CPU seconds of this process."""

import time
from typing import Final

from benchmarks.report import Table
from benchmarks.rig import PROMPT_TOKENS
from benchmarks.steps import Comparison, make_engine, plain_token_s
from mockengine.engine.config import BatchingConfig
from mockengine.engine.core import EngineCore

_STEPS: Final = 400
_TURNS: Final = 5
_PLAIN_S: Final = 0.2
_BLOCK_TOKENS: Final = 16
# Steps before the measured ones: admissions, and the first outputs.
_FIRST_STEPS: Final = 8
# The bar, in microseconds per running request and step.
_BAR_RUNNING: Final = 256
_BAR_US: Final = 2.0


def measure(running: tuple[int, ...]) -> Table:
    """Measure the cost of a request in a step by running requests, with asynchronous and synchronous scheduling."""
    columns = ("scheduling", "running", "us per request and step", "plain loop us/token", "ratio")
    table = Table("Step with the scheduler", columns)
    for is_async in (True, False):
        name = "async" if is_async else "sync"
        for count in running:
            cost = compare(count, async_scheduling=is_async)
            us = 1e6 * cost.ours_s
            table.add(name, count, us, 1e6 * cost.theirs_s, cost.ratio)
            if count == _BAR_RUNNING:
                table.hold(f"with the scheduler, {name}, {count} running, us per request and step", us, _BAR_US)
    return table


def compare(running: int, *, async_scheduling: bool) -> Comparison:
    """Measure the cost of a request in a step, and that of a token of the plain loop, in turns."""
    costs = [(_cost_s(running, async_scheduling), plain_token_s(running, _PLAIN_S)) for _ in range(_TURNS)]
    ours_s, theirs_s = map(min, zip(*costs, strict=True))
    return Comparison(ours_s, theirs_s)


def _cost_s(running: int, async_scheduling: bool) -> float:  # noqa: FBT001 - a setting's value
    """Return CPU seconds of one request in one step, in the middle of replies that are long enough."""
    length = PROMPT_TOKENS + 2 * (_STEPS + _FIRST_STEPS)
    batching = BatchingConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(8_192, running * PROMPT_TOKENS),
        num_gpu_blocks=1 + running * (1 + length // _BLOCK_TOKENS),
        async_scheduling=async_scheduling,
    )
    engine = make_engine(running, 1, max_model_len=length, batching=batching)
    _step(engine, _FIRST_STEPS)
    if engine.num_running != running:
        raise RuntimeError(f"{engine.num_running} of {running} requests run")
    began = time.process_time()
    _step(engine, _STEPS)
    return (time.process_time() - began) / (_STEPS * running)


def _step(engine: EngineCore, steps: int) -> None:
    for _ in range(steps):
        engine.step(1.0)
