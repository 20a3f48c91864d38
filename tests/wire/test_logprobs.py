# SPDX-License-Identifier: Apache-2.0
"""Log probabilities on the wire: arrays become what frontends read."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.wire.codec import pack, unpack
from mockengine.wire.logprobs import LogprobsLists, logprobs_lists, pack_logprobs, packed_bytes, read_logprobs
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
@given(tokens=st.integers(0, 70), columns=st.sampled_from([1, 2, 6, 21, 200]), as_tensors=st.booleans())
def test_lists_are_read_as_they_were_made(
    tokens: int,
    columns: int,
    as_tensors: bool,  # noqa: FBT001 - hypothesis passes it by name
) -> None:
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, 2**31, (tokens, columns)).astype(np.int32)
    logprobs = rng.normal(size=(tokens, columns)).astype(np.float32)
    ranks = rng.integers(1, 2**31, tokens).astype(np.int32)
    made = logprobs_lists(ids, logprobs, ranks, as_tensors=as_tensors)
    assert read_logprobs(unpack(pack(made.to_wire(as_tensors=as_tensors))), (), "new_logprobs") == made


@pytest.mark.parametrize("order", ["C", "F"])
def test_numbers_of_other_types_and_layouts_travel_as_the_wire_has_them(order: Literal["C", "F"]) -> None:
    ids: Any = np.asarray(np.arange(12).reshape(2, 2, 3), order=order)
    logprobs: Any = np.asarray(-np.arange(12.0).reshape(2, 2, 3), order=order)
    scores = logprobs_lists(ids[1], logprobs[1], ids[1, :, 0], as_tensors=False)
    assert np.frombuffer(scores.token_ids.data, scores.token_ids.dtype).tolist() == [6, 7, 8, 9, 10, 11]
    assert np.frombuffer(scores.logprobs.data, scores.logprobs.dtype).tolist() == [-6, -7, -8, -9, -10, -11]
    assert np.frombuffer(scores.ranks.data, scores.ranks.dtype).tolist() == [6, 9]


@SEARCH
@given(outputs=st.integers(0, 5), tokens=st.integers(1, 70), columns=st.sampled_from([1, 2, 6, 21, 200]))
def test_many_are_packed_as_each_of_them_is(outputs: int, tokens: int, columns: int) -> None:
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, 2**31, (outputs, tokens, columns)).astype(np.int32)
    logprobs = rng.normal(size=(outputs, tokens, columns)).astype(np.float32)
    ranks = rng.integers(1, 2**31, (outputs, tokens)).astype(np.int32)
    packed = pack_logprobs(ids, logprobs, ranks)
    assert [each.tobytes() for each in packed] == [
        pack(logprobs_lists(*parts, as_tensors=False).to_wire(as_tensors=False))
        for parts in zip(ids, logprobs, ranks, strict=True)
    ]
    assert packed.itemsize == packed_bytes(tokens, columns)
