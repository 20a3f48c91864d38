# SPDX-License-Identifier: Apache-2.0
"""Which tokens a request gets, how many, and what is said of them. Sources of tokens are alike: `TokenSource`."""

from typing import Protocol, TypeAlias

import numpy as np

Keys: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
"""Keys of replies."""

Positions: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Positions of tokens in their replies."""

Tokens: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
"""Token ids: a row for each reply."""


class TokenSource(Protocol):
    """Where tokens come from."""

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """Return tokens `start` … `start + count - 1` of the reply that `key` identifies.

        A pure function: neither the order of requests nor their timing nor the rank that serves them matters.
        """

    def block(self, keys: Keys, starts: Positions, count: int) -> Tokens:
        """Return `count` tokens of many replies at once: for reply i those from `starts[i]` on, as `tokens` does."""

    def beyond(self, position: int) -> "TokenSource":
        """Return a source of the same tokens from a position on: one that replies share, if there is one.

        What replies share is drawn for all of them at once.
        """
