# SPDX-License-Identifier: Apache-2.0
"""How long a reply gets by itself, before a client's limits: lengths that follow from its key."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final, TypeAlias

from mockengine.replies.hashing import uniform

LengthDraw: TypeAlias = Callable[[int], int]
"""Gives the length of the reply of a key, in tokens: at least 1."""

_MOST: Final = 2**31 - 1
# What is drawn from a reply's key for its length is independent of its tokens.
_STREAM: Final = 0x6C656E677468


def fixed_length(length: int) -> LengthDraw:
    """Let every reply have this length."""
    return lambda _key: length


def uniform_length(least: int, most: int) -> LengthDraw:
    """Draw each length from `least` to `most` as often as any other."""
    return lambda key: least + int(_drawn(key) * (most - least + 1))


def normal_length(mean: float, stddev: float) -> LengthDraw:
    """Draw lengths around a mean; none is below 1, which raises the mean where the spread is large."""
    standard = NormalDist()
    return lambda key: _bounded(mean + stddev * standard.inv_cdf(_drawn(key)))


def lognormal_length(mean: float, stddev: float) -> LengthDraw:
    """Draw lengths with this mean and standard deviation, many short ones and a few long ones.

    A mean m and a standard deviation s follow from mu = ln m - v/2 and sigma^2 = v = ln(1 + (s/m)^2).
    """
    variance = log(1 + (stddev / mean) ** 2)
    mu, sigma = log(mean) - variance / 2, sqrt(variance)
    standard = NormalDist()
    return lambda key: _bounded(exp(min(mu + sigma * standard.inv_cdf(_drawn(key)), log(_MOST))))


def weighted_length(lengths: Sequence[int], weights: Sequence[float]) -> LengthDraw:
    """Draw one of some lengths, each as often as its weight says; one of them is above 0."""
    ends = list(accumulate(weights))
    return lambda key: lengths[bisect_right(ends, _drawn(key) * ends[-1])]


def _drawn(key: int) -> float:
    """Return what decides a reply's length: above 0 and below 1."""
    return uniform(key ^ _STREAM)


def _bounded(length: float) -> int:
    return min(_MOST, max(1, round(length)))
