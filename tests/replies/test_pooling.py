# SPDX-License-Identifier: Apache-2.0
"""Pooling: shapes of vLLM's poolers, and numbers that rank texts by what they share."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.asked import ReplyError
from mockengine.replies.pooling import MAX_VALUES, Pooler, Pooling
from mockengine.replies.vectors import MOST_TOKENS, VALUES_AT_ONCE, Vectors
from mockengine.wire.requests import EngineCoreRequest, MultiModalFeature
from mockengine.wire.sampling import PoolingParams
from mockengine.wire.tensors import Tensor
from tests.wire.forms import SEARCH

DIM = 256
POOLER = Pooler(DIM, 3)
PAIRS = Pooler(DIM, 1)
RNG = np.random.default_rng(0)
TEXT = RNG.integers(1_000, 32_000, 24).tolist()
OTHER = RNG.integers(1_000, 32_000, 24).tolist()
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


def request(tokens: list[int], task: str | None = "embed", **params: Any) -> EngineCoreRequest:
    asked = {"use_activation": True, "dimensions": None, **params}
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=array("I", tokens), pooling_params=PoolingParams(task, **asked)
    )


def answer(asked: EngineCoreRequest, pooler: Pooler = POOLER) -> Vectors:
    """Compute an answer to its end."""
    tensor, _ = computed(pooler.ask(asked))
    assert tensor.dtype == "float32"
    return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)


def computed(pooling: Pooling) -> tuple[Tensor, int]:
    """Return a reply and the number of its parts."""
    parts = 1
    while (tensor := pooling.go_on()) is None:
        parts += 1
    return tensor, parts


def pooled(tokens: list[int], task: str = "embed", pooler: Pooler = POOLER, **params: Any) -> Vectors:
    return answer(request(tokens, task, **params), pooler)


def cosine(one: list[int], other: list[int], **params: Any) -> float:
    return float(pooled(one, **params) @ pooled(other, **params))


@SEARCH
@given(tokens=TOKENS, dim=st.integers(3, 300), seed=st.integers(0, 2**64 - 1))
def test_embeddings_have_length_one_and_come_again(tokens: list[int], dim: int, seed: int) -> None:
    pooler = Pooler(dim, 2, seed)
    vector = pooled(tokens, pooler=pooler)
    assert vector.shape == (dim,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(vector, pooled(tokens, pooler=Pooler(dim, 2, seed)))


def test_embedding_fills_all_of_its_dimensions() -> None:
    vector = pooled([5])
    assert np.count_nonzero(vector) == DIM
    assert np.abs(vector).max() < 0.5


def test_another_seed_makes_another_embedding() -> None:
    assert abs(float(pooled(TEXT) @ pooled(TEXT, pooler=Pooler(DIM, 3, seed=1)))) < 0.3


def test_order_matters_a_little() -> None:
    shuffled = np.random.default_rng(5).permutation(TEXT).tolist()
    assert 0.8 < cosine(TEXT, shuffled) < 0.99


def test_one_changed_word_leaves_texts_close() -> None:
    assert 0.9 < cosine(TEXT, [*TEXT[:10], 31_337, *TEXT[11:]]) < 0.999


def test_more_shared_words_are_closer() -> None:
    cosines = [cosine(TEXT, TEXT[:kept] + OTHER[kept:]) for kept in range(0, 25, 4)]
    assert cosines == sorted(cosines)
    assert cosines[-1] == pytest.approx(1)


@pytest.mark.parametrize("dim", [128, 384, 1024, 4096])
def test_texts_that_share_nothing_are_far_apart(dim: int) -> None:
    pooler, rng = Pooler(dim, 1), np.random.default_rng(dim)
    texts = np.stack([pooled(rng.integers(1_000, 32_000, 20).tolist(), pooler=pooler) for _ in range(40)])
    apart = (texts @ texts.T)[np.triu_indices(40, 1)]
    assert np.abs(apart).max() < 6 / np.sqrt(dim)
    assert apart.mean() == pytest.approx(0, abs=0.02)


def test_prefix_is_closer_than_what_follows_nothing_of_it() -> None:
    assert cosine(TEXT, TEXT[:12]) > 0.6
    assert cosine(TEXT, TEXT[:12]) > cosine(TEXT, TEXT[:4]) > cosine(TEXT, OTHER)


def test_document_with_the_querys_words_ranks_first() -> None:
    query = TEXT[:5]
    documents = [OTHER, OTHER[:12] + query[:2], OTHER[:9] + query + OTHER[9:12], OTHER[:6] + query]
    assert int(np.argmax([cosine(query, document) for document in documents])) == 3
    assert int(np.argmin([cosine(query, document) for document in documents])) == 0


def test_special_tokens_around_texts_do_not_make_them_alike() -> None:
    def wrapped(text: list[int]) -> list[int]:
        return [1, 3, 3, 3, *text, 2, 2]

    assert cosine(wrapped(TEXT[:6]), wrapped(OTHER[:6])) < 0.3
    assert cosine(wrapped(TEXT), TEXT) > 0.9


def test_one_repeated_word_does_not_drown_the_others() -> None:
    assert cosine(TEXT, TEXT + 100 * [TEXT[0]]) > 0.6


@pytest.mark.parametrize("dimensions", [1, 64, DIM])
def test_dimensions_are_the_leading_ones_made_long_again(dimensions: int) -> None:
    whole, cut = pooled(TEXT)[:dimensions], pooled(TEXT, dimensions=dimensions)
    assert cut == pytest.approx(whole / np.linalg.norm(whole), abs=1e-5)


def test_fewer_dimensions_rank_alike() -> None:
    assert cosine(TEXT, TEXT[:16], dimensions=128) == pytest.approx(cosine(TEXT, TEXT[:16]), abs=0.15)


def test_vector_that_is_not_normalised_is_longer_for_a_longer_text() -> None:
    raw = pooled(TEXT, use_activation=False)
    assert np.linalg.norm(raw) > 1.5 * np.linalg.norm(pooled(TEXT[:3], use_activation=False))
    assert raw / np.linalg.norm(raw) == pytest.approx(pooled(TEXT), abs=1e-6)


def test_unset_activation_means_the_poolers_default() -> None:
    assert np.array_equal(pooled(TEXT, use_activation=None), pooled(TEXT))


def test_classes_are_probabilities_and_their_logits() -> None:
    likely, logits = pooled(TEXT, "classify"), pooled(TEXT, "classify", use_activation=False)
    assert likely.shape == logits.shape == (3,)
    assert likely.sum() == pytest.approx(1, abs=1e-6)
    assert np.exp(logits) / np.exp(logits).sum() == pytest.approx(likely, abs=1e-6)


@pytest.mark.parametrize("dim", [64, 4096])
def test_texts_fall_into_all_classes_and_similar_ones_into_the_same(dim: int) -> None:
    pooler, rng, same = Pooler(dim, 3), np.random.default_rng(1), 0
    labels = []
    for _ in range(150):
        text = rng.integers(0, 32_000, 20).tolist()
        labels.append(int(pooled(text, "classify", pooler).argmax()))
        same += labels[-1] == pooled([*text[:-1], 77], "classify", pooler).argmax()
    assert min(np.bincount(labels, minlength=3)) > 25
    assert same > 115


def test_single_label_is_one_number_of_its_own() -> None:
    likely, logit = pooled(TEXT, "classify", PAIRS), pooled(TEXT, "classify", PAIRS, use_activation=False)
    assert likely.shape == logit.shape == (1,)
    assert likely == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)


@pytest.mark.parametrize("told", [False, True], ids=["one text", "second text's place told"])
def test_pairs_rank_by_what_query_and_document_share(told: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    query = TEXT[:6]
    documents = [OTHER, OTHER[:15] + query[:2], OTHER[:8] + query]
    place = len(query) if told else None
    scores = [
        float(pooled(query + document, "classify", PAIRS, compressed_token_type_ids=place)[0]) for document in documents
    ]
    assert scores == sorted(scores)
    assert scores[0] < 0.2
    assert 0.4 < scores[-1] <= 1


@pytest.mark.parametrize("place", [0, 24, 10_000])
def test_place_outside_of_the_prompt_is_as_good_as_none(place: int) -> None:
    without = pooled(TEXT, "classify", PAIRS)
    assert np.array_equal(pooled(TEXT, "classify", PAIRS, compressed_token_type_ids=place), without)


def test_every_token_has_an_embedding_of_its_own_and_of_the_one_before() -> None:
    rows = pooled([5, 6, 5, 6, 5], "token_embed")
    assert rows.shape == (5, DIM)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert np.array_equal(rows[1], rows[3])
    assert 0.8 < rows[0] @ rows[2] < 0.99
    assert abs(rows[0] @ rows[1]) < 0.5


def test_token_embeddings_do_not_depend_on_how_many_are_made_at_once() -> None:
    long = np.random.default_rng(3).integers(0, 32_000, 3_000).tolist()
    rows = pooled(long, "token_embed")
    assert np.array_equal(pooled(long[2_000:2_010], "token_embed")[1:], rows[2_001:2_010])
    assert np.array_equal(pooled(long[1_000:1_030], "token_embed")[1:], rows[1_001:1_030])


@pytest.mark.parametrize("dimensions", [16, DIM])
def test_token_embeddings_honour_dimensions(dimensions: int) -> None:
    rows, whole = pooled(TEXT, "token_embed", dimensions=dimensions), pooled(TEXT, "token_embed")
    assert rows.shape == (24, dimensions)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(24), abs=1e-5)
    assert rows[3] @ whole[3, :dimensions] > 0


def test_every_token_has_classes() -> None:
    rows = pooled(TEXT, "token_classify")
    assert rows.shape == (24, 3)
    assert rows.sum(axis=1) == pytest.approx(np.ones(24), abs=1e-5)
    logits = pooled(TEXT, "token_classify", use_activation=False)
    assert np.array_equal(logits.argmax(axis=1), rows.argmax(axis=1))
    assert logits.std() == pytest.approx(2, abs=0.7)


def test_steps_keep_the_rows_of_their_token_and_the_columns_that_are_wanted() -> None:
    tokens = [5, 12, 6, 7, 12]
    rows = pooled(tokens, "token_classify", step_tag_id=12, returned_token_ids=(648, 387))
    assert rows.shape == (2, 2)
    assert rows.sum(axis=1) == pytest.approx(np.ones(2), abs=1e-5)
    assert np.array_equal(rows, pooled(tokens, "token_classify", returned_token_ids=(648, 387))[[1, 4]])
    assert pooled(tokens, "token_embed", step_tag_id=99).shape == (0, DIM)


@pytest.mark.parametrize("chunk_size", [1, 3, 24, 10_000])
def test_late_chunks_are_the_means_of_their_tokens(chunk_size: int) -> None:
    rows = pooled(TEXT, "token_embed", use_activation=False)
    means = [rows[first : first + chunk_size].mean(axis=0) for first in range(0, 24, chunk_size)]
    chunks = pooled(TEXT, "token_embed", use_activation=False, late_chunk_size=chunk_size)
    assert chunks == pytest.approx(np.stack(means), abs=1e-6)
    unit = pooled(TEXT, "token_embed", late_chunk_size=chunk_size)
    assert unit == pytest.approx(chunks / np.linalg.norm(chunks, axis=1)[:, None], abs=1e-5)


def test_chunks_do_not_depend_on_how_many_tokens_are_computed_at_once() -> None:
    long = np.random.default_rng(3).integers(0, 32_000, 3_000).tolist()
    rows = pooled(long, "token_embed", use_activation=False)
    chunks = pooled(long, "token_embed", use_activation=False, late_chunk_size=700)
    means = np.stack([rows[first : first + 700].mean(axis=0) for first in range(0, 3_000, 700)])
    assert chunks == pytest.approx(means, abs=1e-5)


# What takes long is computed in parts.


@pytest.mark.parametrize("task", ["token_embed", "token_classify"])
def test_no_part_has_many_more_numbers_than_are_computed_at_once(task: str) -> None:
    pooler = Pooler(DIM, 300)
    width = DIM if task == "token_embed" else 300
    _, parts = computed(pooler.ask(request([5, 6] * 4_000, task)))
    assert 8_000 * width / VALUES_AT_ONCE <= parts <= 8_000 * width / VALUES_AT_ONCE + 3


def test_what_a_part_costs_follows_from_the_length_of_a_text_that_is_computed_at_once() -> None:
    short, long = (POOLER.ask(request([5] * count)) for count in (10, 50_000))
    assert long.cost > 20 * short.cost
    assert POOLER.ask(request([5] * 50_000, "token_embed")).cost < 3 * short.cost


def test_what_a_very_long_text_says_at_its_end_does_not_count() -> None:
    text = np.random.default_rng(6).integers(0, 32_000, MOST_TOKENS).tolist()
    assert np.array_equal(pooled(text), pooled([*text, *OTHER]))


# What cannot be answered.


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(TEXT, "plugin"), "task: str 'plugin' is none of embed, classify, score, token_embed, token_classify"),
        (request(TEXT, None), "task: nil is none of"),
        (EngineCoreRequest(request_id="r", prompt_token_ids=array("I", [1])), "task: nil is none of"),
        (request(TEXT, dimensions=0), "dimensions: 0 where embedding_dim of this engine allows 1 to 256"),
        (request(TEXT, "token_embed", dimensions=DIM + 1), "dimensions: 257 where"),
        (request([1] * (MAX_VALUES // DIM + 1), "token_embed"), "send a shorter prompt"),
        (request(TEXT * 200, "token_classify", returned_token_ids=(1,) * (MAX_VALUES // 4_800 + 1)), "send a shorter"),
        (request([1], "token_classify", returned_token_ids=(1,) * 2**19), "returned_token_ids: 524288 of them where"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(asked: EngineCoreRequest, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        POOLER.ask(asked)


# Prompts that are more than token ids.


def embeds(rows: np.ndarray[Any, np.dtype[np.uint16]]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_embeds=Tensor("bfloat16", rows.shape, rows.tobytes()),
        pooling_params=PoolingParams("embed", use_activation=True, dimensions=None),
    )


@pytest.mark.parametrize("width", [1, 3, 64])
def test_prompts_of_embeddings_that_share_rows_are_close(width: int) -> None:
    rows = np.random.default_rng(width).integers(0, 2**16, (20, width)).astype(np.uint16)
    mine = answer(embeds(rows))
    shared = np.concatenate((rows[:15], rows[:5] ^ np.uint16(1)))
    assert np.array_equal(mine, answer(embeds(rows.copy())))
    assert 0.5 < mine @ answer(embeds(shared)) < 0.95
    assert abs(mine @ answer(embeds(rows ^ np.uint16(1)))) < 0.3


def test_many_embeddings_are_read_in_parts() -> None:
    rows = np.random.default_rng(1).integers(0, 2**16, (5_000, 128)).astype(np.uint16)
    tensor, parts = computed(POOLER.ask(embeds(rows)))
    assert parts > 2
    assert tensor.shape == (DIM,)


def image(identifier: str, offset: int = 4, length: int = 8) -> MultiModalFeature:
    return MultiModalFeature("image", identifier, offset, length, mm_hash=None, has_data=True)


def seen(*images: MultiModalFeature, task: str = "embed") -> Vectors:
    return answer(replace(request(TEXT[:4] + [5] * 8 + TEXT[4:], task), mm_features=images))


def test_images_behind_the_same_placeholders_are_told_apart() -> None:
    assert np.array_equal(seen(image("a")), seen(image("a")))
    assert seen(image("a")) @ seen(image("b")) < 0.9
    assert seen(image("a")) @ seen(image("b")) > 0.3, "the text is the same"
    rows, others = seen(image("a"), task="token_embed"), seen(image("b"), task="token_embed")
    assert np.array_equal(rows[:4], others[:4])
    assert abs(rows[6] @ others[6]) < 0.5
    assert abs(rows[6] @ rows[7]) < 0.5


@pytest.mark.parametrize(
    "images",
    [
        (image("a", 2**63, 2**63),),
        (image("a", 0, 2**64 - 1), image("b", 0, 2**64 - 1)),
        (image("a", 4, 0), image("b", 31, 50)),
    ],
)
def test_images_may_claim_any_places(images: tuple[MultiModalFeature, ...]) -> None:
    assert seen(*images).shape == (DIM,)


def test_empty_prompt_breaks_nothing() -> None:
    assert pooled([]).shape == (DIM,)
    assert pooled([], "token_embed").shape == (0, DIM)
    assert pooled([], "token_embed", late_chunk_size=5).shape == (0, DIM)
    assert pooled([], "token_classify").shape == (0, 3)
    assert pooled([], "classify").shape == (3,)
    assert answer(embeds(np.zeros((0, 4), np.uint16))).shape == (DIM,)
