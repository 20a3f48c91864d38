# SPDX-License-Identifier: Apache-2.0
"""A first guess at the model, straight from what was measured, by least squares.

A reply of n tokens takes n - 1 steps after its first token, and who else was there in each of them can be read off the
other replies. So the time from first to last token of each reply is a linear equation in the coefficients:
(n - 1) · base + a · prompt tokens begun meanwhile + b · sum of decodes + c · sum of contexts. What a first token took
beyond its own step is the overhead.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mockengine.engine.timing import StepCoefficients
from mockengine.fit.results import Floats, Run
from mockengine.fit.simulator import Limits, Model

Matrix: TypeAlias = npt.NDArray[np.float64]

# Overheads are judged by the first tokens that came soonest for what they are: those that did not have to wait.
_UNHINDERED_QUANTILE: Final = 0.1
# A jitter is told from the noise of the network by ITLs in a row; fewer say little.
_FEWEST_PAIRS: Final = 100
# A stall of the client or of the network, which is not what is wanted here.
_OUTLIER: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """All chunks of all replies but the first ones: whose, when, what gap came before, and the load of that step."""

    request: npt.NDArray[np.int64]
    gap_s: Floats
    weight: Floats
    prefill: Floats
    decodes: Floats
    context: Floats


def first_guess(runs: list[Run], limits: Limits) -> Model:
    """Return the model that fits the equations of all `runs` best, each equation counting by its relative error."""
    equations = np.vstack([_equations(run) for run in runs])
    base, prefill, decode, context = _non_negative_least_squares(equations, np.ones(len(equations)))
    steps = StepCoefficients(base_s=base, per_prefill_token_s=prefill, per_decode_s=decode, per_context_token_s=context)
    return Model(steps, _overhead_s(runs, steps, limits))


def context_spread(runs: list[Run]) -> float:
    """Return by what fraction the mean context of a decode differs from reply to reply (standard deviation by mean).

    Near 0 every decode brings the same context along, and b and c are only known together.
    """
    equations = np.vstack([_equations(run) for run in runs])
    means = equations[:, 3] / equations[:, 2]
    return float(means.std() / means.mean())


def most_decodes(runs: list[Run]) -> int:
    """Return how many requests decoded at the same time, at most."""
    return max(int(_tokens(run).decodes.max(initial=0)) for run in runs)


def _equations(run: Run) -> Matrix:
    """Return steps, prompt tokens, decodes and contexts of each reply, divided by the time that they took together."""
    tokens = _tokens(run)
    sums = [tokens.weight, tokens.prefill, tokens.weight * tokens.decodes, tokens.weight * tokens.context]
    matrix = np.column_stack([np.bincount(tokens.request, each, len(run.output_tokens)) for each in sums])
    decode_s = run.decode_s
    usable = (matrix[:, 0] > 0) & (decode_s > 0)
    return np.asarray(matrix[usable] / decode_s[usable, None], np.float64)


def jitter(runs: list[Run], steps: StepCoefficients) -> float:
    """Return the standard deviation of a step's duration as a fraction of its mean, without the network's part.

    What delays a token on its way makes one gap longer and the next one shorter by as much, so the covariance of
    neighbours is minus half of what it adds to the variance: the step's own part is variance + 2 · covariance.
    """
    pairs = []
    for run in runs:
        tokens = _tokens(run)
        expected = (
            steps.base_s
            + steps.per_prefill_token_s * tokens.prefill
            + steps.per_decode_s * tokens.decodes
            + steps.per_context_token_s * tokens.context
        )
        error = tokens.gap_s / np.maximum(expected * tokens.weight, 1e-9) - 1
        # Which step a prompt's chunks fell into is not known, so those steps are left out; so are bundled tokens.
        plain = (tokens.prefill == 0) & (np.abs(error) < _OUTLIER) & (tokens.weight == 1)
        both = plain[1:] & plain[:-1] & (tokens.request[1:] == tokens.request[:-1])
        pairs.append(np.column_stack([error[1:][both], error[:-1][both]]))
    errors = np.vstack(pairs)
    if len(errors) < _FEWEST_PAIRS:
        return 0.0
    errors -= errors.mean(axis=0)
    variance = float((errors**2).mean() + 2 * (errors[:, 0] * errors[:, 1]).mean())
    return sqrt(max(variance, 0.0))


def _tokens(run: Run) -> _Tokens:
    """Say for every chunk after the first of its reply under which load it was made."""
    first = run.sent_s + run.ttft_s
    gaps = [each[: max(output - 1, 0)] for each, output in zip(run.gaps_s, run.output_tokens, strict=True)]
    counts = np.array([len(each) for each in gaps])
    request = np.repeat(np.arange(len(gaps)), counts)
    gap_s = np.concatenate(gaps)
    # Time from the first token on: a running sum that starts anew with each reply.
    total = np.cumsum(gap_s)
    before = np.concatenate([[0.0], total])[np.cumsum(counts) - counts]
    at = (first[request] + total - before[request]).astype(np.float64)
    # Several tokens may come in one chunk; then it stands for as many steps.
    weight = ((run.output_tokens - 1) / np.maximum(counts, 1))[request].astype(np.float64)
    last = first + run.decode_s
    # Half a step earlier everyone who gets a token at this moment is there, and nobody who begins at it.
    middle = at - gap_s / 2
    decodes = np.searchsorted(np.sort(first), middle) - np.searchsorted(np.sort(last), middle)
    prompts = run.prompt_tokens.astype(np.float64)
    prefill = _prefilled(run, first, at) - _prefilled(run, first, at - gap_s)
    grown = _passed(first, prompts + 1, middle) + _passed(at, weight, middle)
    context = grown - _passed(last, prompts + run.output_tokens, middle)
    return _Tokens(request, gap_s, weight, prefill, np.maximum(decodes, 1.0), np.maximum(context, 1.0))


def _prefilled(run: Run, first: Floats, until: Floats) -> Floats:
    """Return how many prompt tokens were computed until each moment.

    Prompts are computed first come, first served, so each was from its arrival on, or from when the one before was
    done, until its first token.
    """
    order = np.argsort(first, kind="stable")
    ends = first[order]
    begins = np.maximum(run.sent_s[order], np.concatenate([[-np.inf], ends[:-1]]))
    sums = np.cumsum(run.prompt_tokens[order])
    moments = np.column_stack([begins, ends]).ravel()
    amounts = np.column_stack([np.concatenate([[0], sums[:-1]]), sums]).ravel()
    return np.asarray(np.interp(until, moments, amounts), np.float64)


def _passed(moments: Floats, amounts: Floats, until: Floats) -> Floats:
    """Return for each of `until` the sum of the amounts whose moment is not later."""
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(amounts[order])])
    return np.asarray(sums[np.searchsorted(moments[order], until, side="right")], np.float64)


def _non_negative_least_squares(matrix: Matrix, answer: Floats) -> list[float]:
    """Solve by leaving out the most negative unknown until none is; with four of them that is good enough to begin."""
    kept = list(range(matrix.shape[1]))
    solution = np.zeros(matrix.shape[1])
    while kept:
        # Columns of like size, so that what is small by its unit alone counts too.
        scale = np.maximum(np.abs(matrix[:, kept]).mean(axis=0), 1e-30)
        part = np.linalg.lstsq(matrix[:, kept] / scale, answer, rcond=None)[0] / scale
        if (part * scale).min() >= 0:
            solution[kept] = part
            break
        kept.pop(int(np.argmin(part * scale)))
    return [float(value) for value in solution]


def _overhead_s(runs: list[Run], steps: StepCoefficients, limits: Limits) -> float:
    """Return what the quickest first tokens took beyond the steps with their prompt."""
    beyond = [
        run.ttft_s
        - steps.base_s * np.ceil(run.prompt_tokens / limits.max_num_batched_tokens)
        - steps.per_prefill_token_s * run.prompt_tokens
        for run in runs
    ]
    return max(float(np.quantile(np.concatenate(beyond), _UNHINDERED_QUANTILE)), 0.0)
