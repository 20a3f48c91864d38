# SPDX-License-Identifier: Apache-2.0
"""Uniformly random tokens from a counter-based generator: token i is a hash of (key, i), so any can be had at once."""

from typing import Final, TypeAlias

import numpy as np

from mockengine.replies import Keys, Positions, Tokens

Bits: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
"""Random numbers of 64 bits: a row for each stream."""

# splitmix64: the increment is the odd integer nearest to 2^64 / golden ratio; the rest is its finaliser
# (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_HALF_BITS: Final = np.uint64(32)
_ONE: Final = np.uint64(1)
_GAMMA: Final = int(_GOLDEN_GAMMA)
_FACTOR_1: Final = int(_MIX_1)
_FACTOR_2: Final = int(_MIX_2)
_MASK: Final = 2**64 - 1
# So few tokens are had sooner one by one than as an array.
_FEW: Final = 8


class RandomTokens:
    """Tokens of 0 … `vocab_size` - 1, each as likely as any other (to within 2^-32 times `vocab_size`)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._vocab_size = np.uint64(vocab_size)

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """Return tokens `start` … `start + count - 1` of reply `key`."""
        if count <= _FEW:
            first = key + (start + 1) * _GAMMA
            return [self._token(first + place * _GAMMA) for place in range(count)]
        tokens: list[int] = self.block(np.array([key], np.uint64), np.array([start], np.int64), count)[0].tolist()
        return tokens

    def _token(self, state: int) -> int:
        state &= _MASK
        state = ((state ^ (state >> 30)) * _FACTOR_1) & _MASK
        state = ((state ^ (state >> 27)) * _FACTOR_2) & _MASK
        state ^= state >> 31
        return ((state >> 32) * self._vocab) >> 32

    def block(self, keys: Keys, starts: Positions, count: int) -> Tokens:
        """Return `count` tokens of many replies at once: for reply i those from `starts[i]` on."""
        state = random_bits(keys, starts, count)
        state >>= _HALF_BITS
        state *= self._vocab_size
        state >>= _HALF_BITS
        tokens: Tokens = state.astype(np.uint32)
        return tokens


def random_bits(keys: Keys, starts: Positions, count: int) -> Bits:
    """Return 64 random bits for each of `count` positions of many streams: of stream `keys[i]` from `starts[i]` on."""
    first = keys + (starts.astype(np.uint64) + _ONE) * _GOLDEN_GAMMA
    state: Bits = first[:, None] + np.arange(count, dtype=np.uint64) * _GOLDEN_GAMMA
    _splitmix64(state)
    return state


def _splitmix64(state: Bits) -> None:
    """Hash every state in its place."""
    state ^= state >> np.uint64(30)
    state *= _MIX_1
    state ^= state >> np.uint64(27)
    state *= _MIX_2
    state ^= state >> np.uint64(31)
