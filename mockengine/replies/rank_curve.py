# SPDX-License-Identifier: Apache-2.0
"""How likely the most likely token is, the second, and so on to the last of the vocabulary.

At some positions a model is sure of itself and at others it is not. So each position has a *doubt* of its own: the
probability that its most likely token leaves to the others. They divide it by one law for all positions, a power of the
rank. Whatever the doubt, the probabilities fall from rank to rank and add up to 1. Knows ranks, not tokens.
"""

from typing import Any, Final, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers, in any shape."""

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Ranks, token ids or numbers of them, in any shape."""

_EXPONENT: Final = 1.8
"""Puts rank 5 some 3 nats below a sure first rank and rank 100 000 some 20, as large models do."""
_DOUBT_MOST: Final = 0.7
_UNIFORM_LEAST: Final = 1 / 64
_LEAD_OF_THE_FIRST: Final = 0.95
_RANKS_APART_MOST: Final = 2**20
"""Beyond what vocabularies have; further ranks are as likely as the last of these, which bounds the tables."""


class RankCurve:
    """Probabilities by rank, from 1, over a vocabulary of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        apart = min(vocab_size, _RANKS_APART_MOST)
        weights = np.arange(1, apart + 1, dtype=np.float64) ** -_EXPONENT
        # The first rank's part is what doubt leaves it; it has no share in the others'.
        weights[0] = 0.0
        total = max(weights.sum() + (vocab_size - apart) * weights[-1], np.finfo(np.float64).tiny)
        shares = weights / total
        with np.errstate(divide="ignore"):
            self._log_shares: Floats = np.log(shares)
        self._reached: Floats = np.cumsum(shares)
        self._apart = apart
        second = shares[1] if apart > 1 else 0.0
        self._doubt_most = min(_DOUBT_MOST, _LEAD_OF_THE_FIRST / (1 + second)) if apart > 1 else 0.0

    def doubts(self, uniform: Floats) -> Floats:
        """Return the doubt of positions, given a number of 0 … 1 for each; most positions have little."""
        doubts: Floats = self._doubt_most * np.maximum(uniform, _UNIFORM_LEAST) ** 2
        return doubts

    def log_probabilities(self, doubts: Floats, ranks: Integers) -> Floats:
        """Return the natural logarithm of the probability of each rank; the two broadcast against each other."""
        others = _log(doubts) + self._log_shares[np.minimum(ranks, self._apart) - 1]
        logarithms: Floats = np.where(ranks == 1, np.log1p(-doubts), others)
        return logarithms

    def draw(
        self, uniform: Floats, doubts: Floats, top_k: Integers | None = None, top_p: Floats | None = None
    ) -> Integers:
        """Draw a rank for each position, each as often as it is likely.

        Args:
            uniform: a number of 0 … 1, without 1, for each.
            doubts: of each.
            top_k: the last rank that may be drawn, 0 for any.
            top_p: no more ranks than have this probability together may be drawn.

        """
        last = self._last_ranks(doubts, top_k, top_p)
        kept = 1.0 - doubts + doubts * self._reached[last - 1]
        ranks: Integers = np.minimum(self._ranks_at(uniform * kept, doubts), last)
        return ranks

    def _last_ranks(self, doubts: Floats, top_k: Integers | None, top_p: Floats | None) -> Integers:
        last = np.full(doubts.shape, self._apart, np.int64)
        if top_k is not None:
            last = np.where(top_k > 0, np.minimum(last, top_k), last)
        if top_p is not None and top_p.min(initial=1.0) < 1.0:
            last = np.where(top_p < 1.0, np.minimum(last, self._ranks_at(top_p, doubts)), last)
        return last

    def _ranks_at(self, reached: Floats, doubts: Floats) -> Integers:
        """Return the rank with which the sum of probabilities exceeds `reached`."""
        sure = 1.0 - doubts
        beyond = (reached - sure) / np.maximum(doubts, np.finfo(np.float64).tiny)
        others = np.searchsorted(self._reached, beyond, side="right") + 1
        ranks: Integers = np.where(reached < sure, 1, np.minimum(others, self._apart))
        return ranks


def _log(doubts: Floats) -> Floats:
    """Return logarithms of doubts; a vocabulary of one token leaves none."""
    logarithms: Floats = np.log(np.maximum(doubts, np.finfo(np.float64).tiny))
    return logarithms
