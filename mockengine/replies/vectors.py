# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts, of their tokens and of labels, such that what is alike points in like directions.

A *feature* is a 64-bit word: a token, or two in a row. It is some marks at places that follow from it, and the
vector of a text is the weighted sum of the marks of its features, so it costs the same for any number of dimensions. A
Hartley transform, which keeps lengths and angles, spreads the marks over all numbers of the vector; so its leading
numbers alone say nearly as much. Tokens and labels, which have a vector each, are stretches of one long noise.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from mockengine.replies.hashing import Words, draws
from mockengine.wire.tensors import Tensor

Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
"""A vector, or one in each row."""

_Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
_Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

VALUES_AT_ONCE: Final = 2**16
"""Numbers of tokens that are computed at once: so many stay in the cache, and nobody waits for them for long."""

# A token takes as long as so many numbers, even if it has fewer.
_FEWEST_NUMBERS: Final = 32

MOST_TOKENS: Final = 2**18
"""Of a text that is longer the others do not count."""


def _sizes_of_marks(count: int) -> _Floats:
    """Return sizes that differ, so that marks at one place do not cancel each other, and together have length 1."""
    sizes = np.linspace(0.5, 1.5, count)
    scaled: _Floats = sizes / np.sqrt((sizes**2).sum())
    return scaled


# The fewer a short text has, the more differs from what it should be; pairs count little, and long texts have many.
_MARKS_OF_TOKEN: Final = _sizes_of_marks(8)
_MARKS_OF_PAIR: Final = _sizes_of_marks(2)
# What two neighbours count together, so that the order of words matters a little.
_PAIRS_WEIGHT: Final = 0.3
# A pair's word ends with so many bits that say how rare it is.
_RARITY_BITS: Final = np.uint64(63)
# What a token's vector has of the one before it.
_PREVIOUS_WEIGHT: Final = np.float32(0.3)
# A tokenizer numbers its special tokens first, then what is frequent. Ids of so many bits and more count in full.
_RARE_BITS: Final = 15
_NOISE_VALUES: Final = 2**20
# Stretches that begin near the end go on with the beginning, so far.
_WIDEST: Final = 2**16
# What makes the standard deviation of even noise 1.
_SPREAD: Final = np.float32(np.sqrt(3.0))
# Sequences of draws, so that one number has other values as a token, as the one before it, and as a label.
_TOKENS, _PREVIOUS, _LABELS, _NOISE = (np.array([number], np.uint64) for number in range(4))
_UINT64_MOST: Final = 2**64 - 1
_WORD_BYTES: Final = 8
_ODD: Final = np.uint64(1)
_HALF_BITS: Final = np.uint64(32)


class Vectoriser:
    """Makes vectors of `dim` numbers; another seed makes others."""

    def __init__(self, dim: int, seed: int = 0) -> None:
        self._dim = dim
        self._seed = np.uint64(seed & _UINT64_MOST)

    def text(self, features: Words) -> Vectors:
        """Return the vector, `[dim]`, of a text with a feature for each token, `[n]`; it is longer for longer texts."""
        features = features[:MOST_TOKENS]
        tokens, token_counts = np.unique(features, return_counts=True)
        token_weights = rarity(tokens) * (1.0 + np.log(token_counts))
        pairs, pair_counts = np.unique(_pairs(features), return_counts=True)
        rarities = (pairs & _RARITY_BITS) / float(_RARITY_BITS)
        pair_weights = _PAIRS_WEIGHT * rarities * (1.0 + np.log(pair_counts))
        marked = self._marked(tokens, token_weights, _MARKS_OF_TOKEN)
        marked += self._marked(pairs, pair_weights, _MARKS_OF_PAIR)
        return _spread(marked)

    def tokens(self, features: Words) -> Iterator[tuple[slice, Vectors]]:
        """Yield the vectors, `[rows, dim]`, of the tokens of a text, some rows at a time, each with its place.

        A token's vector has something of the one before it. Lengths are about 1.
        """
        stretches = _stretches(self._noise, self._dim)
        length = np.float32(np.sqrt(3.0 / self._dim))
        for place, own, previous in self._starts(features, self._dim):
            yield place, _with_previous(stretches[own], stretches[previous], length)

    def token_scores(self, features: Words, num_labels: int) -> Iterator[tuple[slice, Vectors]]:
        """Yield how much each token of a text has of each label, `[rows, num_labels]`, as `tokens` yields vectors.

        That is around 0, with a standard deviation of about 1; the token before has a say.
        """
        stretches = _stretches(self._noise, num_labels)
        for place, own, previous in self._starts(features, num_labels):
            yield place, _with_previous(stretches[own], stretches[previous], _SPREAD)

    def token_scores_of(self, features: Words, labels: Words) -> Iterator[tuple[slice, Vectors]]:
        """Yield the same of certain labels, by their numbers."""
        columns = (labels % np.uint64(_NOISE_VALUES)).astype(np.int64)
        for place, own, previous in self._starts(features, len(labels)):
            rows, others = (self._noise[(starts[:, None] + columns) % _NOISE_VALUES] for starts in (own, previous))
            yield place, _with_previous(rows, others, _SPREAD)

    def labels(self, count: int) -> Vectors:
        """Return the vectors, `[count, dim]`, of the first labels; their lengths are about 1."""
        starts = _places_in_noise(np.arange(count, dtype=np.uint64) ^ self._seed, _LABELS)
        rows: Vectors = _stretches(self._noise, self._dim)[starts]
        return rows * np.float32(np.sqrt(3.0 / self._dim))

    @property
    def _noise(self) -> Vectors:
        return _noise(int(self._seed))

    def _starts(self, features: Words, width: int) -> Iterator[tuple[slice, _Places, _Places]]:
        """Yield where the noise of tokens begins, and of those before them, for as many as are computed at once.

        The first token of all has none before it.
        """
        at_once = max(VALUES_AT_ONCE // max(width, _FEWEST_NUMBERS), 1)
        for first in range(0, features.size, at_once):
            place = slice(first, min(first + at_once, features.size))
            own = _places_in_noise(features[place] ^ self._seed, _TOKENS)
            before = features[max(first - 1, 0) : place.stop - 1]
            yield place, own, _places_in_noise(before ^ self._seed, _PREVIOUS)

    def _marked(self, features: Words, weights: _Floats, marks: _Floats) -> _Floats:
        """Return the sum of the marks of features, `[dim]`."""
        numbers: Words = np.arange(marks.size, dtype=np.uint64)
        words = draws((features ^ self._seed)[:, None], numbers)
        places = (((words >> _HALF_BITS) * np.uint64(self._dim)) >> _HALF_BITS).astype(np.int64)
        sizes = np.where(words & _ODD, marks, -marks) * weights[:, None]
        marked: _Floats = np.bincount(places.reshape(-1), sizes.reshape(-1), self._dim).astype(np.float64, copy=False)
        return marked


def dot_products(rows: Vectors, others: Vectors) -> Vectors:
    """Return the dot product of each row with each other one, `[rows, others]`."""
    # `@` would wake up threads for each few of them, which on busy cores takes a hundred times as long.
    products: Vectors = np.einsum("id,jd->ij", rows, others)
    return products


def normalised(vectors: Vectors) -> Vectors:
    """Return vectors of length 1 that point where these do; one of length 0 stays as it is."""
    lengths = np.sqrt(np.einsum("...i,...i->...", vectors, vectors))[..., None]
    unit: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def rarity(features: Words) -> _Floats:
    """Return how much tokens count, up to 1; the first ids, special tokens and frequent words, count little."""
    weights: _Floats = np.minimum(np.log2(features.astype(np.float64) + 2.0) / _RARE_BITS, 1.0) ** 2
    return weights


def features_of_embeds(embeds: Tensor) -> Iterator[Words]:
    """Yield features for the rows of a prompt of embeddings, `[rows, width]`, some at a time.

    Equal rows have equal ones.
    """
    rows = embeds.shape[0]
    row_bytes = len(embeds.data) // max(rows, 1)
    row_words = -(-row_bytes // _WORD_BYTES)
    data = np.frombuffer(embeds.data, np.uint8).reshape(rows, row_bytes)
    factors = draws(np.zeros(1, np.uint64), np.arange(row_words, dtype=np.uint64)) | _ODD
    at_once = max(VALUES_AT_ONCE // max(row_words, 1), 1)
    for first in range(0, rows, at_once):
        part = data[first : first + at_once]
        padded = np.zeros((len(part), row_words * _WORD_BYTES), np.uint8)
        padded[:, :row_bytes] = part
        sums: Words = (padded.view("<u8") * factors).sum(axis=1, dtype=np.uint64)
        yield draws(sums, np.zeros(1, np.uint64))


@lru_cache(maxsize=2)
def _noise(seed: int) -> Vectors:
    """Return noise that is even between -1 and 1, and goes on with its beginning; ranks of one process share it."""
    places: Words = np.arange(_NOISE_VALUES, dtype=np.uint64)
    even = (draws(_NOISE ^ np.uint64(seed), places) >> _HALF_BITS).astype(np.float64) * 2.0**-31 - 1.0
    once = even.astype(np.float32)
    return np.concatenate((once, once[:_WIDEST]))


def _places_in_noise(words: Words, sequence: Words) -> _Places:
    return (draws(words, sequence) % np.uint64(_NOISE_VALUES)).astype(np.int64)


def _stretches(noise: Vectors, width: int) -> Vectors:
    """Return every stretch of noise of that many numbers, `[starts, width]`, without a copy."""
    return np.lib.stride_tricks.sliding_window_view(noise, width)


def _with_previous(rows: Vectors, previous: Vectors, scale: np.float32) -> Vectors:
    """Return the rows of tokens with something of those before them, of which the first row may have none."""
    previous *= _PREVIOUS_WEIGHT
    rows[len(rows) - len(previous) :] += previous
    rows *= scale
    return rows


def _pairs(features: Words) -> Words:
    """Return a word for each two neighbours, which ends with how rare these are."""
    rarities = np.sqrt(rarity(features))
    rounded = np.rint(rarities[:-1] * rarities[1:] * float(_RARITY_BITS)).astype(np.uint64)
    return draws(features[:-1], features[1:]) & ~_RARITY_BITS | rounded


def _spread(marked: _Floats) -> Vectors:
    """Return the Hartley transform: orthogonal, its own inverse, and as cheap as Fourier's."""
    waves = np.fft.fft(marked, norm="ortho")
    spread: Vectors = (waves.real - waves.imag).astype(np.float32)
    return spread
