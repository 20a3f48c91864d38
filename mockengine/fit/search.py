# SPDX-License-Identifier: Apache-2.0
"""Improves a model until the replays of the runs are like the originals: Nelder and Mead's downhill simplex.

The unknowns are the logarithms of coefficients and overhead, so none is ever below 0 and a step of the search is a
factor. (Nelder and Mead, "A simplex method for function minimization", 1965.) A simplex may collapse before it has come
down, so the search begins again where it ended for as long as that helps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from typing import Final

import numpy as np

from mockengine.engine.timing import StepCoefficients
from mockengine.fit.report import Figures, measured, modelled
from mockengine.fit.results import Floats, Run
from mockengine.fit.simulator import Limits, Model, replay

_QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
# TPOT is wanted to half the error of TTFT; what a mean says is worth more than what one quantile does.
_TPOT_WEIGHT: Final = 2.0
_MEAN_WEIGHT: Final = 2.0
_FIRST_STEP: Final = 0.3
# A coefficient that the first guess found to be 0 begins with what makes this fraction of a step.
_SMALL_PART: Final = 0.01
_CONVERGED: Final = 5e-3
_WORTH_ANOTHER: Final = 0.98


@dataclass(frozen=True, slots=True)
class Found:
    """A model, and how unlike the originals its replays still are: 0 is no difference."""

    model: Model
    loss: float


def refine(runs: list[Run], guess: Model, limits: Limits, most_replays: int = 600) -> Found:
    """Return the model near `guess` whose replays differ least from `runs`.

    What counts are the logarithms of the ratios of mean and quantiles of TTFT and TPOT, and of throughput, squared.
    """
    originals = [(run, _features(measured(run))) for run in runs]

    def loss(unknowns: Floats) -> float:
        model = _model(unknowns)
        total = 0.0
        for run, original in originals:
            difference = _features(modelled(run, replay(run, model, limits))) - original
            total += float((difference**2).mean())
        return total / len(originals)

    best = _downhill(loss, _unknowns(runs, guess), most_replays)
    return Found(_model(best.at), best.loss)


def _features(figures: Figures) -> Floats:
    parts = []
    for values, weight in ((figures.ttft_s, 1.0), (figures.tpot_s, _TPOT_WEIGHT)):
        # A run may have nothing but replies of one token, which have no TPOT.
        present = values if len(values) else np.zeros(1)
        logs = np.log(np.maximum([present.mean(), *np.quantile(present, _QUANTILES)], 1e-7))
        logs[0] *= _MEAN_WEIGHT
        parts.append(weight * logs)
    return np.concatenate([*parts, [_TPOT_WEIGHT * log(max(figures.throughput, 1e-9))]])


def _unknowns(runs: list[Run], guess: Model) -> Floats:
    steps = guess.steps
    prompt = float(np.mean([run.prompt_tokens.mean() for run in runs]))
    step_s = float(np.median(np.concatenate([run.decode_s / np.maximum(run.output_tokens - 1, 1) for run in runs])))
    decodes = max(float(np.mean([run.decode_s.sum() / (run.sent_s.max() + 1e-9) for run in runs])), 1.0)
    small = max(_SMALL_PART * step_s, 1e-7)
    values = (
        (steps.base_s, small),
        (steps.per_prefill_token_s, small / prompt),
        (steps.per_decode_s, small / decodes),
        (steps.per_context_token_s, small / decodes / prompt),
        (guess.overhead_s, small),
    )
    return np.array([log(max(value, least)) for value, least in values])


def _model(unknowns: Floats) -> Model:
    base, prefill, decode, context, overhead = (exp(min(value, 50.0)) for value in unknowns.tolist())
    steps = StepCoefficients(base_s=base, per_prefill_token_s=prefill, per_decode_s=decode, per_context_token_s=context)
    return Model(steps, overhead)


@dataclass(slots=True)
class _Corner:
    loss: float
    at: Floats


def _downhill(loss: Callable[[Floats], float], start: Floats, most: int) -> _Corner:
    """Return where `loss` is least, as far as some `most` evaluations get."""
    best = _Corner(loss(start), start)
    left = most - 1
    while left > 0:
        before = best.loss
        corners = [best]
        corners += [_Corner(loss(place), place) for place in best.at + _FIRST_STEP * np.eye(len(start))]
        left -= len(start)
        while left > 0 and _extent(corners) > _CONVERGED:
            left -= _move(loss, corners)
        best = min(corners, key=lambda corner: corner.loss)
        if best.loss > _WORTH_ANOTHER * before:
            break
    return best


def _extent(corners: list[_Corner]) -> float:
    return float(np.ptp([corner.at for corner in corners], axis=0).max())


def _move(loss: Callable[[Floats], float], corners: list[_Corner]) -> int:
    """Replace the worst corner, or shrink all towards the best; return the number of evaluations."""
    corners.sort(key=lambda corner: corner.loss)
    worst = corners[-1]
    centre = np.mean([corner.at for corner in corners[:-1]], axis=0)

    def beyond(factor: float) -> _Corner:
        place = centre + factor * (centre - worst.at)
        return _Corner(loss(place), place)

    reflected = beyond(1.0)
    if reflected.loss < corners[0].loss:
        corners[-1] = min(reflected, beyond(2.0), key=lambda corner: corner.loss)
        return 2
    if reflected.loss < corners[-2].loss:
        corners[-1] = reflected
        return 1
    contracted = beyond(0.5 if reflected.loss < worst.loss else -0.5)
    if contracted.loss < min(worst.loss, reflected.loss):
        corners[-1] = contracted
        return 2
    for corner in corners[1:]:
        corner.at = (corner.at + corners[0].at) / 2
        corner.loss = loss(corner.at)
    return 1 + len(corners)
