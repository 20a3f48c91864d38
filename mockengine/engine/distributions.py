# SPDX-License-Identifier: Apache-2.0
"""Random durations of a given mean and standard deviation, drawn without a generator that has a state.

A draw is a function of one 64-bit number, the counter, so that whoever counts decides what is reproducible. splitmix64
turns a counter into uniform bits, and those become a duration by an inverse transform (normal, lognormal) or by
rejection (gamma). Nothing here is ever below 0. A seeded `random.Random` for each draw costs some four times as much, a
keyed generator of numpy ten times.
"""

from collections.abc import Callable
from math import erfc, exp, log, log1p, sqrt
from statistics import NormalDist
from typing import Final, Literal, Protocol

DistributionName = Literal["normal", "lognormal", "gamma"]
"""The distributions that can be asked for."""

# splitmix64: the increment is the odd integer nearest to 2^64 / golden ratio; the rest is its finaliser
# (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 2**64 - 1
# From one uniform number to the next of the same draw; odd, and no small multiple of the increment from draw to draw.
_WITHIN: Final = 0xD1342543DE82EF95
_UNIFORM_SHIFT: Final = 12
_UNIFORM_UNIT: Final = 2.0**-52
_inverse_normal: Final = NormalDist().inv_cdf


class Distribution(Protocol):
    """Durations of one mean and one standard deviation."""

    def draw(self, counter: int) -> float:
        """Return the duration that belongs to a 64-bit counter, in the unit of the mean; never below 0."""


def mix(state: int) -> int:
    """Return splitmix64's hash of a state of any size: 64 bits that look random."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
    state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
    return state ^ (state >> 31)


def counter(key: int, position: int) -> int:
    """Return the counter of draw `position` (0, 1, …) of the stream `key`, which is any 64-bit number."""
    return (key + (position + 1) * _GAMMA) & _MASK


def distribution(name: DistributionName, mean: float, stddev: float) -> Distribution:
    """Return the distribution of that name; without a standard deviation every draw is the mean.

    Raises `ValueError` where a mean of 0 is to be spread: what never falls below 0 cannot spread around 0.
    """
    if not stddev:
        return _Constant(mean)
    if mean <= 0:
        raise ValueError(f"a mean of {mean:g} cannot have a standard deviation of {stddev:g} (use a larger mean, or 0)")
    return _KINDS[name](mean, stddev)


class _Constant:
    def __init__(self, mean: float) -> None:
        self._mean = mean

    def draw(self, counter: int) -> float:  # noqa: ARG002 - the interface's; here it makes no difference
        """Return the mean."""
        return self._mean


class _Normal:
    """A normal distribution of which the part below 0 is cut off and the rest scaled up.

    Cutting raises the mean by stddev · φ(r) / Φ(r) where r = mean / stddev: by 0.004 stddev for r = 3, by 0.06 for
    r = 2, by 0.29 for r = 1.
    """

    def __init__(self, mean: float, stddev: float) -> None:
        self._mean = mean
        self._stddev = stddev
        self._kept = 0.5 * erfc(-mean / stddev / sqrt(2))

    def draw(self, counter: int) -> float:
        """Return the draw of `counter`."""
        # Of the upper tail, where the smallest probabilities keep their precision.
        duration = self._mean - self._stddev * _inverse_normal(_uniform(counter) * self._kept)
        return max(duration, 0.0)


class _Lognormal:
    """exp(m + s · z) with s² = ln(1 + (stddev / mean)²) and m = ln(mean) - s² / 2, which has exactly these moments."""

    def __init__(self, mean: float, stddev: float) -> None:
        variance = log1p((stddev / mean) ** 2)
        self._location = log(mean) - variance / 2
        self._scale = sqrt(variance)

    def draw(self, counter: int) -> float:
        """Return the draw of `counter`."""
        return exp(self._location + self._scale * _inverse_normal(_uniform(counter)))


class _Gamma:
    """Shape (mean / stddev)² and scale stddev² / mean, by the exact rejection method of Marsaglia and Tsang.

    "A simple method for generating gamma variables", 2000. More than 19 of 20 first attempts are accepted. A shape
    below 1 is drawn as shape + 1 and multiplied by u^(1 / shape), as they say.
    """

    def __init__(self, mean: float, stddev: float) -> None:
        shape = (mean / stddev) ** 2
        self._scale = stddev**2 / mean
        self._power = 1 / shape if shape < 1 else 0.0
        self._d = shape - 1 / 3 if shape >= 1 else shape + 2 / 3
        self._c = 1 / sqrt(9 * self._d)

    def draw(self, counter: int) -> float:
        """Return the draw of `counter`."""
        duration = self._scale * self._standard(counter + _WITHIN)
        return duration * _uniform(counter) ** self._power if self._power else duration

    def _standard(self, counter: int) -> float:
        d = self._d
        while True:
            normal = _inverse_normal(_uniform(counter))
            uniform = _uniform(counter + _WITHIN)
            root = 1 + self._c * normal
            if root > 0:
                cube = root * root * root
                # The first condition implies the second and needs no logarithm.
                if uniform < 1 - 0.0331 * normal**4 or log(uniform) < 0.5 * normal**2 + d * (1 - cube + log(cube)):
                    return d * cube
            counter += 2 * _WITHIN


_KINDS: Final[dict[DistributionName, Callable[[float, float], Distribution]]] = {
    "normal": _Normal,
    "lognormal": _Lognormal,
    "gamma": _Gamma,
}


def _uniform(counter: int) -> float:
    """Return a number above 0 and below 1."""
    # What `mix` does; a call costs as much as half of it.
    state = counter & _MASK
    state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
    state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
    return (((state ^ (state >> 31)) >> _UNIFORM_SHIFT) + 0.5) * _UNIFORM_UNIT
