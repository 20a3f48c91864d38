# SPDX-License-Identifier: Apache-2.0
"""Log probabilities on the wire: many requests at once are what each is alone."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.wire.codec import pack, unpack
from mockengine.wire.logprobs import LogprobsLists, logprobs_lists, pack_logprobs, read_logprobs
from mockengine.wire.tensors import Tensor
from tests.wire.forms import SEARCH


def test_arrays_of_one_request_become_its_lists() -> None:
    ids, logprobs, ranks = np.array([[42, 7]], np.int32), np.array([[-0.5, -1]], np.float32), np.array([3], np.int32)
    assert logprobs_lists(ids, logprobs, ranks, as_tensors=False) == LogprobsLists(
        Tensor("<i4", (1, 2), bytes.fromhex("2a00000007000000")),
        Tensor("<f4", (1, 2), bytes.fromhex("000000bf000080bf")),
        Tensor("<i4", (1,), bytes.fromhex("03000000")),
    )
    of_prompt = logprobs_lists(ids, logprobs, ranks, as_tensors=True)
    assert [part.dtype for part in (of_prompt.token_ids, of_prompt.logprobs, of_prompt.ranks)] == [
        "int32", "float32", "int32",
    ]  # fmt: skip


@SEARCH
@given(
    requests=st.integers(1, 5),
    tokens=st.integers(0, 70),
    columns=st.sampled_from([1, 2, 6, 21, 200]),
    as_tensors=st.booleans(),
)
def test_requests_packed_together_have_the_bytes_of_each_alone(
    requests: int,
    tokens: int,
    columns: int,
    as_tensors: bool,  # noqa: FBT001 - hypothesis passes it by name
) -> None:
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, 2**31, (requests, tokens, columns)).astype(np.int32)
    logprobs = rng.normal(size=(requests, tokens, columns)).astype(np.float32)
    ranks = rng.integers(1, 2**31, (requests, tokens)).astype(np.int32)
    packed = pack_logprobs(ids, logprobs, ranks, as_tensors=as_tensors)
    for row in range(requests):
        alone = logprobs_lists(ids[row], logprobs[row], ranks[row], as_tensors=as_tensors)
        assert packed[row].tobytes() == pack(alone.to_wire(as_tensors=as_tensors))
        assert read_logprobs(unpack(packed[row].tobytes()), (), "new_logprobs") == alone


@pytest.mark.parametrize("order", ["C", "F"])
def test_numbers_of_other_types_and_layouts_travel_as_the_wire_has_them(order: Literal["C", "F"]) -> None:
    ids: Any = np.asarray(np.arange(12).reshape(2, 2, 3), order=order)
    logprobs: Any = np.asarray(-np.arange(12.0).reshape(2, 2, 3), order=order)
    packed = pack_logprobs(ids, logprobs, ids[:, :, 0], as_tensors=False)
    scores = read_logprobs(unpack(packed[1].tobytes()), (), "new_logprobs")
    assert np.frombuffer(scores.token_ids.data, scores.token_ids.dtype).tolist() == [6, 7, 8, 9, 10, 11]
    assert np.frombuffer(scores.logprobs.data, scores.logprobs.dtype).tolist() == [-6, -7, -8, -9, -10, -11]
    assert np.frombuffer(scores.ranks.data, scores.ranks.dtype).tolist() == [6, 9]
