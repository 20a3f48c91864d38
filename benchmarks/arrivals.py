# SPDX-License-Identifier: Apache-2.0
"""What a request costs besides its tokens, and what a long prompt costs besides msgpack."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgpack

from benchmarks.reference import request_id
from benchmarks.report import Table
from benchmarks.rig import PROMPT_TOKENS
from benchmarks.steps import Comparison, make_engine, plain_token_s
from mockengine.engine.core import EngineCore
from mockengine.engine.outgoing import Outbound
from mockengine.wire.lines import NEWEST
from mockengine.wire.messages import Abort, RequestType, read_message, write_message
from mockengine.wire.requests import request_items

_SAMPLING: Final = {"temperature": 0.7, "stop_token_ids": [], "_all_stop_token_ids": [0, 2]}
_MANY_TOKENS: Final = 512
# One for the first output, one in the running set, one for the last output.
_THREE_TOKENS: Final = 3
_TURNS: Final = 3
_PROMPT_TURNS: Final = 10
_PLAIN_RUNNING: Final = 256
_PLAIN_S: Final = 0.3
_TOKEN: Final = "plain loop's token"  # noqa: S105 - of text
# The bars: prompt tokens, and milliseconds of the engine beyond msgpack's, or in all.
_BAR_LONG, _BAR_LONG_BEYOND_MS = 44_000, 1.0
_BAR_LONGEST, _BAR_LONGEST_MS = 128_000, 5.0


def measure(requests: int) -> Table:
    """Measure so many requests from ADD to their last output, and as many aborts among as many running."""
    table = Table("A request", ("what", "us each", "per CPU second", "compared with", "us of it", "ratio"))
    add = compare_add(requests)
    token_s = plain_token_s(_PLAIN_RUNNING, _PLAIN_S)
    costs = [{**_aborted(requests), **_completed(requests)} for _ in range(_TURNS)]
    others = {what: Comparison(min(cost[what] for cost in costs), token_s) for what in costs[0]}
    rows = [("ADD", "msgpack decoding it", add), *[(what, _TOKEN, cost) for what, cost in others.items()]]
    for what, other, cost in rows:
        table.add(what, 1e6 * cost.ours_s, 1 / cost.ours_s, other, 1e6 * cost.theirs_s, cost.ratio)
    return table


def compare_add(requests: int) -> Comparison:
    """Measure an ADD of a short prompt, and msgpack's decoding of the same message, in turns."""
    messages = [make_add(number, PROMPT_TOKENS, _MANY_TOKENS) for number in range(requests)]
    costs: list[tuple[float, float]] = []
    for _ in range(_TURNS):
        engine = make_engine(0, 1)
        costs.append((_timed(lambda: _receive(engine, messages)), _timed(lambda: _unpack(messages))))  # noqa: B023 - called at once
    ours_s, theirs_s = (min(cost) / requests for cost in zip(*costs, strict=True))
    return Comparison(ours_s, theirs_s)


def measure_prompts(lengths: tuple[int, ...]) -> Table:
    """Measure the ADD of one long prompt, and msgpack's own part of it."""
    table = Table("A long prompt", ("tokens", "ADD ms", "msgpack alone ms", "beyond it ms", "ratio"))
    for length in lengths:
        cost = compare_prompt(length)
        whole_ms, alone_ms = 1e3 * cost.ours_s, 1e3 * cost.theirs_s
        table.add(length, whole_ms, alone_ms, whole_ms - alone_ms, cost.ratio)
        if length == _BAR_LONG:
            table.hold(f"prompt of {length} tokens, ms beyond msgpack", whole_ms - alone_ms, _BAR_LONG_BEYOND_MS)
        if length == _BAR_LONGEST:
            table.hold(f"prompt of {length} tokens, ms in all", whole_ms, _BAR_LONGEST_MS)
    return table


def compare_prompt(length: int) -> Comparison:
    """Measure the ADD of a prompt of so many tokens, and msgpack's decoding of the same message, in turns."""
    message = make_add(0, length, _MANY_TOKENS)
    costs: list[tuple[float, float]] = []
    for _ in range(_PROMPT_TURNS):
        engine = make_engine(0, 1, max_model_len=2 * length)
        costs.append((_timed(lambda: _receive(engine, [message])), _timed(lambda: _unpack([message]))))  # noqa: B023 - called at once
    ours_s, theirs_s = map(min, zip(*costs, strict=True))
    return Comparison(ours_s, theirs_s)


def make_add(number: int, prompt_tokens: int, max_tokens: int) -> list[bytes]:
    """Return an ADD of the newest line as it comes from the wire."""
    prompt = [(number * 7 + place * 31) % 32_000 for place in range(prompt_tokens)]
    sampling = {"max_tokens": max_tokens, **_SAMPLING}
    values = {"request_id": request_id(number), "prompt_token_ids": prompt, "sampling_params": sampling}
    return write_message(RequestType.ADD, request_items(values, NEWEST.add_items))


def _aborted(requests: int) -> dict[str, float]:
    """Return CPU seconds per request of what happens to requests that are aborted one by one."""
    engine = make_engine(0, 1)
    _receive(engine, [make_add(number, PROMPT_TOKENS, _MANY_TOKENS) for number in range(requests)])
    parts = {
        "first output": lambda: engine.step(1.0),
        "joining the running set": lambda: engine.step(1.0),
        "ABORT": lambda: [engine.receive(Abort((request_id(number),)), 0, 2.0) for number in range(requests)],
    }
    return _timed_each(parts, requests)


def _completed(requests: int) -> dict[str, float]:
    """Return CPU seconds per request of the end of requests that say all they have to say."""
    engine = make_engine(0, 1)
    _receive(engine, [make_add(number, PROMPT_TOKENS, _THREE_TOKENS) for number in range(requests)])
    for _ in range(_THREE_TOKENS - 1):
        engine.step(1.0)
    return _timed_each({"last output": lambda: engine.step(1.0)}, requests)


def _receive(engine: EngineCore, messages: list[list[bytes]]) -> list[Outbound]:
    return [sent for frames in messages for sent in engine.receive(read_message(frames, 0), 0, 1.0)]


def _unpack(messages: list[list[bytes]]) -> None:
    for frames in messages:
        msgpack.unpackb(frames[1])


def _timed_each(parts: Mapping[str, Callable[[], object]], requests: int) -> dict[str, float]:
    return {what: _timed(act) / requests for what, act in parts.items()}


def _timed(act: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    began = time.process_time()
    act()
    return time.process_time() - began
