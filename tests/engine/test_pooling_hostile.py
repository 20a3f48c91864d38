# SPDX-License-Identifier: Apache-2.0
"""Pooling requests with anything in their params: each is answered once, with a tensor, and costs nobody else."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.engine.config import EngineConfig
from mockengine.wire.codec import pack, raw_view
from mockengine.wire.lines import NEWEST
from mockengine.wire.messages import read_message
from mockengine.wire.outputs import FinishReason
from tests.engine.test_batching import play
from tests.support.pooling import LIMITS, POOLING, expected, pooling, the_output, the_tensor
from tests.support.rig import Rig
from tests.wire.forms import SEARCH

CONFIGS = {"off": POOLING, "vllm": replace(POOLING, batching=LIMITS)}
ANY_INT = st.sampled_from([-(2**63), -1, 0, 1, 7, 255, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64 - 1])
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    ANY_INT,
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(ANY_INT, max_size=4),
    st.dictionaries(st.text(max_size=3), ANY_INT, max_size=2),
)
TASKS = st.sampled_from(["embed", "classify", "score", "token_embed", "token_classify", "plugin", "generate", ""])
MODES = st.sampled_from(["cache_query", "score_doc", "other"])
LATE = st.tuples(MODES, st.sampled_from(["q", "p", "", "x" * 2_000]), st.none() | ANY_INT).map(list)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
# Mostly of the right kind, so that more than the reader is tried.
PARAMS = st.tuples(
    st.none() | st.booleans() | ANYTHING,
    st.none() | st.integers(-1, 40) | ANYTHING,
    st.none() | st.sampled_from([5, 6]) | ANY_INT,
    st.none() | IDS | ANYTHING,
    TASKS | ANYTHING,
    st.booleans(),
    st.none() | st.booleans(),
    st.none() | LATE | ANYTHING,
    st.none() | st.fixed_dictionaries({"compressed_token_type_ids": ANY_INT}) | ANYTHING,
    st.just(2),
    st.none() | st.lists(ANY_INT, max_size=2) | ANYTHING,
).map(list)
IMAGES = st.lists(
    st.fixed_dictionaries(
        {
            "modality": st.just("image"),
            "identifier": st.text(max_size=3),
            "mm_position": st.fixed_dictionaries({"offset": ANY_INT, "length": ANY_INT}),
        }
    ),
    max_size=3,
)
PROMPTS = st.lists(st.sampled_from([0, 5, 6, 2**32 - 1]), max_size=30)
EMBEDS = st.tuples(st.integers(0, 5), st.integers(1, 9)).map(
    lambda shape: ["uint8", list(shape), raw_view(bytes(range(shape[0] * shape[1])))]
)


def heard(rig: Rig, name: str, params: Any, prompt: Any, images: Any, embeds: Any = None) -> None:
    items = [name, prompt, images, None, params, 0.0, None, None, None, embeds, None, 0]
    rig.receive(read_message([b"\x00", pack(items)], 0))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@SEARCH
@given(asked=st.lists(st.tuples(PARAMS, PROMPTS, IMAGES, st.none() | EMBEDS), min_size=1, max_size=6))
def test_each_is_answered_once_and_the_next_one_rightly(config: EngineConfig, asked: list[Any]) -> None:
    rig = Rig(config, line=NEWEST)
    for number, (params, prompt, images, embeds) in enumerate(asked):
        heard(rig, f"r{number}", params, None if embeds else prompt, images, embeds)
    rig.add(pooling("right"))
    play(rig)
    for number in range(len(asked)):
        output = the_output(rig, f"r{number}")
        assert output.finish_reason in (FinishReason.STOP, FinishReason.ERROR)
        assert (output.error is None) is (output.finish_reason is FinishReason.STOP)
        assert output.error is None or len(output.error.message) < 500
    assert the_tensor(rig, "right") == expected(pooling())
    assert rig.ranks.num_requests == 0


def test_params_that_are_none_cannot_be_read() -> None:
    rig = Rig(POOLING, line=NEWEST)
    for number, params in enumerate(([], [True], 7, "embed", {"task": "embed"}, [None] * 4)):
        heard(rig, f"r{number}", params, [1], None)
        output = the_output(rig, f"r{number}")
        assert output.error is not None
        assert output.error.code == "unreadable_request"
