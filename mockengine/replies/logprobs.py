# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens that were chosen without a model, as if a model had chosen them.

Every position has a distribution over the whole vocabulary: how likely each rank is follows from the position's doubt
(`rank_curve`), and which token has which rank from an arithmetic progression through the vocabulary whose step is
prime to its size, so that each token has one rank and each rank one token. The progression is laid so that the token
that was chosen has the rank that was drawn for it. What a position draws is a pure function of (key, position), so
nothing here depends on the batch, on k or on how a reply is cut into chunks.

Shapes, order and types are those of vLLM (protocol section 4.3); the numbers are as `wire.logprobs` wants them.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, Final, TypeAlias

import numpy as np

from mockengine.replies import Keys, Positions, Tokens
from mockengine.replies.hashing import Words, draws, splitmix64
from mockengine.replies.rank_curve import Floats, Integers, RankCurve
from mockengine.wire.sampling import SamplingParams

TokenIds: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids, or their ranks, as they travel."""

Singles: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
"""Logarithms as they travel."""

MAX_SCORES: Final = 2**24
"""Scores made by one call, 128 MB on the wire: the whole vocabulary for a long prompt would not fit into memory."""

ALL: Final = -1
"""The number of logprobs that means the whole vocabulary, as any below 0 does."""

_SCORES_AT_ONCE: Final = 2**17
_OWN_SEQUENCE: Final = 0x6C6F6770726F6273
"""Sets these draws apart from those that the tokens of the same key are made of."""
_PROMPT_SEQUENCE: Final = 0x70726F6D70740000
_UINT64_MOST: Final = 2**64 - 1
_INT32_MOST: Final = 2**31 - 1
_STEPS: Final = 512
_STEP_CANDIDATES: Final = 8 * _STEPS
_STEP_LEAST_PART: Final = 16
_STEP_BITS: Final = 12
_DOUBT_BITS: Final = 14
_RANK_BITS: Final = 64 - _STEP_BITS - _DOUBT_BITS


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Scores of tokens, with whatever dimensions `...` they were asked for in.

    Attributes:
        token_ids: `[..., columns]`; column 0 is the token itself, then come the others that were asked for.
        logprobs: `[..., columns]` natural logarithms.
        ranks: `[...]` rank of the token itself, from 1.

    """

    token_ids: TokenIds
    logprobs: Singles
    ranks: TokenIds


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How deep into the ranks a sampler goes, for each of N requests.

    Attributes:
        top_k: `[N]` last rank that it takes, 0 for any.
        top_p: `[N]` it takes no more ranks than have this probability together.

    """

    top_k: Integers
    top_p: Floats


def sampling_limits(params: SamplingParams) -> tuple[int, float]:
    """Return `top_k` and `top_p` of a request for `SamplingLimits`.

    Temperature 0 takes the first rank only. Other temperatures count as 1, since logprobs are said for 1 anyway.
    """
    if params.temperature == 0:
        return 1, 1.0
    top_p = params.top_p if 0.0 < params.top_p < 1.0 else 1.0
    return min(max(params.top_k, 0), _INT32_MOST), top_p


@dataclass(frozen=True, slots=True)
class _Places:
    """What M positions drew: the tokens that have the ranks are found from it."""

    tokens: Integers
    ranks: Integers
    doubts: Floats
    steps: Integers
    inverses: Integers


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The columns beside the token itself: the first ranks, or the tokens of `token_ids`, `[count]` or `[M, count]`."""

    count: int
    token_ids: Integers | None = None

    def rows(self, first: int, last: int) -> "_Wanted":
        ids = self.token_ids
        return self if ids is None or ids.ndim == 1 else _Wanted(self.count, ids[first:last])


class TokenScorer:
    """Scores tokens over a vocabulary of `vocab_size` ids. An id beyond it has the rank of the id modulo its size."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._curve = RankCurve(vocab_size)
        self._steps, self._inverses = _steps(vocab_size)

    def columns(self, num_logprobs: int) -> int:
        """Return how many columns `num_logprobs` (`ALL` for the whole vocabulary) makes: the token's own and theirs."""
        return 1 + self._most_likely(num_logprobs).count

    def sampled(
        self,
        keys: Keys,
        starts: Positions,
        tokens: Tokens,
        num_logprobs: int,
        limits: SamplingLimits | None = None,
    ) -> ScoredTokens:
        """Score the tokens of N replies with the `num_logprobs` most likely ones beside each, most likely first.

        Args:
            keys: `[N]` keys of the replies.
            starts: `[N]` positions of the first tokens in their replies.
            tokens: `[N, T]` the tokens from there on.
            num_logprobs: 0 for the tokens alone, `ALL` for the whole vocabulary; more than that is as many.
            limits: how deep the sampler went; None for as deep as the vocabulary.

        Returns:
            Scores in `[N, T]`.

        Raises:
            ValueError: more than `MAX_SCORES`.

        """
        return self._sampled(keys, starts, tokens, self._most_likely(num_logprobs), limits)

    def sampled_among(
        self,
        keys: Keys,
        starts: Positions,
        tokens: Tokens,
        token_ids: Integers,
        limits: SamplingLimits | None = None,
    ) -> ScoredTokens:
        """Score the tokens of N replies with those of `logprob_token_ids` beside each, in their order.

        Args:
            keys: as for `sampled`, like all others and what comes back.
            starts: first positions.
            tokens: `[N, T]`.
            token_ids: `[N, count]`, or `[count]` for all replies.
            limits: how deep the sampler went.

        Raises:
            ValueError: more than `MAX_SCORES`.

        """
        ids = token_ids.astype(np.int64)
        if ids.ndim > 1:
            ids = np.repeat(ids, tokens.shape[1], axis=0)
        return self._sampled(keys, starts, tokens, _Wanted(ids.shape[-1], ids), limits)

    def prompt(self, token_ids: Tokens | Words, num_logprobs: int, seed: int = 0) -> ScoredTokens:
        """Score the tokens of one prompt but the first, to which nothing leads.

        A token's scores depend on it and on those before it, so prompts that begin alike score alike so far.

        Args:
            token_ids: `[P]`.
            num_logprobs: as for `sampled`.
            seed: of the engine.

        Returns:
            Scores in `[P - 1]`, in none for a prompt of one token.

        Raises:
            ValueError: more than `MAX_SCORES`.

        """
        tokens, words = _prompt_words(token_ids, seed)
        return self._scored(words, tokens, self._most_likely(num_logprobs), None)

    def prompt_among(
        self, token_ids: Tokens | Words, wanted: TokenIds | Integers, start: int = 0, seed: int = 0
    ) -> Singles:
        """Return `prompt_token_id_logprobs`: the logarithms of given tokens at positions of one prompt.

        Args:
            token_ids: `[P]`.
            wanted: `[rows, count]` the tokens of `prompt_logprob_token_ids`, those below 0 for none. Row i is about the
                position that prompt token `start` + i + 1 has.
            start: `prompt_logprob_start`.
            seed: of the engine.

        Returns:
            `[rows, count]`, minus infinity for none.

        Raises:
            ValueError: more than `MAX_SCORES`, or rows that the prompt does not have.

        """
        tokens, words = _prompt_words(token_ids, seed)
        rows, count = wanted.shape
        if rows != max(tokens.size - start, 0):
            raise ValueError(
                f"prompt_logprob_token_ids: {rows} rows where a prompt of {tokens.size + 1} tokens has "
                f"{max(tokens.size - start, 0)} from {start} on"
            )
        ids = np.maximum(wanted, 0).astype(np.int64)
        scored = self._scored(words[start:], tokens[start:], _Wanted(count, ids), None)
        return np.where(wanted < 0, np.float32(-np.inf), scored.logprobs[:, 1:])

    def _most_likely(self, num_logprobs: int) -> _Wanted:
        return _Wanted(self._vocab_size if num_logprobs < 0 else min(num_logprobs, self._vocab_size))

    def _sampled(
        self, keys: Keys, starts: Positions, tokens: Tokens, wanted: _Wanted, limits: SamplingLimits | None
    ) -> ScoredTokens:
        requests, chunk = tokens.shape
        first: Words = starts.astype(np.uint64)[:, None]
        offsets: Words = np.arange(chunk, dtype=np.uint64)
        words = draws((keys ^ np.uint64(_OWN_SEQUENCE))[:, None], first + offsets).reshape(-1)
        if limits is not None and chunk > 1:
            limits = SamplingLimits(np.repeat(limits.top_k, chunk), np.repeat(limits.top_p, chunk))
        scored = self._scored(words, tokens.reshape(-1).astype(np.int64), wanted, limits)
        shape = (requests, chunk, 1 + wanted.count)
        return ScoredTokens(
            scored.token_ids.reshape(shape), scored.logprobs.reshape(shape), scored.ranks.reshape(requests, chunk)
        )

    def _scored(self, words: Words, tokens: Integers, wanted: _Wanted, limits: SamplingLimits | None) -> ScoredTokens:
        """Score M tokens, so many at once that what is made on the way stays small."""
        rows, columns = tokens.size, 1 + wanted.count
        if rows * columns > MAX_SCORES:
            raise ValueError(
                f"{rows} tokens with {wanted.count} logprobs each are {rows * columns} scores where at most "
                f"{MAX_SCORES} are made: ask for fewer logprobs or a shorter prompt"
            )
        places = self._places(words, tokens, limits)
        scored = ScoredTokens(
            np.empty((rows, columns), np.int32), np.empty((rows, columns), np.float32), places.ranks.astype(np.int32)
        )
        scored.token_ids[:, 0] = np.minimum(tokens, _INT32_MOST)
        scored.logprobs[:, 0] = self._curve.log_probabilities(places.doubts, places.ranks)
        at_once = max(_SCORES_AT_ONCE // columns, 1)
        for first in range(0, rows if wanted.count else 0, at_once):
            last = first + at_once
            self._fill(scored, _part(places, first, last), wanted.rows(first, last), first)
        return scored

    def _places(self, words: Words, tokens: Integers, limits: SamplingLimits | None) -> _Places:
        step_choice = ((words & _bits(_STEP_BITS)) * np.uint64(self._steps.size)) >> np.uint64(_STEP_BITS)
        steps = step_choice.astype(np.int64)
        doubts = self._curve.doubts(_unit((words >> np.uint64(_STEP_BITS)) & _bits(_DOUBT_BITS), _DOUBT_BITS))
        uniform = _unit(words >> np.uint64(64 - _RANK_BITS), _RANK_BITS)
        top_k, top_p = (None, None) if limits is None else (limits.top_k, limits.top_p)
        ranks = self._curve.draw(uniform, doubts, top_k, top_p)
        return _Places(tokens, ranks, doubts, self._steps[steps], self._inverses[steps])

    def _fill(self, scored: ScoredTokens, places: _Places, wanted: _Wanted, first: int) -> None:
        """Fill the columns beside the token itself, from row `first` on."""
        rows = slice(first, first + places.tokens.size)
        tokens, own = places.tokens[:, None], places.ranks[:, None]
        if wanted.token_ids is None:
            ranks = np.arange(1, wanted.count + 1)[None, :]
            ids = (tokens + places.steps[:, None] * (ranks - own)) % self._vocab_size
            # A token beyond the vocabulary stands where the one of the same rank would.
            ids = np.where(ranks == own, np.minimum(tokens, _INT32_MOST), ids)
        else:
            ids = np.broadcast_to(wanted.token_ids, (places.tokens.size, wanted.count))
            apart = (ids - tokens) % self._vocab_size
            ranks = (own - 1 + places.inverses[:, None] * apart) % self._vocab_size + 1
        scored.token_ids[rows, 1:] = np.minimum(ids, _INT32_MOST)
        scored.logprobs[rows, 1:] = self._curve.log_probabilities(places.doubts[:, None], ranks)


def _steps(vocab_size: int) -> tuple[Integers, Integers]:
    """Return steps through the vocabulary and what undoes them; small ones would make neighbours of likely tokens."""
    least = vocab_size // _STEP_LEAST_PART
    numbers = draws(np.array([vocab_size], np.uint64), np.arange(_STEP_CANDIDATES, dtype=np.uint64)) % np.uint64(
        vocab_size
    )
    found: list[tuple[int, int]] = []
    for step in numbers.tolist():
        if len(found) == _STEPS:
            break
        if gcd(step, vocab_size) == 1:
            inverse = pow(step, -1, vocab_size)
            if all(least <= number <= vocab_size - least for number in (step, inverse)):
                found.append((step, inverse))
    steps, inverses = zip(*(found or [(1, 1)]), strict=True)
    return np.array(steps, np.int64), np.array(inverses, np.int64)


def _prompt_words(token_ids: Tokens | Words, seed: int) -> tuple[Integers, Words]:
    """Return the tokens of a prompt but the first, and for each a word that follows from it and those before it."""
    places = np.arange(token_ids.size, dtype=np.uint64)
    words = np.cumsum(draws(token_ids.astype(np.uint64), places), dtype=np.uint64)[1:]
    words += np.uint64((seed ^ _PROMPT_SEQUENCE) & _UINT64_MOST)
    splitmix64(words)
    return token_ids[1:].astype(np.int64), words


def _part(places: _Places, first: int, last: int) -> _Places:
    rows = slice(first, last)
    return _Places(
        places.tokens[rows], places.ranks[rows], places.doubts[rows], places.steps[rows], places.inverses[rows]
    )


def _bits(count: int) -> np.uint64:
    return np.uint64(2**count - 1)


def _unit(numbers: Words, bits: int) -> Floats:
    """Return numbers of so many bits as numbers of 0 … 1, without 1."""
    units: Floats = numbers.astype(np.float64) * 2.0**-bits
    return units
