# SPDX-License-Identifier: Apache-2.0
"""Writes replies to constraints.

A reply is written in two stages. First tokens are drawn among all that may follow. From some position on nothing is
drawn any more: the reply is brought to its end by the token that does most for it (`closing`). If the end then comes
too late, that stage is begun earlier, at last with the first token. Where few tokens are allowed and that is too long
still, a reply that fits is sought among the short ones (`shortest`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mockengine.replies.choices import Limits
from mockengine.replies.hashing import draw
from mockengine.replies.structured.closing import Closing
from mockengine.replies.structured.constraint import Constraint, ConstraintError
from mockengine.replies.structured.drawing import Drawing
from mockengine.replies.structured.grammar import Grammars
from mockengine.replies.structured.shortest import shortest
from mockengine.replies.structured.vocabulary import Vocabulary, cannot_follow
from mockengine.replies.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_TOKENS: Final = 4096
"""The longest reply that is written; a constraint that wants more is not satisfied."""
_DRAWN_TOKENS: Final = 160
# Longer ones are closed once only, for each attempt may cost as much.
_MOST_RETRIED_TOKENS: Final = 1024
# What is drawn for a reply that comes out too long is cut to a part of it, then to nothing.
_EARLY: Final = 4
_MOST_SOUGHT_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Written:
    """A reply.

    Attributes:
        tokens: at most `max_tokens`, without EOS.
        complete: it keeps to its constraint; otherwise `max_tokens` or `MOST_TOKENS` cut it short. A complete reply is
            shorter than `max_tokens`, so that EOS can follow, unless it fits only without EOS.

    """

    tokens: list[int]
    complete: bool


class StructuredWriter:
    """Writes replies with one tokenizer. What is compiled once is kept.

    Attributes:
        tokenizer: the model's.

    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._grammars = Grammars(tokenizer)
        self._vocabulary = Vocabulary(tokenizer)
        self.tokenizer = tokenizer

    def write(
        self, constraint: Constraint, key: int, max_tokens: int, limits: Limits | None = None, min_tokens: int = 0
    ) -> Written:
        """Write the reply that `key` identifies; a pure function of its arguments.

        What `limits` forbid is said, and less than `min_tokens` are, only where the constraint leaves nothing else.

        Raises:
            ConstraintError: the constraint is wrong or cannot be satisfied.

        """
        matcher = self._grammars.matcher(constraint)
        try:
            return self._write(matcher, key, max_tokens, self._vocabulary.within(limits), min_tokens)
        except ConstraintError:
            # Earlier replies may have filled what the grammar remembers: then it works when it is new.
            matcher = self._grammars.matcher(constraint, anew=True)
            return self._write(matcher, key, max_tokens, self._vocabulary.within(limits), min_tokens)

    def _write(self, start: "LLMatcher", key: int, max_tokens: int, vocabulary: Vocabulary, least: int) -> Written:
        most = min(max_tokens, MOST_TOKENS)
        first = Written([], complete=False)
        fits_without_eos: Written | None = None
        for tokens, matcher in self._beginnings(start, key, most, vocabulary, least):
            written = self._closed(tokens, matcher, most, vocabulary, least)
            if written.complete and (len(written.tokens) < max_tokens):
                return written
            if written.complete:
                fits_without_eos = written
            first = first if first.tokens else written
        if fits_without_eos is None and most <= _MOST_SOUGHT_TOKENS:
            found = shortest(start, self.tokenizer, vocabulary, most)
            fits_without_eos = None if found is None else Written(found, complete=True)
        return fits_without_eos or first

    def _beginnings(
        self, start: "LLMatcher", key: int, most: int, vocabulary: Vocabulary, least: int
    ) -> Iterator[tuple[list[int], "LLMatcher"]]:
        """Yield drawn beginnings of the reply with their matchers, the longest first."""
        most_drawn = min(most // 2, _DRAWN_TOKENS)
        beginnings: list[tuple[list[int], LLMatcher]] = [([], start)]
        tokens: list[int] = []
        matcher = start.deep_copy()
        drawing = Drawing(self.tokenizer, vocabulary, least)
        while len(tokens) < most_drawn and not matcher.is_stopped():
            following = drawing.following(matcher, draw(key, len(tokens)), tokens)
            if not following:
                break
            _consume(matcher, following)
            early = len(tokens) < most_drawn // _EARLY
            tokens = tokens + following
            if early and len(tokens) >= most_drawn // _EARLY:
                beginnings.append((tokens, matcher.deep_copy()))
        beginnings.append((tokens, matcher))
        yield from reversed(beginnings[-1:] if most > _MOST_RETRIED_TOKENS else beginnings)

    def _closed(
        self, tokens: list[int], matcher: "LLMatcher", most: int, vocabulary: Vocabulary, least: int
    ) -> Written:
        tokens, matcher = list(tokens), matcher.deep_copy()
        closing = Closing(self.tokenizer, vocabulary)
        while not (is_complete := matcher.is_accepting()) or len(tokens) < least:
            if len(tokens) >= most:
                return Written(tokens[:most], complete=is_complete and len(tokens) == most)
            following = [] if matcher.is_stopped() else closing.following(matcher)
            if is_complete and not following:
                break
            _consume(matcher, following)
            tokens += following
        return Written(tokens[:most], complete=len(tokens) <= most)


def _consume(matcher: "LLMatcher", tokens: list[int]) -> None:
    if not tokens or not matcher.consume_tokens(tokens) or matcher.is_error():
        raise cannot_follow(matcher)
