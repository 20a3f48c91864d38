# SPDX-License-Identifier: Apache-2.0
"""Brings a reply to its end: what closes comes first, then what leads on, then short values, then anything."""

from collections import Counter
from typing import TYPE_CHECKING, Final

from mockengine.replies.structured.vocabulary import Mask, Vocabulary, members, nth, places, size
from mockengine.replies.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A token that was taken 2^n times counts as one tier later: no token is taken for ever where another one may lead out.
_PATIENCE: Final = 4
_LITTLE_PATIENCE: Final = 1
# Where more pieces of words than these may follow there is text, if the vocabulary has twice as many.
_STRUCTURE_TOKENS: Final = 200


class Closing:
    """Chooses tokens that lead to the end of one reply."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        known = vocabulary
        # Brackets in free text close nothing.
        self._text_tiers = (
            (known.quoting, _PATIENCE),
            (known.added, _LITTLE_PATIENCE),
            (known.going_on, _LITTLE_PATIENCE),
            (known.values, _LITTLE_PATIENCE),
            (known.single, _PATIENCE),
        )
        self._tiers = ((known.closers, _PATIENCE), *self._text_tiers)
        self._vocabulary = vocabulary
        self._structure_tokens = min(_STRUCTURE_TOKENS, size(known.letters) // 2)
        self._spelled = tokenizer.token_bytes
        self._taken: Counter[int] = Counter()

    def following(self, matcher: "LLMatcher") -> list[int]:
        """Return the tokens that come next, none if nothing may."""
        if forced := matcher.compute_ff_tokens():
            return forced
        allowed = self._vocabulary.following(matcher) & ~self._vocabulary.eos
        if not allowed.any():
            return []
        best = self._last(matcher, allowed) if self._in_text(allowed) else None
        best = self._best(allowed) if best is None else best
        self._taken[best] += 1
        return [best]

    def _in_text(self, allowed: Mask) -> bool:
        return size(allowed & self._vocabulary.letters) > self._structure_tokens

    def _last(self, matcher: "LLMatcher", allowed: Mask) -> int | None:
        """Return a character that ends the reply at once, if there is one."""
        for token in members(allowed & (self._vocabulary.single | self._vocabulary.quoting)):
            ending = [token, self._vocabulary.eos_id]
            # To copy the matcher and let it go on would cost as much as the reply so far.
            if matcher.validate_tokens(ending) == len(ending):
                return token
        return None

    def _best(self, allowed: Mask) -> int:
        in_text = self._in_text(allowed)
        tiers = self._text_tiers if in_text else self._tiers
        ranked: list[tuple[int, int, int, int]] = []
        for tier, (shape, patience) in enumerate(tiers):
            if ranked and min(ranked)[0] <= tier:
                break
            ranked += [self._rank(token, tier, patience) for token in members(allowed & shape)]
        if in_text or not ranked:
            ranked.append(self._rank(self._longest(allowed), len(tiers) - 1, _PATIENCE))
        elif min(ranked)[0] >= len(tiers):
            ranked += [self._rank(token, len(tiers), _PATIENCE) for token in members(allowed)]
        return min(ranked)[-1]

    def _rank(self, token: int, tier: int, patience: int) -> tuple[int, int, int, int]:
        taken = self._taken[token]
        return tier + (taken >> patience), -len(self._spelled[token]), taken, token

    def _longest(self, allowed: Mask) -> int:
        """Return a long token: where there must be much text, it is over soonest with these."""
        plain = allowed & self._vocabulary.plain
        if not plain.any():
            return nth(allowed, 0)
        tokens = places(plain)
        return int(tokens[self._vocabulary.lengths[tokens].argmax()])
