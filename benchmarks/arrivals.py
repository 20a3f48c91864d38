# SPDX-License-Identifier: Apache-2.0
"""What a request costs besides its tokens, and what a long prompt costs besides msgpack."""

import time
from collections.abc import Callable
from typing import Final

import msgpack

from benchmarks.reference import request_id
from benchmarks.report import Table
from benchmarks.steps import make_engine
from mockengine.engine.core import EngineCore, Outbound
from mockengine.wire.lines import NEWEST
from mockengine.wire.messages import Abort, RequestType, read_message, write_message
from mockengine.wire.requests import request_items

_SAMPLING: Final = {"max_tokens": 512, "temperature": 0.7, "stop_token_ids": [], "_all_stop_token_ids": [0, 2]}


def measure(requests: int) -> Table:
    """Measure so many requests from ADD to their last output, and as many aborts among as many running."""
    table = Table("A request", ("what", "us each", "per CPU second"))
    engine = make_engine(0, 1)
    messages = [_add(number, 32) for number in range(requests)]
    parts: dict[str, Callable[[], object]] = {
        "ADD": lambda: [_receive(engine, frames) for frames in messages],
        "first output": lambda: engine.step(1.0),
        "joining the running set": lambda: engine.step(1.0),
        "abort": lambda: [engine.receive(Abort((request_id(number),)), 0, 2.0) for number in range(requests)],
    }
    for what, act in parts.items():
        cost = _timed(act) / requests
        table.add(what, 1e6 * cost, 1 / cost)
    return table


def measure_prompts(lengths: tuple[int, ...]) -> Table:
    """Measure the ADD of one long prompt, and msgpack's own part of it."""
    table = Table("A long prompt", ("tokens", "ADD ms", "msgpack alone ms", "beyond it ms"))
    for length in lengths:
        frames = _add(0, length)
        whole, alone = [], []
        for _ in range(5):
            engine = make_engine(0, 1, max_model_len=2 * length)
            whole.append(_timed(lambda: _receive(engine, frames)))  # noqa: B023 - called at once
            alone.append(_timed(lambda: msgpack.unpackb(frames[1])))  # noqa: B023 - called at once
        table.add(length, 1e3 * min(whole), 1e3 * min(alone), 1e3 * (min(whole) - min(alone)))
    return table


def _add(number: int, prompt_tokens: int) -> list[bytes]:
    """Return an ADD of the newest line as it comes from the wire."""
    prompt = [(number * 7 + place * 31) % 32_000 for place in range(prompt_tokens)]
    values = {"request_id": request_id(number), "prompt_token_ids": prompt, "sampling_params": _SAMPLING}
    return write_message(RequestType.ADD, request_items(values, NEWEST.add_items))


def _receive(engine: EngineCore, frames: list[bytes]) -> list[Outbound]:
    return engine.receive(read_message(frames, 0), 0, 1.0)


def _timed(act: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    began = time.process_time()
    act()
    return time.process_time() - began
