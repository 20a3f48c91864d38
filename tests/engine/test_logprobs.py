# SPDX-License-Identifier: Apache-2.0
"""Logprobs go with the tokens that they are of, however requests run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.timing import TimingConfig
from mockengine.wire.logprobs import LogprobsLists
from mockengine.wire.outputs import FinishReason
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.tensors import Tensor
from tests.support.rig import CONFIG, Rig, request

DRAFTS = SpeculationConfig(acceptance_rates=(0.8, 0.5))
RUNNERS: dict[str, EngineConfig] = {
    "off": CONFIG,
    "chunks": replace(CONFIG, output_token_chunk_size=4),
    "per_request": replace(CONFIG, timing=TimingConfig(timing="per_request", itl_ms=1.0)),
    "vllm": replace(CONFIG, batching=BatchingConfig()),
    "drafts": replace(CONFIG, speculation=DRAFTS),
    "vllm drafts": replace(CONFIG, batching=BatchingConfig(), speculation=DRAFTS),
}
TOKENS = 20


def _numbers(part: Tensor) -> Any:
    return np.frombuffer(part.data, {"int32": "<i4", "float32": "<f4"}.get(part.dtype, part.dtype)).reshape(part.shape)


def _asked(rig: Rig, name: str, **params: Any) -> None:
    rig.add(request(name, sampling_params=SamplingParams(max_tokens=TOKENS, **params)))


def _scores(rig: Rig, name: str) -> tuple[Any, Any]:
    """Return token ids and logprobs of all outputs, one under the other."""
    lists = [output.new_logprobs for output in rig.outputs(name)]
    scored = [each for each in lists if isinstance(each, LogprobsLists)]
    assert len(scored) == len(lists)
    ids, logprobs = [_numbers(each.token_ids) for each in scored], [_numbers(each.logprobs) for each in scored]
    return np.concatenate(ids), np.concatenate(logprobs)


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_token_is_scored_and_stays_what_it_is(runner: str) -> None:
    rig = Rig(RUNNERS[runner])
    _asked(rig, "plain")
    _asked(rig, "scored", logprobs=3)
    rig.run()
    assert rig.tokens("scored") == rig.tokens("plain")
    assert all(output.new_logprobs is None for output in rig.outputs("plain")), "a Python frontend dies of these"
    ids, logprobs = _scores(rig, "scored")
    assert ids.shape == logprobs.shape == (TOKENS, 4)
    assert ids[:, 0].tolist() == rig.tokens("scored")
    assert (np.diff(logprobs[:, 1:]) <= 0).all()


def test_scores_are_the_same_however_requests_run() -> None:
    seen = []
    for config in RUNNERS.values():
        rig = Rig(config)
        _asked(rig, "r", logprobs=2)
        rig.run()
        ids, logprobs = _scores(rig, "r")
        seen.append((ids.tolist(), logprobs.tolist()))
    assert seen == seen[:1] * len(RUNNERS)


def test_given_tokens_are_scored_beside_each() -> None:
    rig = Rig()
    _asked(rig, "r", logprob_token_ids=(7, 9))
    rig.run()
    ids, _ = _scores(rig, "r")
    assert ids[:, 1:].tolist() == [[7, 9]] * TOKENS


def test_the_largest_top_k_is_as_good_as_none() -> None:
    rig = Rig()
    _asked(rig, "r", logprobs=2, top_k=2**64 - 1)
    _asked(rig, "free", logprobs=2)
    rig.run()
    assert [part.tolist() for part in _scores(rig, "r")] == [part.tolist() for part in _scores(rig, "free")]


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_prompt_is_scored_once_with_the_first_output(runner: str) -> None:
    rig = Rig(RUNNERS[runner])
    wanted = Tensor("int32", (2, 2), np.array([[5, -1], [6, 7]], "<i4").tobytes())
    _asked(rig, "r", prompt_logprobs=1, prompt_logprob_token_ids=wanted)
    rig.run()
    first, *others = rig.outputs("r")
    assert first.new_prompt_logprobs is not None
    assert first.new_prompt_logprobs.token_ids.shape == (2, 2)
    assert _numbers(first.new_prompt_logprobs.token_ids)[:, 0].tolist() == [2, 3]
    assert first.prompt_token_id_logprobs is not None
    given = _numbers(first.prompt_token_id_logprobs)
    assert np.isneginf(given).tolist() == [[False, True], [False, False]]
    assert all(each.new_prompt_logprobs is None and each.prompt_token_id_logprobs is None for each in others)
    assert all(each.new_logprobs is None for each in rig.outputs("r"))


@pytest.mark.parametrize(
    ("params", "prompt", "said"),
    [
        (
            {"prompt_logprob_token_ids": Tensor("int32", (3, 1), bytes(12))},
            (1, 2, 3),
            "prompt_logprob_token_ids: 3 rows where the prompt has 2 places",
        ),
        ({"prompt_logprobs": -1}, range(1_000), "logprobs in one output, where at most 16777216 are given"),
    ],
)
def test_what_cannot_be_scored_costs_its_request_alone(params: dict[str, Any], prompt: Any, said: str) -> None:
    rig = Rig(replace(CONFIG, max_model_len=2_000))
    rig.add(request("wrong", prompt=prompt, sampling_params=SamplingParams(**params)), request("right"))
    rig.run()
    assert rig.finish_reason("wrong") is FinishReason.ERROR
    error = rig.outputs("wrong")[0].error
    assert error is not None
    assert error.code == "validation_error"
    assert said in error.message
    assert len(rig.tokens("right")) == 4


@pytest.mark.parametrize(
    "params",
    [{"prompt_logprobs": 1}, {"prompt_logprob_token_ids": Tensor("int32", (1, 1), bytes(4))}],
)
def test_embeddings_have_no_tokens_to_score(params: dict[str, Any]) -> None:
    rig = Rig()
    embeds = Tensor("float32", (2, 4), bytes(32))
    rig.add(
        request(prompt=(), prompt_token_ids=None, prompt_embeds=embeds, sampling_params=SamplingParams(**params)),
    )
    rig.run()
    assert rig.finish_reason("r1") is FinishReason.ERROR
