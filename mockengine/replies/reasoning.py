# SPDX-License-Identifier: Apache-2.0
"""Spans of reasoning: what a reply says before its answer, between the marks that reasoning parsers look for."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from mockengine.replies import Keys, Positions, Tokens, TokenSource
from mockengine.replies.asked import Asked
from mockengine.replies.choices import Choice
from mockengine.replies.length import LengthDraw
from mockengine.replies.random import RandomTokens
from mockengine.replies.reasoning_form import ReasoningForm
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.sampling import SamplingParams

# Enough of a prompt to see how it ends.
_LAST_TOKENS: Final = 16
# The words of a span, and how many, have nothing to do with those of the answer.
_STREAM: Final = 0x726561736F6E
_PRINTABLE: Final = re.compile(rb"[ -~]+")


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """How a prompt ends.

    Attributes:
        is_open: with the mark that opens reasoning.
        is_closed: with the mark that closes it.
        num_tokens: how many tokens come after the mark that opens it.

    """

    is_open: bool = False
    is_closed: bool = False
    num_tokens: int = 0


class Reasoning:
    """Makes the reasoning of replies. Spans are a pure function of the request."""

    def __init__(self, tokenizer: Tokenizer, form: ReasoningForm, length: LengthDraw | None = None) -> None:
        """Let spans have as many words as are drawn.

        Args:
            tokenizer: the model's.
            form: how they are written.
            length: draws how many words; None is no reasoning.

        """
        self.form = form
        self._tokenizer = tokenizer
        self._length = length
        self._sources: WeakKeyDictionary[Choice, TokenSource] = WeakKeyDictionary()

    def said(self, reasoning: str, asked: Asked) -> str:
        """Return reasoning that somebody has told, as it is written."""
        return self.form.said(reasoning, opens=not self._prompt_end(asked).is_open)

    def span(self, asked: Asked, choice: Choice, most: int) -> list[int]:
        """Return what comes before the answer, of at most so many tokens; empty where there is no reasoning."""
        if not self._is_wanted(asked):
            return []
        prompt_end = self._prompt_end(asked)
        params = asked.params
        ends = {params.eos_token_id, *params.stop_token_ids, *params.all_stop_token_ids}
        marks = self._marks
        if prompt_end.is_closed or len(choice.permitted(marks)) < len(marks) or not ends.isdisjoint(marks):
            # Without its marks it would be part of the answer.
            return []
        return self._said(asked, prompt_end, choice, most)

    def most_tokens(self, asked: Asked) -> int:
        """Return how many tokens the span of a reply has at most."""
        if self._length is None or not self._is_wanted(asked):
            return 0
        return self._length(asked.key ^ _STREAM) + len(self._marks)

    def before_constraint(
        self, asked: Asked, structured_outputs: Mapping[str, object], choice: Choice, most: int
    ) -> tuple[list[int], Mapping[str, object]]:
        """Return what comes before a constraint, of at most so many tokens, and the constraint itself.

        Python frontends let the constraint begin after the reasoning, so there has to be some, as short as can be. Rust
        frontends make reasoning a part of the constraint, which may be left out.
        """
        prompt_end = self._prompt_end(asked)
        if asked.request.reasoning_ended is False:
            return self._said(asked, prompt_end, choice, most), structured_outputs
        itself = None if prompt_end.is_open else self._without_optional(structured_outputs)
        if itself is None:
            return [], structured_outputs
        has_none = self._length is None or prompt_end.is_closed
        return [] if has_none else self._said(asked, prompt_end, choice, most), itself

    def _without_optional(self, structured_outputs: Mapping[str, object]) -> Mapping[str, object] | None:
        """Return a constraint without the reasoning that it allows at its beginning; None if it allows none."""
        tag = structured_outputs.get("structural_tag")
        if not isinstance(tag, str) or self.form.end_mark not in tag:
            return None
        try:
            whole = json.loads(tag)
            first, *others = whole["format"]["elements"]
            reasoning, after = first["content"]["elements"]
            found = [whole["format"]["type"], first["type"], reasoning["begin"], reasoning["end"] + after["value"]]
        except (ValueError, RecursionError, TypeError, KeyError):
            return None
        if not others or found != ["sequence", "optional", self.form.begin_mark, self.form.closing]:
            return None
        return {**structured_outputs, "structural_tag": {**whole, "format": {**whole["format"], "elements": others}}}

    def _is_wanted(self, asked: Asked) -> bool:
        return self._length is not None and not asked.request.reasoning_ended

    def _prompt_end(self, asked: Asked) -> PromptEnd:
        """Return how the prompt ends; nothing is known of one of embeddings."""
        last = (asked.request.prompt_token_ids or ())[-_LAST_TOKENS:]
        text = self._tokenizer.decode(last).rstrip()
        if text.endswith(self.form.end_mark):
            return PromptEnd(is_closed=True)
        if not text.endswith(self.form.begin_mark):
            return PromptEnd()
        mark = self._tokenizer.added_ids.get(self.form.begin_mark)
        after = next((place for place, token in enumerate(reversed(last)) if token == mark), 0)
        return PromptEnd(is_open=True, num_tokens=after)

    @cached_property
    def _marks(self) -> Sequence[int]:
        """All that is said around the words."""
        return self._tokenizer.encode(self.form.begin + self.form.end)

    @cached_property
    def _opening(self) -> tuple[Sequence[int], Sequence[int]]:
        """The mark that opens reasoning, with what is before it, and what is after it."""
        before, mark, after = self.form.begin.partition(self.form.begin_mark)
        return self._tokenizer.encode(before + mark), self._tokenizer.encode(after)

    @cached_property
    def _closing(self) -> tuple[Sequence[int], Sequence[int]]:
        """What is before the mark that closes reasoning, and the mark with what is after it."""
        return self._tokenizer.encode(self.form.space_before_end), self._tokenizer.encode(self.form.closing)

    def _said(self, asked: Asked, prompt_end: PromptEnd, choice: Choice, most: int) -> list[int]:
        """Return the whole span, cut; all between the marks counts for the client's budget, as vLLM has it."""
        budget = _budget(asked.params)
        left = most if budget is None else max(0, budget - prompt_end.num_tokens)
        (begin, after_begin), (before_end, end) = self._opening, self._closing
        words = self._words(asked, choice, min(left, most))
        inner = [*(() if prompt_end.is_open else after_begin), *words, *before_end][: None if budget is None else left]
        return [*(() if prompt_end.is_open else begin), *inner, *end][:most]

    def _words(self, asked: Asked, choice: Choice, most: int) -> list[int]:
        if self._length is None:
            return []
        key = asked.key ^ _STREAM
        return self._source(choice).tokens(key, 0, min(self._length(key), most))

    def _source(self, choice: Choice) -> TokenSource:
        """Return the source of what can be read and may be said."""
        source = self._sources.get(choice)
        if source is None:
            readable = choice.vocabulary.among(self._readable)
            source = RandomTokens(Vocabulary(self._tokenizer.vocab_size, only=readable)) if readable else choice.source
            self._sources[choice] = source
        return source

    @cached_property
    def _readable(self) -> Sequence[int]:
        """Whole words, or else tokens of plain text out of which no mark can come."""
        if self._tokenizer.word_ids:
            return self._tokenizer.word_ids
        first, special_ids = self.form.end_mark[0].encode(), self._tokenizer.special_ids
        plain = (
            token
            for token, spelled in enumerate(self._tokenizer.token_bytes)
            if _PRINTABLE.fullmatch(spelled) and first not in spelled
        )
        return [token for token in plain if token not in special_ids]


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
        first: list[int] = self._first[start : start + count].tolist()
        left = count - len(first)
        return first + self._source.tokens(key, start + len(first), left) if left else first

    def block(self, keys: Keys, starts: Positions, count: int) -> Tokens:
        """Return `count` tokens of replies that all begin with the given ones: from each of `starts` on."""
        block = self._source.block(keys, starts, count)
        for row, start in zip(block, starts.tolist(), strict=True):
            first = self._first[start : start + count]
            row[: len(first)] = first
        return block

    def beyond(self, position: int) -> TokenSource:
        """Return the source alone once nothing that is given is left."""
        return self if position < len(self._first) else self._source.beyond(position)
