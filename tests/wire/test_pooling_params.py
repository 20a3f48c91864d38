# SPDX-License-Identifier: Apache-2.0
"""What requests ask of pooling and of prompt tokens to score, as Python frontends send it."""

from typing import Any

import numpy as np
import pytest

from mockengine.wire.codec import RawView, WireError, pack
from mockengine.wire.requests import read_request
from mockengine.wire.sampling import (
    LateInteractionParams,
    PoolingParams,
    read_pooling_params,
    read_sampling_params,
)
from mockengine.wire.tensors import Tensor

PLAIN = [True, None, None, None, "token_embed", False, True, None, None, 2, None]


def read(**items: Any) -> PoolingParams:
    values = list(PLAIN)
    for name, value in items.items():
        values[int(name.removeprefix("item_"))] = value
    return read_pooling_params(values, "pooling_params")


def test_shortest_params_have_defaults() -> None:
    expected = PoolingParams("embed", use_activation=None, dimensions=None)
    assert read_pooling_params([None, None, None, None, "embed"], "pooling_params") == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"item_0": False}, {"use_activation": False}),
        ({"item_1": 64}, {"dimensions": 64}),
        ({"item_2": 12, "item_3": [3, 4]}, {"step_tag_id": 12, "returned_token_ids": (3, 4)}),
        ({"item_6": None}, {"skip_reading_prefix_cache": False}),
        ({"item_7": ["score_doc", "q", None]}, {"late_interaction_params": LateInteractionParams("score_doc", "q")}),
        (
            {"item_7": ["cache_query", "q", 3]},
            {"late_interaction_params": LateInteractionParams("cache_query", "q", 3)},
        ),
        ({"item_7": ["score_doc", "q"]}, {"late_interaction_params": LateInteractionParams("score_doc", "q")}),
        ({"item_8": {"compressed_token_type_ids": 9, "other": [1]}}, {"compressed_token_type_ids": 9}),
        ({"item_8": {"other": 1}}, {}),
        ({"item_10": [7]}, {"late_chunk_size": 7}),
        ({"item_10": [7, "later"]}, {"late_chunk_size": 7}),
    ],
)
def test_each_item_is_read(given: dict[str, Any], expected: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"use_activation": True, "dimensions": None, "skip_reading_prefix_cache": True}
    assert read(**given) == PoolingParams("token_embed", **{**plain, **expected})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"item_2": "x"}, "pooling_params.step_tag_id: str 'x'"),
        ({"item_3": [-1]}, r"pooling_params.returned_token_ids\[0\]: int -1"),
        ({"item_6": 1}, "pooling_params.skip_reading_prefix_cache: int 1"),
        (
            {"item_7": ["score_doc"]},
            "pooling_params.late_interaction_params: array of 1 where a mode and a query's key",
        ),
        ({"item_7": ["score_doc", None, None]}, "late_interaction_params.query_key: nil"),
        ({"item_7": ["cache_query", "q", -1]}, "late_interaction_params.query_uses: int -1"),
        ({"item_8": [1]}, "pooling_params.extra_kwargs: array of 1"),
        ({"item_8": {"compressed_token_type_ids": -1}}, "extra_kwargs.compressed_token_type_ids: int -1"),
        ({"item_10": []}, "pooling_params.late_chunking_params: array of 0 where the size of a chunk"),
        ({"item_10": [0]}, "pooling_params.late_chunking_params.chunk_size: int 0"),
    ],
)
def test_item_of_another_kind_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        read(**given)


IDS = np.array([[1, 2], [3, -1]], "<i4")
TENSOR = Tensor("<i4", (2, 2), IDS.tobytes())


@pytest.mark.parametrize(
    ("data", "frames"), [(RawView(IDS.tobytes()), ()), (1, (IDS.tobytes(),))], ids=["inline", "in a frame"]
)
def test_prompt_tokens_to_score_are_found_where_they_are(data: object, frames: tuple[bytes, ...]) -> None:
    asked = {"prompt_logprob_token_ids": ["<i4", [2, 2], data], "prompt_logprob_start": 4}
    params = read_sampling_params(asked, "sampling_params", frames)
    assert (params.prompt_logprob_token_ids, params.prompt_logprob_start) == (TENSOR, 4)


def test_prompt_tokens_to_score_come_in_a_frame_of_the_request() -> None:
    items = ["r", [1, 2, 3], None, {"prompt_logprob_token_ids": ["<i4", [2, 2], 1]}, None]
    request = read_request(pack(items), [IDS.tobytes()])
    assert request.sampling_params is not None
    assert request.sampling_params.prompt_logprob_token_ids == TENSOR


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["<i4", [4], RawView(IDS.tobytes())], r"<i4 of shape \[4\] where <i4 of \[rows, ids\] is due"),
        (["<i8", [2, 1], RawView(IDS.tobytes())], "<i8 of shape"),
        (["<i4", [2, 2], 1], "frame 1 of a message with 0"),
        ([[1, 2]], "array of 1 where a tensor"),
    ],
)
def test_prompt_tokens_of_another_kind_are_refused(value: object, message: str) -> None:
    with pytest.raises(WireError, match=f"sampling_params.prompt_logprob_token_ids.*: {message}"):
        read_sampling_params({"prompt_logprob_token_ids": value}, "sampling_params")
