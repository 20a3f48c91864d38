# SPDX-License-Identifier: Apache-2.0
"""Log probabilities: one distribution for each position, whatever is asked of it and however."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.logprobs import (
    ALL,
    MAX_SCORES,
    SamplingLimits,
    ScoredTokens,
    TokenScorer,
    sampling_limits,
)
from mockengine.replies.random import RandomTokens
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.sampling import SamplingParams
from tests.wire.forms import SEARCH

VOCAB = 32_000
SCORER = TokenScorer(VOCAB)
SMALL = TokenScorer(97)
MANY = 40_000
"""Positions that statistics are made over; keys are fixed, so none of them ever flakes."""

KEYS = st.integers(0, 2**64 - 1)


def scored(
    key: int,
    start: int,
    tokens: list[int],
    num_logprobs: int,
    scorer: TokenScorer = SCORER,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
) -> ScoredTokens:
    """Score the tokens of one reply; the result has one row for each."""
    scores = scorer.sampled(
        np.array([key], np.uint64),
        np.array([start], np.int64),
        np.array([tokens], np.uint32),
        num_logprobs,
        SamplingLimits(np.array([top_k], np.int64), np.array([top_p])),
    )
    return ScoredTokens(scores.token_ids[0], scores.logprobs[0], scores.ranks[0])


def long_reply(num_logprobs: int, *, top_k: int = 0, top_p: float = 1.0) -> ScoredTokens:
    return scored(7, 0, RandomTokens(Vocabulary(VOCAB)).tokens(7, 0, MANY), num_logprobs, top_k=top_k, top_p=top_p)


def equal(one: ScoredTokens, other: ScoredTokens) -> bool:
    parts = ("token_ids", "logprobs", "ranks")
    return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in parts)


def probabilities(scores: ScoredTokens) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.exp(scores.logprobs.astype(np.float64))


@SEARCH
@given(key=KEYS, position=st.integers(0, 2**40), vocab_size=st.integers(1, 300), data=st.data())
def test_whole_vocabulary_is_a_distribution_with_each_token_once(
    key: int, position: int, vocab_size: int, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, vocab_size - 1))
    scores = scored(key, position, [token], ALL, TokenScorer(vocab_size))
    assert scores.token_ids.shape == scores.logprobs.shape == (1, vocab_size + 1)
    ids, logprobs, rank = scores.token_ids[0], scores.logprobs[0], int(scores.ranks[0])
    assert sorted(ids[1:].tolist()) == list(range(vocab_size))
    assert np.all(np.diff(logprobs[1:]) < 0)
    assert np.exp(logprobs[1:].astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)
    assert ids[0] == ids[rank] == token
    assert logprobs[0] == logprobs[rank]


def test_real_vocabulary_is_a_distribution_too() -> None:
    scores = scored(1, 5, [128_255], ALL, TokenScorer(128_256))
    assert probabilities(scores)[0, 1:].sum() == pytest.approx(1, abs=1e-6)
    assert len(set(scores.token_ids[0, 1:].tolist())) == 128_256
    assert np.all(np.diff(scores.logprobs[0, 1:]) < 0)


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20, 500])
def test_shapes_and_types_are_vllms(num_logprobs: int) -> None:
    scores = SCORER.sampled(
        np.arange(3, dtype=np.uint64), np.zeros(3, np.int64), np.zeros((3, 2), np.uint32), num_logprobs
    )
    parts = (scores.token_ids, scores.logprobs, scores.ranks)
    assert [part.dtype.str for part in parts] == ["<i4", "<f4", "<i4"]
    assert [part.shape for part in parts] == [(3, 2, num_logprobs + 1), (3, 2, num_logprobs + 1), (3, 2)]
    assert SCORER.columns(num_logprobs) == num_logprobs + 1


@pytest.mark.parametrize("num_logprobs", [97, 98, 10_000, ALL, -7])
def test_no_more_than_the_vocabulary_is_said(num_logprobs: int) -> None:
    assert equal(scored(3, 4, [5], num_logprobs, SMALL), scored(3, 4, [5], 97, SMALL))
    assert SMALL.columns(num_logprobs) == 98


@SEARCH
@given(key=KEYS, token=st.integers(0, VOCAB - 1), fewer=st.integers(0, 20))
def test_fewer_logprobs_are_the_first_of_more(key: int, token: int, fewer: int) -> None:
    few, many = scored(key, 0, [token], fewer), scored(key, 0, [token], 20)
    first = ScoredTokens(many.token_ids[:, : fewer + 1], many.logprobs[:, : fewer + 1], many.ranks)
    assert equal(few, first)


@SEARCH
@given(key=KEYS, token=st.integers(0, 96), asked=st.lists(st.integers(0, 96), min_size=1, max_size=8))
def test_tokens_asked_for_have_the_probabilities_that_the_whole_vocabulary_says(
    key: int, token: int, asked: list[int]
) -> None:
    whole = scored(key, 9, [token], ALL, SMALL)
    by_token = dict(zip(whole.token_ids[0].tolist(), whole.logprobs[0].tolist(), strict=True))
    among = SMALL.sampled_among(
        np.array([key], np.uint64), np.array([9], np.int64), np.array([[token]], np.uint32), np.array(asked)
    )
    assert among.token_ids[0, 0].tolist() == [token, *asked]
    assert among.logprobs[0, 0].tolist() == [by_token[asked_id] for asked_id in [token, *asked]]
    assert among.ranks[0, 0] == whole.ranks[0]


def test_each_request_may_ask_for_tokens_of_its_own() -> None:
    keys, starts = np.array([1, 2], np.uint64), np.array([0, 3], np.int64)
    tokens, asked = np.array([[4, 5], [6, 7]], np.uint32), np.array([[8, 9], [10, 11]])
    both = SCORER.sampled_among(keys, starts, tokens, asked)
    for row in range(2):
        one = slice(row, row + 1)
        alone = SCORER.sampled_among(keys[one], starts[one], tokens[one], asked[row])
        assert np.array_equal(both.token_ids[one], alone.token_ids)
        assert np.array_equal(both.logprobs[one], alone.logprobs)


def test_tokens_asked_for_by_many_requests_stay_with_theirs() -> None:
    rng = np.random.default_rng(0)
    keys, tokens = rng.integers(0, 2**64, 30_000, np.uint64), rng.integers(0, VOCAB, (30_000, 1)).astype(np.uint32)
    asked = rng.integers(0, VOCAB, (30_000, 10))
    together = SCORER.sampled_among(keys, np.zeros(30_000, np.int64), tokens, asked)
    assert np.array_equal(together.token_ids[:, 0, 1:], asked)
    last = SCORER.sampled_among(keys[-1:], np.zeros(1, np.int64), tokens[-1:], asked[-1:])
    assert np.array_equal(together.logprobs[-1:], last.logprobs)


@SEARCH
@given(key=KEYS, cut=st.integers(0, 30), num_logprobs=st.integers(0, 6))
def test_chunks_score_as_the_whole_reply_does(key: int, cut: int, num_logprobs: int) -> None:
    tokens = RandomTokens(Vocabulary(VOCAB)).tokens(key, 0, 30)
    whole = scored(key, 0, tokens, num_logprobs)
    parts = [scored(key, 0, tokens[:cut], num_logprobs), scored(key, cut, tokens[cut:], num_logprobs)]
    joined = ScoredTokens(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
    assert equal(joined, whole)


def test_neither_company_nor_order_nor_amount_matters() -> None:
    """5 000 rows are scored in several parts; those of one request are what it gets alone."""
    rng = np.random.default_rng(0)
    keys, starts = rng.integers(0, 2**64, 5_000, np.uint64), rng.integers(0, 1_000, 5_000)
    tokens = rng.integers(0, VOCAB, (5_000, 1)).astype(np.uint32)
    together, shuffled = SCORER.sampled(keys, starts, tokens, 60), rng.permutation(5_000)
    again = SCORER.sampled(keys[shuffled], starts[shuffled], tokens[shuffled], 60)
    assert np.array_equal(together.token_ids[shuffled], again.token_ids)
    assert np.array_equal(together.logprobs[shuffled], again.logprobs)
    for row in (0, 2_500, 4_999):
        alone = scored(int(keys[row]), int(starts[row]), tokens[row].tolist(), 60)
        assert np.array_equal(alone.logprobs, together.logprobs[row])
        assert np.array_equal(alone.token_ids, together.token_ids[row])


def test_ranks_occur_as_often_as_they_are_likely() -> None:
    scores = long_reply(20)
    expected = probabilities(scores)[:, 1:].sum(axis=0)
    counts = np.bincount(np.minimum(scores.ranks, 21), minlength=22)[1:]
    expected = np.append(expected, MANY - expected.sum())
    # Chi-square with 20 degrees of freedom exceeds 45.3 once in a thousand. The sum of many positions that differ in
    # what they expect varies less than that of equal ones.
    assert ((counts - expected) ** 2 / expected).sum() < 45.3
    assert scores.ranks.max() > 1_000


def test_sure_positions_take_their_first_rank_more_often_than_unsure_ones() -> None:
    scores = long_reply(1)
    first = probabilities(scores)[:, 1]
    for low, high in ((0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.0)):
        within = (first >= low) & (first < high)
        assert within.sum() > 1_000
        assert (scores.ranks[within] == 1).mean() == pytest.approx(first[within].mean(), abs=0.03)


def test_numbers_look_like_a_models() -> None:
    scores = long_reply(5)
    means = scores.logprobs.mean(axis=0)
    assert -1.5 < means[0] < -0.8
    assert -0.6 < means[1] < -0.2
    assert np.all(scores.logprobs <= 0)
    assert np.all(scores.logprobs > -30)


def test_likely_tokens_are_any_tokens_and_differ_from_place_to_place() -> None:
    ids = long_reply(2).token_ids[:, 1:]
    counts = np.bincount(ids.reshape(-1) // (VOCAB // 10), minlength=10)
    # Chi-square with 9 degrees of freedom exceeds 27.9 once in a thousand.
    assert ((counts - 2 * MANY / 10) ** 2 / (2 * MANY / 10)).sum() < 27.9
    assert len(np.unique(ids[:, 0])) > 20_000


def test_greedy_sampler_takes_the_first_rank() -> None:
    top_k, top_p = sampling_limits(SamplingParams(temperature=0.0, top_k=50, top_p=0.5))
    scores = long_reply(1, top_k=top_k, top_p=top_p)
    assert np.all(scores.ranks == 1)
    assert np.array_equal(scores.token_ids[:, 0], scores.token_ids[:, 1])


def test_top_k_sampler_takes_no_rank_beyond() -> None:
    scores = long_reply(3, top_k=3)
    probability = probabilities(scores)[:, 1:]
    expected = (probability / probability.sum(axis=1, keepdims=True)).sum(axis=0)
    counts = np.bincount(scores.ranks, minlength=4)[1:]
    assert counts.sum() == counts[:3].sum() == MANY
    # Chi-square with 2 degrees of freedom exceeds 13.8 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 13.8


def test_top_p_sampler_takes_ranks_until_they_have_the_probability() -> None:
    scores = long_reply(50, top_p=0.9)
    before = np.cumsum(probabilities(scores)[:, 1:], axis=1) - probabilities(scores)[:, 1:]
    within = scores.ranks <= 50
    assert within.mean() > 0.99
    assert np.all(before[within, scores.ranks[within] - 1] < 0.9)
    assert scores.ranks.max() > 5


def test_limits_change_nothing_but_the_rank_that_is_taken() -> None:
    free, limited = long_reply(3), long_reply(3, top_k=5)
    assert np.array_equal(free.logprobs[:, 1:], limited.logprobs[:, 1:])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), (0, 1.0)),
        (SamplingParams(top_k=-1), (0, 1.0)),
        (SamplingParams(top_k=2**64 - 1), (2**31 - 1, 1.0)),
        (SamplingParams(top_k=20, top_p=0.8, temperature=0.7), (20, 0.8)),
        (SamplingParams(top_p=0.0), (0, 1.0)),
        (SamplingParams(top_p=float("nan")), (0, 1.0)),
        (SamplingParams(temperature=0.0, top_k=20), (1, 1.0)),
    ],
)
def test_limits_follow_from_what_the_client_asked(params: SamplingParams, expected: tuple[int, float]) -> None:
    assert sampling_limits(params) == expected


@pytest.mark.parametrize("token", [97, 200, 2**31 - 1, 2**32 - 1])
def test_token_beyond_the_vocabulary_is_scored_like_any_other(token: int) -> None:
    said = min(token, 2**31 - 1)
    for key in range(40):
        scores = scored(key, 0, [token], ALL, SMALL)
        assert scores.token_ids[0, 0] == scores.token_ids[0, scores.ranks[0]] == said
        assert scores.token_ids.min() >= 0
        assert len(set(scores.token_ids[0, 1:].tolist())) == 97


def test_key_and_position_make_the_distribution() -> None:
    first = scored(1, 0, [5], 5)
    assert equal(first, scored(1, 0, [5], 5))
    assert not equal(first, scored(2, 0, [5], 5))
    assert not equal(first, scored(1, 1, [5], 5))


PROMPT = np.array([5, 9, 2, 31_999, 0, 7, 7, 7], np.uint32)


def test_prompt_has_a_row_for_each_token_but_the_first() -> None:
    scores = SCORER.prompt(PROMPT, 4)
    assert (scores.token_ids.shape, scores.logprobs.shape, scores.ranks.shape) == ((7, 5), (7, 5), (7,))
    assert np.array_equal(scores.token_ids[:, 0], PROMPT[1:])
    assert np.all(np.diff(scores.logprobs[:, 1:], axis=1) < 0)
    assert SCORER.prompt(PROMPT[:1], 4).token_ids.shape == (0, 5)


def test_prompts_that_begin_alike_score_alike_so_far() -> None:
    other = np.concatenate((PROMPT[:5], [1, 2])).astype(np.uint32)
    mine, others = SCORER.prompt(PROMPT, 3), SCORER.prompt(other, 3)
    assert np.array_equal(mine.logprobs[:4], others.logprobs[:4])
    assert np.array_equal(mine.token_ids[:4], others.token_ids[:4])
    assert not np.array_equal(mine.logprobs[4:6], others.logprobs[4:6])
    # The same token in another place is as likely as the place has it.
    assert len(set(mine.logprobs[-2:, 0].tolist())) == 2


def test_every_token_before_it_matters_to_a_tokens_scores() -> None:
    other = np.concatenate(([6], PROMPT[1:])).astype(np.uint32)
    assert not np.any(np.all(SCORER.prompt(PROMPT, 3).logprobs == SCORER.prompt(other, 3).logprobs, axis=1))


def test_seed_changes_what_prompts_score() -> None:
    assert equal(SCORER.prompt(PROMPT, 3), SCORER.prompt(PROMPT, 3, seed=0))
    assert not equal(SCORER.prompt(PROMPT, 3), SCORER.prompt(PROMPT, 3, seed=1))


def test_prompt_token_ranks_occur_as_often_as_they_are_likely() -> None:
    prompt = np.random.default_rng(2).integers(0, VOCAB, MANY).astype(np.uint32)
    scores = SCORER.prompt(prompt, 5)
    expected = probabilities(scores)[:, 1:].sum(axis=0)
    counts = np.bincount(scores.ranks, minlength=6)[1:6]
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))


@pytest.mark.parametrize("start", [0, 2, 7])
def test_tokens_asked_for_at_prompt_positions_are_scored_as_the_vocabulary_is(start: int) -> None:
    prompt = PROMPT % 97
    whole = SMALL.prompt(prompt, ALL)
    wanted = np.random.default_rng(1).integers(-1, 97, (7 - start, 4)).astype(np.int32)
    scores = SMALL.prompt_among(prompt, wanted, start)
    assert (scores.shape, scores.dtype.str) == ((7 - start, 4), "<f4")
    for row, ids in enumerate(wanted.tolist()):
        columns = whole.token_ids[start + row, 1:].tolist()
        expected = [-np.inf if asked < 0 else whole.logprobs[start + row, 1 + columns.index(asked)] for asked in ids]
        assert scores[row].tolist() == expected


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: SCORER.prompt(np.zeros(MAX_SCORES // VOCAB + 2, np.uint32), ALL), "ask for fewer logprobs"),
        (lambda: SCORER.prompt_among(PROMPT, np.zeros((6, 1), np.int32)), "6 rows where a prompt of 8 tokens has 7"),
        (lambda: SCORER.prompt_among(PROMPT, np.zeros((1, 1), np.int32), start=9), "has 0 from 9 on"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_reason(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_vocabulary_beyond_any_real_one_takes_no_more_room() -> None:
    scores = scored(1, 0, [2**31 - 2], 20, TokenScorer(2**31 - 1))
    assert np.all(np.diff(scores.logprobs[0, 1:]) < 0)
    assert scores.token_ids.min() >= 0
