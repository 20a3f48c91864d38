# SPDX-License-Identifier: Apache-2.0
"""splitmix64: what every draw of a reply is made of (Steele, Lea and Flood, 2014).

Draw i of a sequence is the hash of key + (i + 1) * `GOLDEN_GAMMA`, so any of them can be had at once.
"""

from typing import Any, Final, TypeAlias

import numpy as np

from mockengine.replies import Keys, Positions

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""64-bit words, in any shape."""

# The increment is the odd integer nearest to 2^64 / golden ratio; the rest is the finaliser.
GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_ONE: Final = np.uint64(1)
GAMMA: Final = int(GOLDEN_GAMMA)
"""The same, as a plain int."""
_FACTOR_1: Final = int(_MIX_1)
_FACTOR_2: Final = int(_MIX_2)
_MASK: Final = 2**64 - 1


def splitmix64(state: Words) -> None:
    """Hash every word in its place."""
    state ^= state >> np.uint64(30)
    state *= _MIX_1
    state ^= state >> np.uint64(27)
    state *= _MIX_2
    state ^= state >> np.uint64(31)


def draws(keys: Words, places: Words) -> Words:
    """Return draw `places` of the sequences of `keys`, which broadcast against each other."""
    state = keys + (places + _ONE) * GOLDEN_GAMMA
    splitmix64(state)
    return state


def draws_from(keys: Keys, starts: Positions, count: int) -> Words:
    """Return `count` draws of many sequences, a row for each: of the one of `keys[i]` those from `starts[i]` on."""
    first = keys + (starts.astype(np.uint64) + _ONE) * GOLDEN_GAMMA
    state: Words = first[:, None] + np.arange(count, dtype=np.uint64) * GOLDEN_GAMMA
    splitmix64(state)
    return state


def mixed(state: int) -> int:
    """Hash one word, in plain ints: for a few of them that is quicker than arrays."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * _FACTOR_1) & _MASK
    state = ((state ^ (state >> 27)) * _FACTOR_2) & _MASK
    return state ^ (state >> 31)


def draw(key: int, position: int) -> int:
    """Return one draw of a sequence, 64 bits."""
    return mixed(key + (position + 1) * GAMMA)


def uniform(key: int) -> float:
    """Return the first draw of a sequence, as a number above 0 and below 1."""
    return ((draw(key, 0) >> 11) + 0.5) / 2**53
