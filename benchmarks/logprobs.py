# SPDX-License-Identifier: Apache-2.0
"""What a token costs with its logprobs: steps without sockets, CPU seconds of this process."""

from functools import partial
from typing import Final

from benchmarks.report import Table
from benchmarks.steps import Comparison, compare_step, make_engine

# The bar, in microseconds per token.
_BAR: Final = (256, 5)
_BAR_US: Final = 5.0


def measure(running: tuple[int, ...], asked: tuple[int, ...], vocab_sizes: tuple[int, ...], least_s: float) -> Table:
    """Measure the cost of a token by vocabulary, logprobs and running requests, for at least `least_s` seconds each."""
    columns = ("vocabulary", "logprobs", "running", "engine us/token", "plain loop us/token", "ratio")
    table = Table("Step with logprobs", columns)
    for vocab_size in vocab_sizes:
        for num_logprobs in asked:
            for count in running:
                cost = compare(count, num_logprobs, least_s, vocab_size)
                us = 1e6 * cost.ours_s
                table.add(vocab_size, num_logprobs, count, us, 1e6 * cost.theirs_s, cost.ratio)
                if (count, num_logprobs) == _BAR:
                    name = f"{num_logprobs} logprobs of {vocab_size} tokens, {count} running, us per token"
                    table.hold(name, us, _BAR_US)
    return table


def compare(running: int, num_logprobs: int, least_s: float, vocab_size: int = 32_000) -> Comparison:
    """Measure the cost of a token with so many logprobs beside it, and that of one of the plain loop, in turns."""
    engine = make_engine(running, 1, vocab_size=vocab_size, num_logprobs=num_logprobs)
    return compare_step(partial(engine.step, 1.0), running, 1, least_s)
