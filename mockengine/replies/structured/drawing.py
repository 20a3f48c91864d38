# SPDX-License-Identifier: Apache-2.0
"""Draws how a reply goes on: words where there may be text, anything that fits where there is structure."""

from itertools import groupby
from typing import TYPE_CHECKING, Final

from mockengine.replies.structured.vocabulary import Mask, Vocabulary, members, nth, size
from mockengine.replies.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# So many whole words may follow only where there is free text.
_TEXT_WORDS: Final = 32
# So few tokens are looked at one by one.
_FEW: Final = 64
# Chances in 256.
_END_TEXT: Final = 24
_END: Final = 128
_CLOSE_STRING: Final = 64
_CLOSE_FULL_STRING: Final = 192
_LEAVE_TEXT: Final = 48
_NO_NUMBER: Final = 176
_LEAVE_NUMBER: Final = 144
_LEAVE_WORD: Final = 160


class Drawing:
    """Chooses tokens by drawn bits."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, least: int = 0) -> None:
        """Draw among these tokens; a reply of fewer than `least` ends only where nothing may follow."""
        self._spelled = tokenizer.token_bytes
        self._vocabulary = vocabulary
        self._least = least

    def following(self, matcher: "LLMatcher", bits: int, tokens: list[int]) -> list[int]:
        """Return the tokens that come next, none if the reply ends here.

        Args:
            matcher: at the end of `tokens`; it is not moved.
            bits: 64 random bits.
            tokens: the reply so far.

        """
        if forced := matcher.compute_ff_tokens():
            return forced
        known = self._vocabulary
        allowed = known.following(matcher)
        going_on = allowed & ~known.eos
        last = self._spelled[tokens[-1]] if tokens else b""
        words = self._words(going_on, last)
        chances, index = bits & 0xFFFFFFFF, bits >> 32
        may_end = matcher.is_accepting()
        is_long_enough = bool(tokens) and len(tokens) >= self._least
        if may_end and not going_on.any():
            return []
        if may_end and is_long_enough and _happens(chances, self._end_chance(going_on, words)):
            return []
        return [self._drawn(self._pool(going_on, words, last, chances >> 8), index)]

    def _end_chance(self, allowed: Mask, words: Mask | None) -> int:
        text = words is not None and (allowed & self._vocabulary.spaced_words).any()
        return _END_TEXT if text else _END

    def _words(self, allowed: Mask, last: bytes) -> Mask | None:
        """Return the words that may follow, None where there is no free text."""
        spaced, plain = allowed & self._vocabulary.spaced_words, allowed & self._vocabulary.words
        for words in (spaced, plain) if last[-1:].isalnum() else (plain, spaced):
            if size(words) >= _TEXT_WORDS:
                return words
        return None

    def _pool(self, allowed: Mask, words: Mask | None, last: bytes, chances: int) -> Mask:
        """Return the tokens among which one is drawn."""
        known = self._vocabulary
        plain = allowed & known.plain
        if size(allowed) <= _FEW or not plain.any():
            # What a constraint names is as good as plain text.
            plain = allowed
        quotes = allowed & known.quotes
        # A string that has just begun gets something in it.
        close = _CLOSE_STRING if words is not None else _CLOSE_FULL_STRING
        if quotes.any() and last[-1:].isalnum() and _happens(chances, close):
            return quotes
        if words is not None:
            return self._leave_text(plain, last, chances, words)
        return self._structure(plain, last, chances)

    def _leave_text(self, plain: Mask, last: bytes, chances: int, words: Mask) -> Mask:
        """Return the words, or what may come instead of one if it is time for that."""
        known = self._vocabulary
        other = plain & ~known.alphanumeric
        # Words that cannot be set apart are not strung together for long.
        run_on = last[-1:].isalnum() and not (plain & known.spaced_words).any()
        chance = _LEAVE_WORD if run_on else _LEAVE_TEXT if size(other) <= _FEW else 0
        return other if other.any() and _happens(chances, chance) else words

    def _structure(self, plain: Mask, last: bytes, chances: int) -> Mask:
        known = self._vocabulary
        space = plain & known.space
        if space.any():
            # What comes after it is open then; tokens with a space in them are of a few kinds only.
            return space
        digits, others = plain & known.digits, plain & ~known.digits
        if digits.any() and others.any():
            leave = _LEAVE_NUMBER if last.isdigit() else _NO_NUMBER
            return others if _happens(chances, leave) else digits
        return plain

    def _drawn(self, pool: Mask, index: int) -> int:
        count = size(pool)
        if count > _FEW:
            return nth(pool, index * count >> 32)
        # Where a few texts are possible, each beginning is as likely as the others, and whole texts are single tokens.
        tokens = sorted(members(pool), key=self._spelled.__getitem__)
        groups = [list(group) for _, group in groupby(tokens, key=lambda token: self._spelled[token][:1])]
        group = groups[index * len(groups) >> 32]
        index = index * len(groups) & 0xFFFFFFFF
        followers = [*group[1:], None]
        longest = [token for token, after in zip(group, followers, strict=True) if not self._begins(token, after)]
        return longest[index * len(longest) >> 32]

    def _begins(self, token: int, after: int | None) -> bool:
        """Whether the token is the beginning of a word that the next one has more of."""
        spelled = self._spelled[token]
        return after is not None and spelled.isalpha() and self._spelled[after].startswith(spelled)


def _happens(bits: int, chance: int) -> bool:
    return (bits & 0xFF) < chance
