# SPDX-License-Identifier: Apache-2.0
"""Sets of tokens as bit masks: what a token looks like decides whether a reply goes on with it."""

import re
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from mockengine.replies.choices import Limits
from mockengine.replies.structured.constraint import ConstraintError
from mockengine.replies.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""A set of tokens: bit i % 32 of word i / 32 is token i, as llguidance has it."""

_WORD_BITS: Final = 32
_ENOUGH_WORDS: Final = 64
_SHAPES: Final = {
    "words": rb"[A-Za-z][a-z]+",
    "spaced_words": rb" [A-Za-z][a-z]+",
    "plain": rb"[ -~]+",
    "letters": rb" ?[A-Za-z]+",
    "alphanumeric": rb"[A-Za-z0-9_ ]+",
    "digits": rb"[0-9]+",
    "space": rb" ",
    "quotes": rb'".*',
    "closers": rb"[}\])]+",
    "quoting": rb'""?[}\])]*',
    "going_on": rb'[,:;.@/] ?"?|\n',
    "values": rb"null|true|false|[0-9]",
    "single": rb"[ !#-'*-Z^-z|~]",
}


class Vocabulary:
    """The tokens of a tokenizer, by what they look like.

    Attributes:
        eos: ends a reply.
        eos_id: the usual one of them.
        added: added tokens, which may follow only where a constraint names them.
        words, spaced_words: a whole word of letters, without and with a space before it.
        letters: a word or a piece of one.
        alphanumeric: letters, digits and spaces alone.
        plain: printable ASCII, and added tokens.
        digits: digits alone.
        space: one space.
        quotes: begin with a double quote, which ends a string of JSON.
        closers: brackets that close, and nothing else.
        quoting: a quote, and nothing that opens anything.
        going_on: what stands between parts.
        values: the shortest values of JSON.
        single: one character that opens nothing.
        lengths: bytes of every token.
        permitted: those that a client allows, and those that end a reply; None is all.

    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.permitted: Mask | None = None
        self._words = (tokenizer.vocab_size + _WORD_BITS) // _WORD_BITS
        spelled = tokenizer.token_bytes
        self.lengths = np.array([len(token) for token in spelled], np.int64)
        ends = list(tokenizer.eos_ids or tokenizer.masks.eos_tokens)
        self.eos, self.eos_id = self._mask(ends), ends[0] if ends else tokenizer.masks.eos_token
        special = tokenizer.special_ids
        shapes = {name: re.compile(shape, re.DOTALL) for name, shape in _SHAPES.items()}
        masks = {
            name: self._mask([i for i, token in enumerate(spelled) if shape.fullmatch(token) and i not in special])
            for name, shape in shapes.items()
        }
        self.words, self.spaced_words, self.plain = masks["words"], masks["spaced_words"], masks["plain"]
        self.words = self._whole_words(spelled, self.words)
        self.letters, self.alphanumeric = masks["letters"], masks["alphanumeric"]
        self.digits, self.space = masks["digits"], masks["space"]
        self.quotes, self.closers = masks["quotes"], masks["closers"]
        self.quoting, self.going_on = masks["quoting"], masks["going_on"]
        self.values, self.single = masks["values"], masks["single"]
        self.added = self._mask(sorted(special)) & ~self.eos
        self.plain |= self.added

    def within(self, limits: Limits | None) -> "Vocabulary":
        """Return the same tokens, of which those alone follow that a client allows, and those that end a reply."""
        if limits is None:
            return self
        spelled = len(self.lengths)
        is_permitted = np.full(spelled, limits.only is None)
        if limits.only is not None:
            is_permitted[[token for token in limits.only if 0 <= token < spelled]] = True
        is_permitted[[token for token in limits.ruled_out if 0 <= token < spelled]] = False
        limited = copy(self)
        limited.permitted = self._mask(np.flatnonzero(is_permitted)) | self.eos
        return limited

    def _mask(self, tokens: list[int] | np.ndarray[tuple[int], np.dtype[np.intp]]) -> Mask:
        bits = np.zeros(self._words * _WORD_BITS, np.uint8)
        bits[tokens] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _whole_words(self, spelled: Sequence[bytes], words: Mask) -> Mask:
        """Return those of `words` that come with a space too, and so are no mere pieces of words; all if too few do."""
        spaced = set(spelled)
        whole = [token for token in members(words) if b" " + spelled[token].lower() in spaced]
        return self._mask(whole) if len(whole) >= _ENOUGH_WORDS else words

    def following(self, matcher: "LLMatcher") -> Mask:
        """Return the tokens that may come next, EOS among them if the reply may end.

        What a client forbids is among them only where nothing else is.

        Raises:
            ConstraintError: none may, since the grammar turned out to be too complex or cannot be followed.

        """
        mask: Mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._words]
        if matcher.is_error() or not mask.any():
            raise cannot_follow(matcher)
        if self.permitted is None:
            return mask
        permitted = mask & self.permitted
        return permitted if permitted.any() else mask


def cannot_follow(matcher: "LLMatcher") -> ConstraintError:
    """Return the error for a constraint that was compiled, but that no reply can be written to."""
    why = matcher.get_error().replace("<non-verbose/>", "").strip() or "nothing may follow"
    return ConstraintError(f"no reply can be written to the constraint: {why}")


def size(mask: Mask) -> int:
    """Return how many tokens there are."""
    return int(np.bitwise_count(mask).sum())


def nth(mask: Mask, index: int) -> int:
    """Return token number `index` of the set, from 0, in the order of their ids."""
    until = np.cumsum(np.bitwise_count(mask), dtype=np.int64)
    word = int(np.searchsorted(until, index, side="right"))
    before = int(until[word - 1]) if word else 0
    bits = int(mask[word])
    for _ in range(index - before):
        bits &= bits - 1
    return word * _WORD_BITS + (bits & -bits).bit_length() - 1


def places(mask: Mask) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return all tokens of the set, as an array."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def members(mask: Mask) -> list[int]:
    """Return all tokens of the set."""
    tokens: list[int] = places(mask).tolist()
    return tokens
