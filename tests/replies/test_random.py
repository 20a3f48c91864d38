# SPDX-License-Identifier: Apache-2.0
"""Random replies: reproducible, independent of how they are drawn, uniform."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.key import SeedScope, reply_key
from mockengine.replies.random import RandomTokens
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.requests import EngineCoreRequest, LoraRequest, MultiModalFeature
from mockengine.wire.sampling import SamplingParams

KEYS = st.integers(0, 2**64 - 1)


def _splitmix64_reference(key: int, index: int) -> int:
    """splitmix64 in plain integers, written from its definition."""
    mask = 2**64 - 1
    state = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@given(key=KEYS, start=st.integers(0, 2**31), count=st.integers(0, 70), vocab_size=st.integers(1, 2**31 - 1))
def test_tokens_are_those_of_the_reference_generator(key: int, start: int, count: int, vocab_size: int) -> None:
    expected = [((_splitmix64_reference(key, index) >> 32) * vocab_size) >> 32 for index in range(start, start + count)]
    assert RandomTokens(Vocabulary(vocab_size)).tokens(key, start, count) == expected


def test_published_test_vector_of_splitmix64() -> None:
    """The first outputs for seed 1234567, as other implementations state them."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_splitmix64_reference(1234567, index) for index in range(3)] == expected


@given(key=KEYS, cut=st.integers(0, 100))
def test_tokens_do_not_depend_on_how_they_are_drawn(key: int, cut: int) -> None:
    source = RandomTokens(Vocabulary(32_000))
    assert source.tokens(key, 0, cut) + source.tokens(key, cut, 100 - cut) == source.tokens(key, 0, 100)


def test_tokens_are_uniform() -> None:
    counts = Counter(RandomTokens(Vocabulary(10)).tokens(1, 0, 100_000))
    assert set(counts) == set(range(10))
    # Chi-square with 9 degrees of freedom exceeds 27.9 once in a thousand; the key is fixed, so this never flakes.
    assert sum((count - 10_000) ** 2 / 10_000 for count in counts.values()) < 27.9


def _request(**fields: object) -> EngineCoreRequest:
    made = EngineCoreRequest(
        request_id="cmpl-1", prompt_token_ids=array("I", [1, 2, 3]), sampling_params=SamplingParams()
    )
    return replace(made, **fields)  # type: ignore[arg-type]  # the names are those of the class


def test_same_prompt_has_the_same_key_whatever_its_id() -> None:
    keys = {reply_key(_request(request_id=name), 0, SeedScope.PROMPT) for name in ("cmpl-1", "cmpl-2", "chatcmpl-3")}
    assert len(keys) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": array("I", [1, 2, 4])},
        {"sampling_params": SamplingParams(seed=0)},
        {"request_id": "1_cmpl-1"},
        {"mm_features": (MultiModalFeature("image", "lora:x", 0, 1, "x", has_data=True),)},
        {"lora_request": LoraRequest("l1", 1, "/l1")},
    ],
)
def test_another_prompt_seed_child_or_adapter_has_another_key(other: dict[str, object]) -> None:
    assert reply_key(_request(**other), 0, SeedScope.PROMPT) != reply_key(_request(), 0, SeedScope.PROMPT)


def test_an_image_counts_by_its_hash_whether_its_data_come_or_not() -> None:
    def key(mm_hash: str, *, has_data: bool) -> int:
        feature = MultiModalFeature("image", "i", 0, 1, mm_hash, has_data)
        return reply_key(_request(mm_features=(feature,)), 0, SeedScope.PROMPT)

    assert key("x", has_data=True) == key("x", has_data=False) != key("y", has_data=True)


def test_children_of_one_prompt_differ_and_reproduce() -> None:
    def keys(parent: str) -> list[int]:
        return [reply_key(_request(request_id=f"{child}_{parent}"), 0, SeedScope.PROMPT) for child in range(4)]

    assert keys("cmpl-a") == keys("cmpl-b")
    assert len(set(keys("cmpl-a"))) == 4


def test_engine_seed_changes_the_key() -> None:
    assert reply_key(_request(), 0, SeedScope.PROMPT) != reply_key(_request(), 1, SeedScope.PROMPT)


def test_scope_of_the_request_id_gives_every_id_its_own_reply() -> None:
    keys = {reply_key(_request(request_id=name), 0, SeedScope.REQUEST_ID) for name in ("cmpl-1", "cmpl-2")}
    assert len(keys) == 2


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=5), SamplingParams(seed=-1)])
def test_temperature_0_and_a_seed_reproduce_in_any_scope(params: SamplingParams) -> None:
    keys = {
        reply_key(_request(request_id=name, sampling_params=params), 0, SeedScope.REQUEST_ID)
        for name in ("cmpl-1", "cmpl-2")
    }
    assert len(keys) == 1
