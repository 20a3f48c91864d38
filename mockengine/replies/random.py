# SPDX-License-Identifier: Apache-2.0
"""Uniformly random tokens from a counter-based generator: token i is a hash of (key, i), so any can be had at once."""

from typing import Final

import numpy as np

# splitmix64: the increment is the odd integer nearest to 2^64 / golden ratio; the rest is its finaliser
# (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_HALF_BITS: Final = np.uint64(32)


class RandomTokens:
    """Tokens of 0 … `vocab_size` - 1, each as likely as any other (to within 2^-32 times `vocab_size`)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = np.uint64(vocab_size)

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """Return tokens `start` … `start + count - 1` of reply `key`."""
        counters = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        drawn = _splitmix64(np.uint64(key) + counters * _GOLDEN_GAMMA) >> _HALF_BITS
        scaled: list[int] = ((drawn * self._vocab_size) >> _HALF_BITS).tolist()
        return scaled


def _splitmix64(
    state: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
