# SPDX-License-Identifier: Apache-2.0
"""Seeks a reply that fits where there is room for a few tokens only."""

from itertools import groupby
from typing import TYPE_CHECKING, Final

from mockengine.replies.structured.vocabulary import Vocabulary, members, size
from mockengine.replies.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Replies that are followed at once, and ways on that are tried of each.
_WIDTH: Final = 6
_WAYS: Final = 8
_MOST_CANDIDATES: Final = 2048


def shortest(start: "LLMatcher", tokenizer: Tokenizer, vocabulary: Vocabulary, most: int) -> list[int] | None:
    """Return a reply of at most `most` tokens, None if none is found; not all replies are looked at."""
    reached: list[tuple[list[int], LLMatcher]] = [([], start.deep_copy())]
    while reached:
        for tokens, matcher in reached:
            if matcher.is_accepting():
                return tokens
        longer = []
        for tokens, matcher in reached:
            for way in _ways(matcher, tokenizer, vocabulary):
                copy = matcher.deep_copy()
                if len(tokens) + len(way) <= most and copy.consume_tokens(way):
                    longer.append((tokens + way, copy))
        # The furthest with the fewest tokens: bytes come first, as they must be written in any case.
        longer.sort(key=lambda one: (len(one[0]), -sum(len(tokenizer.token_bytes[token]) for token in one[0])))
        reached = longer[:_WIDTH]
    return None


def _ways(matcher: "LLMatcher", tokenizer: Tokenizer, vocabulary: Vocabulary) -> list[list[int]]:
    """Return ways on: what is forced, or the longest and the shortest token for each first byte."""
    if forced := matcher.compute_ff_tokens():
        return [forced]
    spelled = tokenizer.token_bytes
    allowed = vocabulary.following(matcher) & ~vocabulary.eos
    many = size(allowed) > _MOST_CANDIDATES
    tokens = members(allowed & (vocabulary.single | vocabulary.quoting) if many else allowed)
    tokens.sort(key=lambda token: (spelled[token][:1], -len(spelled[token]), token))
    ways: list[list[int]] = []
    for _, group in groupby(tokens, key=lambda token: spelled[token][:1]):
        longest, *others = group
        ways += [[longest], *([others[-1]] for _ in others[:1])]
    return ways[:_WAYS]
