# SPDX-License-Identifier: Apache-2.0
"""Replies whose tokens are all known before they begin."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from mockengine.replies import Keys, Positions, Tokens, TokenSource

_PAST_THE_END: Final = 0


class ListedTokens:
    """The tokens of one reply. Positions after its last one are never said; where they are drawn ahead, they are 0."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.array(token_ids, np.uint32)

    def tokens(self, key: int, start: int, count: int) -> list[int]:  # noqa: ARG002 - the interface's
        """Return tokens `start` … `start + count - 1`."""
        found: list[int] = self._ids[start : start + count].tolist()
        return found + [_PAST_THE_END] * (count - len(found))

    def block(self, keys: Keys, starts: Positions, count: int) -> Tokens:
        """Return `count` tokens from each of `starts` on; the keys do not matter."""
        block = np.full((len(keys), count), _PAST_THE_END, np.uint32)
        for row, start in zip(block, starts.tolist(), strict=True):
            found = self._ids[start : start + count]
            row[: len(found)] = found
        return block

    def beyond(self, position: int) -> TokenSource:  # noqa: ARG002 - the interface's
        """Return this source."""
        return self
