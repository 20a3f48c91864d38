# SPDX-License-Identifier: Apache-2.0
"""Uniformly random tokens from a counter-based generator: token i is a hash of (key, i), so any can be had at once."""

from typing import Final

import numpy as np

from mockengine.replies import Keys, Positions, Tokens, TokenSource
from mockengine.replies.hashing import GAMMA, draws_from, mixed
from mockengine.replies.vocabulary import Vocabulary

_HALF_BITS: Final = np.uint64(32)
# So few tokens are had sooner one by one than as an array.
_FEW: Final = 8


class RandomTokens:
    """Tokens of a vocabulary, each as likely as any other (to within 2^-32 times its size)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._size = vocabulary.size

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """Return tokens `start` … `start + count - 1` of reply `key`."""
        if count <= _FEW:
            first = key + (start + 1) * GAMMA
            return [self._token(first + place * GAMMA) for place in range(count)]
        tokens: list[int] = self.block(np.array([key], np.uint64), np.array([start], np.int64), count)[0].tolist()
        return tokens

    def _token(self, state: int) -> int:
        return self._vocabulary.id_at(((mixed(state) >> 32) * self._size) >> 32)

    def block(self, keys: Keys, starts: Positions, count: int) -> Tokens:
        """Return `count` tokens of many replies at once: for reply i those from `starts[i]` on."""
        places = draws_from(keys, starts, count)
        places >>= _HALF_BITS
        places *= np.uint64(self._size)
        places >>= _HALF_BITS
        return self._vocabulary.ids_at(places)

    def beyond(self, position: int) -> TokenSource:  # noqa: ARG002 - the interface's
        """Return this source."""
        return self
