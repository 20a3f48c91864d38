# SPDX-License-Identifier: Apache-2.0
"""Encoder and step alone: no socket, no frontend, CPU seconds of this process."""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.reference import PlainLoop, request_id
from benchmarks.report import Table
from benchmarks.rig import PROMPT_TOKENS
from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.core import EngineCore
from mockengine.engine.dialect import Dialect
from mockengine.journal import Journal
from mockengine.logs import configure, get_logger
from mockengine.replies.planner import RepliesConfig
from mockengine.wire.lines import NEWEST
from mockengine.wire.messages import Add
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

TITLE: Final = "Step alone"

_MAX_MODEL_LEN: Final = 2**31 - 1
_TURNS: Final = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds that one thing takes the engine, and that what it is compared with takes, measured in turns."""

    ours_s: float
    theirs_s: float

    @property
    def ratio(self) -> float:
        """The engine's cost in that of the other."""
        return self.ours_s / self.theirs_s


def measure(running: tuple[int, ...], chunk_sizes: tuple[int, ...], least_s: float) -> Table:
    """Measure the cost of a token by running requests and chunk size, for at least `least_s` seconds each."""
    columns = ("chunk", "running", "engine ns/token", "plain loop ns/token", "ratio", "tokens per CPU s")
    table = Table(TITLE, columns)
    for chunk_size in chunk_sizes:
        for count in running:
            cost = compare(count, chunk_size, least_s)
            table.add(chunk_size, count, 1e9 * cost.ours_s, 1e9 * cost.theirs_s, cost.ratio, 1 / cost.ours_s)
    return table


def compare(running: int, chunk_size: int, least_s: float) -> Comparison:
    """Measure the cost of a token, and that of one of the plain loop."""
    return compare_step(partial(make_engine(running, chunk_size).step, 1.0), running, chunk_size, least_s)


def compare_step(step: Callable[[], object], running: int, chunk_size: int, least_s: float) -> Comparison:
    """Measure the cost of a token, in turns, so that a machine that changes its speed changes it for both."""
    plain, turn_s = PlainLoop(running, chunk_size), least_s / _TURNS
    costs = [(_cost(step, turn_s), _cost(plain.step, turn_s)) for _ in range(_TURNS)]
    ours_s, theirs_s = (min(cost) / (running * chunk_size) for cost in zip(*costs, strict=True))
    return Comparison(ours_s, theirs_s)


def plain_token_s(running: int, least_s: float) -> float:
    """Return the CPU seconds of one token of the plain loop."""
    return _cost(PlainLoop(running, 1).step, least_s) / running


def make_engine(
    running: int,
    chunk_size: int,
    max_model_len: int = _MAX_MODEL_LEN,
    batching: BatchingConfig | None = None,
    vocab_size: int = 32_000,
    num_logprobs: int | None = None,
) -> EngineCore:
    """Return an engine with so many requests in the middle of a reply that fills their context."""
    configure("json", "error")
    config = EngineConfig(
        max_model_len=max_model_len,
        block_size=16,
        output_token_chunk_size=chunk_size,
        replies=RepliesConfig(vocab_size=vocab_size),
        data_parallel_size=1,
        clients=1,
        has_coordinator=False,
        has_waves=False,
        batching=batching,
    )
    journal = Journal(get_logger(), log_requests=False, chunk_size=chunk_size)
    engine = EngineCore(0, config, Dialect(NEWEST), journal)
    for number in range(running):
        params = SamplingParams(max_tokens=max_model_len - PROMPT_TOKENS, logprobs=num_logprobs)
        engine.receive(Add(_request(number, params)), 0, 0.0)
    for _ in range(3):
        engine.step(0.5)
    return engine


def _request(number: int, params: SamplingParams) -> EngineCoreRequest:
    """Return a request as a frontend of the newest line sends it."""
    return EngineCoreRequest(
        request_id=request_id(number),
        prompt_token_ids=array("I", range(number, number + PROMPT_TOKENS)),
        sampling_params=params,
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
