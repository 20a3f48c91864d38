# SPDX-License-Identifier: Apache-2.0
"""Encoder and step alone: no socket, no frontend, CPU seconds of this process."""

import time
from array import array
from collections.abc import Callable
from functools import partial

from benchmarks.reference import PlainLoop, request_id
from benchmarks.report import Table
from mockengine.engine.config import EngineConfig
from mockengine.engine.core import EngineCore
from mockengine.engine.dialect import Dialect
from mockengine.journal import Journal
from mockengine.logs import configure, get_logger
from mockengine.replies.key import SeedScope
from mockengine.replies.random import RandomTokens
from mockengine.wire.lines import NEWEST
from mockengine.wire.messages import Add
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

_ENDLESS = 2**31 - 2


def measure(running: tuple[int, ...], chunk_sizes: tuple[int, ...], least_s: float) -> Table:
    """Measure the cost of a token by running requests and chunk size, for at least `least_s` seconds each."""
    table = Table("Step alone", ("chunk", "running", "engine ns/token", "plain loop ns/token", "ratio"))
    for chunk_size in chunk_sizes:
        for count in running:
            engine = make_engine(count, chunk_size)
            plain = PlainLoop(count, chunk_size)
            # In turns, so that a machine that changes its speed changes it for both.
            costs = [(_cost(partial(engine.step, 1.0), least_s / 3), _cost(plain.step, least_s / 3)) for _ in range(3)]
            ours, theirs = (min(cost) / (count * chunk_size) for cost in zip(*costs, strict=True))
            table.add(chunk_size, count, 1e9 * ours, 1e9 * theirs, ours / theirs)
    return table


def make_engine(running: int, chunk_size: int, max_model_len: int = 2**31 - 1) -> EngineCore:
    """Return an engine with so many requests in the middle of an endless reply."""
    configure("json", "error")
    config = EngineConfig(
        max_model_len=max_model_len,
        block_size=16,
        output_token_chunk_size=chunk_size,
        default_output_tokens=0,
        seed=0,
        seed_scope=SeedScope.PROMPT,
        data_parallel_size=1,
        clients=1,
        has_coordinator=False,
        has_waves=False,
    )
    journal = Journal(get_logger(), log_requests=False, chunk_size=chunk_size)
    engine = EngineCore(0, config, RandomTokens(32_000), Dialect(NEWEST), journal)
    for number in range(running):
        engine.receive(Add(make_request(number)), 0, 0.0)
    for _ in range(3):
        engine.step(0.5)
    return engine


def make_request(number: int, prompt_tokens: int = 32, max_tokens: int = _ENDLESS - 32) -> EngineCoreRequest:
    """Return a request as a frontend of the newest line sends it."""
    return EngineCoreRequest(
        request_id=request_id(number),
        prompt_token_ids=array("I", range(number, number + prompt_tokens)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        client_index=0,
        sampling_keys=frozenset({"max_tokens", "stop"}),
    )


def _cost(step: Callable[[], object], least_s: float) -> float:
    """Return CPU seconds of one call, over as many as take `least_s`."""
    calls, began = 0, time.process_time()
    while (used := time.process_time() - began) < least_s:
        for _ in range(8):
            step()
        calls += 8
    return used / calls
