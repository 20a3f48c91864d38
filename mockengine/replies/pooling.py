# SPDX-License-Identifier: Apache-2.0
"""What a pooling model says of a prompt: embeddings, classes, scores. By the words alone, but such that they rank.

A prompt's embedding is made of its tokens, so texts that share words have a high cosine. Classes follow from the
embedding. A pair of texts is relevant if they share words. Shapes are those of vLLM's poolers.

Whatever may take long is computed in parts, so that others can be served in between.
"""

from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np

from mockengine.replies.asked import ReplyError
from mockengine.replies.hashing import Words, draws
from mockengine.replies.late_interaction import Queries
from mockengine.replies.vectors import (
    VALUES_AT_ONCE,
    Vectoriser,
    Vectors,
    dot_products,
    features_of_embeds,
    normalised,
    rarity,
)
from mockengine.wire.requests import EngineCoreRequest, MultiModalFeature
from mockengine.wire.sampling import LateInteractionParams, PoolingParams
from mockengine.wire.tensors import Tensor
from mockengine.wire.values import shown

MAX_VALUES: Final = 2**24
"""Numbers of one reply, 64 MB on the wire: those of every token of a long prompt could take any memory."""

# A token's numbers are computed all at once.
_MAX_COLUMNS: Final = 2**18

_LOGIT_SPREAD: Final = np.float32(2.0)
# Logits of a pair that shares nothing, what is added for one that shares everything, and what is drawn.
_LEAST_RELEVANCE: Final = -3.0
_RELEVANCE: Final = 10.0
_RELEVANCE_NOISE: Final = 0.25
# What a part costs besides its numbers, and each token of a text, as so many numbers.
_COST_OF_PART: Final = 2**16
_COST_OF_TOKEN: Final = 100
# What scoring tokens against those of a query costs at most.
_COST_OF_SCORING: Final = 2**19

_Parts: TypeAlias = Generator[None, None, Vectors]
"""Stops after each part that is computed; returns the values of the reply."""

TASKS: Final = ("embed", "classify", "score", "token_embed", "token_classify")
"""What can be asked; `score` is what older releases call `classify` with one label."""


class Pooling:
    """The reply to one pooling request, which is computed a part at a time.

    Attributes:
        cost: of each part, in numbers that are computed; a million takes some milliseconds.

    """

    def __init__(self, parts: _Parts, cost: int, forget: Callable[[], None]) -> None:
        """Begin nothing yet; `forget` is called if it is given up before that."""
        self.cost = cost
        self._parts = parts
        self._forget = forget
        self._is_begun = False

    def go_on(self) -> Tensor | None:
        """Compute the next part; return the `pooling_output`, float32, when that was the last one.

        Raises:
            ReplyError: it turns out that there is no reply.

        """
        self._is_begun = True
        try:
            next(self._parts)
        except StopIteration as end:
            values = np.asarray(end.value, "<f4", order="C")
            return Tensor("float32", values.shape, values.tobytes())
        return None

    def give_up(self) -> None:
        """Take note that nobody waits for it any more."""
        self._parts.close()
        if not self._is_begun:
            self._forget()


class Pooler:
    """Answers the pooling requests of one engine.

    The same prompt gets the same answer, but for a document that is scored against a query: that one must have come
    before, and the last few hundred are held.
    """

    def __init__(self, embedding_dim: int, num_labels: int, seed: int = 0) -> None:
        """Make a pooler.

        Args:
            embedding_dim: numbers of an embedding.
            num_labels: classes; with 1 the task `classify` says how relevant the two texts of a pair are to each other.
            seed: of the engine.

        """
        self._dim = embedding_dim
        self._num_labels = num_labels
        self._vectoriser = Vectoriser(embedding_dim, seed)
        self._label_vectors: Vectors | None = None
        self._queries = Queries(self._vectoriser)

    def ask(self, request: EngineCoreRequest) -> Pooling:
        """Return what will be the `pooling_output` of a pooling request, in the shape that its task has.

        | task | shape |
        |---|---|
        | `embed` | `[embedding_dim]`, or as many `dimensions` as are wanted |
        | `classify`, in older releases `score` | `[num_labels]` |
        | `token_embed` | `[tokens, embedding_dim]`, or `dimensions`; or `[chunks, embedding_dim]` |
        | `token_embed` for late interaction | `[]` |
        | `token_classify` | `[tokens, num_labels]`, or as many as `returned_token_ids` |

        Raises:
            ReplyError: an unknown task, dimensions that there are not, or more than `MAX_VALUES`.

        """
        params = request.pooling_params
        if params is None or params.task not in TASKS:
            task = None if params is None else params.task
            raise ReplyError(f"pooling_params.task: {shown(task)} is none of {', '.join(TASKS)}")
        if params.dimensions is not None and not 1 <= params.dimensions <= self._dim:
            raise ReplyError(
                f"dimensions: {params.dimensions} where embedding_dim of this engine allows 1 to {self._dim}"
            )
        late = params.late_interaction_params
        self._queries.check(late, params.task)
        width = 0 if late is not None else self._width_of_token(params)
        _check_size(request.num_prompt_tokens, width)
        parts, cost = self._compute(request, params), _cost(request.num_prompt_tokens, width, late)
        return Pooling(parts, cost, lambda: self._queries.given_up(late))

    def _compute(self, request: EngineCoreRequest, params: PoolingParams) -> _Parts:
        features = yield from _features(request)
        match params.task:
            case "embed":
                return self._embed(features, params)
            case "token_embed":
                return (yield from self._token_embed(features, params))
            case "token_classify":
                return (yield from self._token_classify(features, params))
        return self._classify(features, params)

    def _width_of_token(self, params: PoolingParams) -> int:
        """Return how many numbers there are for each token; 0 for none."""
        match params.task:
            case "token_embed":
                return params.dimensions or self._dim
            case "token_classify":
                return len(params.returned_token_ids or ()) or self._num_labels
        return 0

    # Texts.

    def _embed(self, features: Words, params: PoolingParams) -> Vectors:
        """Return the embedding of a text with a feature for each token."""
        return _finished(self._vectoriser.text(features), params)

    def _classify(self, features: Words, params: PoolingParams) -> Vectors:
        """Return probabilities of labels, or their logits."""
        if self._label_vectors is None:
            self._label_vectors = self._vectoriser.labels(self._num_labels)
        embedding = normalised(self._vectoriser.text(features))
        # As spread out as those of a model, whatever the number of dimensions.
        logits = dot_products(embedding[None], self._label_vectors)[0] * _LOGIT_SPREAD * np.sqrt(np.float32(self._dim))
        if self._num_labels == 1:
            relevance = _RELEVANCE * self._relevance(features, params)
            logits = np.float32(_LEAST_RELEVANCE + relevance) + np.float32(_RELEVANCE_NOISE) * logits
        return _activated(logits, params)

    def _relevance(self, features: Words, params: PoolingParams) -> float:
        """Return how much the two texts of a prompt share, 0 for nothing and 1 for everything.

        Where the second begins is known if the tokenizer tells. Otherwise a word that comes twice may be in both.
        """
        start = params.compressed_token_type_ids
        if start is not None and 0 < start < features.size:
            first, second = (normalised(self._vectoriser.text(part)) for part in (features[:start], features[start:]))
            return float(first @ second)
        tokens, counts = np.unique(features, return_counts=True)
        weights = rarity(tokens)
        return float(weights[counts > 1].sum() / max(weights.sum(), np.finfo(np.float64).tiny))

    # Tokens.

    def _token_embed(self, features: Words, params: PoolingParams) -> _Parts:
        """Return the embeddings of tokens, or what late interaction or late chunking makes of them."""
        if params.late_interaction_params is not None:
            return (yield from self._queries.answer(features, params.late_interaction_params))
        if params.late_chunk_size is not None:
            return (yield from self._chunks(features, params, params.late_chunk_size))
        values = np.empty((features.size, self._width_of_token(params)), np.float32)
        for place, rows in self._vectoriser.tokens(features):
            values[place] = _finished(rows, params)
            yield
        return _at_steps(values, features, params)

    def _chunks(self, features: Words, params: PoolingParams, chunk_size: int) -> _Parts:
        """Return the means of the embeddings of so many tokens each, of fewer at the end."""
        chunk_size = max(1, min(chunk_size, features.size))
        sums = np.zeros((-(-features.size // chunk_size), self._dim), np.float32)
        for place, rows in self._vectoriser.tokens(features):
            chunks, firsts = np.unique(np.arange(place.start, place.stop) // chunk_size, return_index=True)
            sums[chunks] += np.add.reduceat(rows, firsts)
            yield
        starts = np.arange(len(sums)) * chunk_size
        lengths = np.minimum(features.size - starts, chunk_size).astype(np.float32)
        return _finished(sums / lengths[:, None], params)

    def _token_classify(self, features: Words, params: PoolingParams) -> _Parts:
        """Return probabilities of labels, or their logits, for each token."""
        logits = np.empty((features.size, self._width_of_token(params)), np.float32)
        if params.returned_token_ids:
            scores = self._vectoriser.token_scores_of(features, np.array(params.returned_token_ids, np.uint64))
        else:
            scores = self._vectoriser.token_scores(features, self._num_labels)
        for place, rows in scores:
            logits[place] = _activated(_LOGIT_SPREAD * rows, params)
            yield
        return _at_steps(logits, features, params)


def _features(request: EngineCoreRequest) -> Generator[None, None, Words]:
    """Return a feature for each token of a prompt: the token's id, or a hash of its embedding or of its image."""
    if request.prompt_token_ids is not None:
        features = np.frombuffer(request.prompt_token_ids, np.uint32).astype(np.uint64)
    else:
        parts = [np.zeros(0, np.uint64)]
        for part in features_of_embeds(request.prompt_embeds) if request.prompt_embeds is not None else ():
            parts.append(part)
            yield
        features = np.concatenate(parts)
    _tell_images_apart(features, request.mm_features)
    return features


def _tell_images_apart(features: Words, images: Sequence[MultiModalFeature]) -> None:
    """Give placeholders, which are alike whatever they stand for, features of what they stand for."""
    end = 0
    for image in sorted(images, key=lambda each: each.offset):
        # One that claims what is another's already gets what is left.
        first, end = max(image.offset, end), min(max(image.offset + image.length, end), features.size)
        if first < end:
            name = blake2b(image.identifier.encode(), digest_size=8).digest()
            places: Words = np.arange(end - first, dtype=np.uint64)
            features[first:end] = draws(np.frombuffer(name, np.uint64), places)


def _finished(vectors: Vectors, params: PoolingParams) -> Vectors:
    """Cut vectors to the dimensions that are wanted, and make their length 1 unless it is not wanted."""
    wanted = vectors[..., : params.dimensions]
    return wanted if params.use_activation is False else normalised(wanted)


def _activated(logits: Vectors, params: PoolingParams) -> Vectors:
    """Make probabilities of logits unless it is not wanted; a single label has one of its own."""
    if params.use_activation is False:
        return logits
    if logits.shape[-1] == 1:
        single: Vectors = np.reciprocal(1 + np.exp(-logits))
        return single
    likely = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
    probabilities: Vectors = likely / likely.sum(axis=-1, keepdims=True)
    return probabilities


def _at_steps(values: Vectors, features: Words, params: PoolingParams) -> Vectors:
    """Keep the rows of the tokens that mark a step, if there are such."""
    return values if params.step_tag_id is None else values[features == np.uint64(params.step_tag_id)]


def _cost(num_tokens: int, width: int, late: LateInteractionParams | None) -> int:
    """Return what each part of a reply costs, in numbers that are computed."""
    if late is not None:
        return _COST_OF_PART + _COST_OF_SCORING
    return _COST_OF_PART + (VALUES_AT_ONCE if width else num_tokens * _COST_OF_TOKEN)


def _check_size(rows: int, width: int) -> None:
    if width > _MAX_COLUMNS:
        raise ReplyError(f"returned_token_ids: {width} of them where at most {_MAX_COLUMNS} are scored (ask for fewer)")
    if rows * width > MAX_VALUES:
        raise ReplyError(
            f"{rows} tokens with {width} numbers each are {rows * width} numbers where at most {MAX_VALUES} are made "
            "(send a shorter prompt)"
        )
