# SPDX-License-Identifier: Apache-2.0
"""Spans of reasoning: what a reply says before its answer, between the marks that reasoning parsers look for."""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

from mockengine.replies import Keys, Positions, Tokens, TokenSource
from mockengine.replies.asked import Asked
from mockengine.replies.choices import Choice
from mockengine.replies.length import LengthDraw
from mockengine.replies.random import RandomTokens
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.sampling import SamplingParams

BEGIN: Final = "<think>"
END: Final = "</think>"
_OPENING: Final = f"{BEGIN}\n"
_CLOSING: Final = f"\n{END}\n\n"
# Enough of a prompt to see how it ends.
_LAST_TOKENS: Final = 16
# The words of a span, and how many, have nothing to do with those of the answer.
_STREAM: Final = 0x726561736F6E


def reasoned(reasoning: str, *, opens: bool) -> str:
    """Return the span of this reasoning, with the mark that opens it unless the prompt has it."""
    return (_OPENING if opens else "") + reasoning + _CLOSING


def begins_with_reasoning(asked: Asked, tokenizer: Tokenizer) -> bool:
    """Return whether the prompt has opened the reasoning, as chat templates of some models do."""
    return _last_text(asked, tokenizer).endswith(BEGIN)


def _last_text(asked: Asked, tokenizer: Tokenizer) -> str:
    """Return how the prompt ends; nothing is known of one of embeddings."""
    return tokenizer.decode((asked.request.prompt_token_ids or ())[-_LAST_TOKENS:]).rstrip()


def has_marks(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has the marks of reasoning, which frontends know by their tokens."""
    return {BEGIN, END} <= tokenizer.added_ids.keys()


class Reasoning:
    """Makes the spans of replies that nobody has told."""

    def __init__(self, tokenizer: Tokenizer, length: LengthDraw | None) -> None:
        """Let spans have as many words as are drawn; None is no reasoning."""
        self._tokenizer = tokenizer
        self._length = length

    def span(self, asked: Asked, choice: Choice, most: int) -> list[int]:
        """Return what comes before the answer, of at most so many tokens; empty where there is no reasoning."""
        if self._length is None or asked.request.reasoning_ended:
            return []
        if _last_text(asked, self._tokenizer).endswith(END):
            return []
        ends = {*asked.params.stop_token_ids, *asked.params.all_stop_token_ids}
        marks = self._marks
        if len(choice.permitted(marks)) < len(marks) or not ends.isdisjoint(marks):
            # Without its marks it would be part of the answer.
            return []
        return self._said(asked, self._words(asked, choice, most))[:most]

    def before_constraint(self, asked: Asked, choice: Choice, most: int) -> list[int]:
        """Return what comes before the beginning of a constraint, as short as can be where there is no reasoning.

        Python frontends let the constraint begin after the reasoning, so it has to end.
        """
        if asked.request.reasoning_ended is not False:
            return []
        return self._said(asked, self._words(asked, choice, most))

    @cached_property
    def _marks(self) -> Sequence[int]:
        return self._tokenizer.encode(_OPENING + _CLOSING)

    def _words(self, asked: Asked, choice: Choice, most: int) -> list[int]:
        if self._length is None:
            return []
        key = asked.key ^ _STREAM
        count = min(self._length(key), most)
        budget = _budget(asked.params)
        if budget is not None:
            count = min(count, budget)
        others = choice.source.tokens(key, 0, count)
        if self._source is None:
            return others
        words = self._source.tokens(key, 0, count)
        return [word if word in choice.vocabulary else other for word, other in zip(words, others, strict=True)]

    @cached_property
    def _source(self) -> RandomTokens | None:
        words = self._tokenizer.word_ids
        return RandomTokens(Vocabulary(self._tokenizer.vocab_size, only=words)) if words else None

    def _said(self, asked: Asked, words: list[int]) -> list[int]:
        """Return the whole span of these words; all between the marks counts for the client's budget."""
        encode = self._tokenizer.encode
        opens = not begins_with_reasoning(asked, self._tokenizer)
        newline = encode("\n")
        inner = [*(newline if opens else ()), *words, *newline][: _budget(asked.params)]
        return [*(encode(BEGIN) if opens else ()), *inner, *encode(f"{END}\n\n")]


def _budget(params: SamplingParams) -> int | None:
    """Return how many tokens may be between the marks; a negative number is no limit."""
    budget = params.thinking_token_budget
    return None if budget is None or budget < 0 else budget


class Preceded:
    """The tokens of a source, but for the first ones, which are given."""

    def __init__(self, first: Sequence[int], source: TokenSource) -> None:
        self._first = np.array(first, np.uint32)
        self._source = source

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """Return tokens `start` … `start + count - 1`."""
        tokens = self._source.tokens(key, start, count)
        first: list[int] = self._first[start : start + count].tolist()
        return first + tokens[len(first) :]

    def block(self, keys: Keys, starts: Positions, count: int) -> Tokens:
        """Return `count` tokens of replies that all begin with the given ones: from each of `starts` on."""
        block = self._source.block(keys, starts, count)
        for row, start in zip(block, starts.tolist(), strict=True):
            first = self._first[start : start + count]
            row[: len(first)] = first
        return block
