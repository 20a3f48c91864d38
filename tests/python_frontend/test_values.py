# SPDX-License-Identifier: Apache-2.0
"""Logprobs and pooling outputs as the Python frontend's own classes understand them; no server is started."""

import json
import subprocess
from array import array
from functools import cache
from typing import Any

import numpy as np
import pytest

from mockengine.replies.logprobs import ALL, TokenScorer
from mockengine.replies.pooling import Pooler
from mockengine.wire.codec import unpack
from mockengine.wire.logprobs import logprobs_lists
from mockengine.wire.outputs import EngineCoreOutput, FinishReason, StepOutputs, write_envelope
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import (
    LateInteractionParams,
    PoolingParams,
    read_pooling_params,
    read_sampling_params,
)
from mockengine.wire.tensors import Tensor
from tests.support.python_frontend import python_frontend

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]

VOCAB = 300
SCORER = TokenScorer(VOCAB)
POOLER = Pooler(16, 3)
WIDE = Pooler(300, 3)
KEYS = np.array([3, 4], np.uint64)
TOKENS = np.array([[5, 299, 6], [7, 8, 8]], np.uint32)
PROMPT = np.array([9, 0, 9, 2], np.uint32)

READ = """
import json, sys
import numpy as np
from vllm.pooling_params import LateInteractionParams, PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

class Request:
    def __init__(self, **asked):
        self.sampling_params = SamplingParams(**asked)

def said(positions):
    if positions is None:
        return None
    return [None if one is None else [[id, l.logprob, l.rank] for id, l in one.items()] for one in positions]

answers = []
for asked, frames in json.load(sys.stdin):
    (output,) = MsgpackDecoder(EngineCoreOutputs).decode([bytes.fromhex(frame) for frame in frames]).outputs
    if output.pooling_output is not None:
        tensor = output.pooling_output
        answers.append([str(tensor.dtype), list(tensor.shape), tensor.flatten().tolist()])
        continue
    processor = LogprobsProcessor.from_new_request(None, Request(**asked))
    processor.update_from_output(output)
    answers.append([said(processor.logprobs), said(processor.pop_prompt_logprobs())])
rows = np.arange(200, dtype=np.int32).reshape(100, 2)
sampling = SamplingParams(prompt_logprob_token_ids=rows, prompt_logprob_start=3)
late = LateInteractionParams("cache_query", "q", 2)
pooling = PoolingParams(False, 8, 12, [1, 2], "token_embed", True, True, late, {"compressed_token_type_ids": 7})
frames = [[bytes(frame).hex() for frame in MsgpackEncoder().encode(params)] for params in (sampling, pooling)]
print(json.dumps([answers, frames]))
"""


def output(**fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r", **fields)


def scored(num_logprobs: int) -> EngineCoreOutput:
    """Make the output of request 1, whose scores are cut out of those of a batch."""
    scores = SCORER.sampled(KEYS, np.zeros(2, np.int64), TOKENS, num_logprobs)
    lists = logprobs_lists(scores.token_ids[1], scores.logprobs[1], scores.ranks[1], as_tensors=False)
    return output(new_token_ids=tuple(TOKENS[1].tolist()), new_logprobs=lists)


def scored_among(token_ids: list[int]) -> EngineCoreOutput:
    scores = SCORER.sampled_among(KEYS, np.zeros(2, np.int64), TOKENS, np.array(token_ids))
    lists = logprobs_lists(scores.token_ids[1], scores.logprobs[1], scores.ranks[1], as_tensors=False)
    return output(new_token_ids=tuple(TOKENS[1].tolist()), new_logprobs=lists)


def scored_prompt(num_logprobs: int, prompt: np.ndarray[Any, np.dtype[np.uint32]] = PROMPT) -> EngineCoreOutput:
    scores = SCORER.prompt(prompt, num_logprobs)
    lists = logprobs_lists(scores.token_ids, scores.logprobs, scores.ranks, as_tensors=True)
    return output(new_token_ids=(1,), new_prompt_logprobs=lists)


def pooled(task: str, pooler: Pooler = POOLER, **params: Any) -> EngineCoreOutput:
    asked = PoolingParams(task, **{"use_activation": True, "dimensions": None, **params})
    request = EngineCoreRequest(request_id="r", prompt_token_ids=array("I", PROMPT.tolist()), pooling_params=asked)
    reply = pooler.ask(request)
    while (tensor := reply.go_on()) is None:
        pass
    return output(pooling_output=tensor, finish_reason=FinishReason.STOP)


ASKED: dict[str, tuple[dict[str, Any], EngineCoreOutput]] = {
    "k 0": ({"logprobs": 0}, scored(0)),
    "k 5": ({"logprobs": 5}, scored(5)),
    "all": ({"logprobs": -1}, scored(ALL)),
    "ids": ({"logprob_token_ids": [8, 1, 299]}, scored_among([8, 1, 299])),
    "prompt k 2": ({"prompt_logprobs": 2}, scored_prompt(2)),
    "prompt all": ({"prompt_logprobs": -1}, scored_prompt(ALL)),
    "prompt of one token": ({"prompt_logprobs": 2}, scored_prompt(2, PROMPT[:1])),
    "embed": ({}, pooled("embed")),
    "embed, in a frame": ({}, pooled("embed", WIDE)),
    "classify": ({}, pooled("classify")),
    "token_embed": ({}, pooled("token_embed")),
    "token_embed, in a frame": ({}, pooled("token_embed", WIDE)),
    "cache_query": ({}, pooled("token_embed", late_interaction_params=LateInteractionParams("cache_query", "q"))),
}


@cache
def answers() -> tuple[dict[str, Any], list[list[bytes]]]:
    """Return what the frontend's classes make of all of them, and two of its own messages."""
    asked = [
        [params, [frame.hex() for frame in write_envelope(StepOutputs(engine_index=0, timestamp=1.0, outputs=(said,)))]]
        for params, said in ASKED.values()
    ]
    run = subprocess.run(
        [python_frontend(report=print), "-c", READ],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    read, frames = json.loads(run.stdout.splitlines()[-1])
    return dict(zip(ASKED, read, strict=True)), [[bytes.fromhex(frame) for frame in message] for message in frames]


def sampled(name: str) -> list[dict[int, tuple[float, int]]]:
    return [{token: (logprob, rank) for token, logprob, rank in position} for position in answers()[0][name][0]]


@pytest.mark.parametrize(("name", "num_logprobs"), [("k 0", 0), ("k 5", 5), ("all", VOCAB)])
def test_logprobs_are_read_with_the_rank_of_each_token(name: str, num_logprobs: int) -> None:
    scores = SCORER.sampled(KEYS, np.zeros(2, np.int64), TOKENS, num_logprobs)
    positions = sampled(name)
    assert len(positions) == 3
    for place, position in enumerate(positions):
        token, rank = int(TOKENS[1, place]), int(scores.ranks[1, place])
        assert next(iter(position)) == token
        assert position[token] == (float(scores.logprobs[1, place, 0]), rank)
        assert len(position) == num_logprobs + (rank > num_logprobs)
        in_order = sorted(position.values(), key=lambda value: value[1])
        assert in_order == sorted(in_order, key=lambda value: -value[0])
        assert [value[1] for value in in_order[:num_logprobs]] == list(range(1, num_logprobs + 1))


def test_logprobs_of_given_tokens_are_those_of_the_whole_vocabulary() -> None:
    for some, whole in zip(sampled("ids"), sampled("all"), strict=True):
        assert {8, 1, 299} <= set(some)
        assert all(some[token][0] == whole[token][0] for token in some)


def test_prompt_logprobs_are_read_for_every_token_but_the_first() -> None:
    few, whole = (answers()[0][name][1] for name in ("prompt k 2", "prompt all"))
    assert few[0] is whole[0] is None
    assert [position[0][0] for position in few[1:]] == [position[0][0] for position in whole[1:]] == [0, 9, 2]
    assert all(len(position) == VOCAB for position in whole[1:])
    for position, all_of_it in zip(few[1:], whole[1:], strict=True):
        known = {token: logprob for token, logprob, _ in all_of_it}
        assert all(known[token] == logprob for token, logprob, _ in position)
    assert answers()[0]["prompt of one token"][1] == [None]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed", [16]),
        ("embed, in a frame", [300]),
        ("classify", [3]),
        ("token_embed", [4, 16]),
        ("token_embed, in a frame", [4, 300]),
        ("cache_query", []),
    ],
)
def test_pooling_outputs_are_torch_tensors(name: str, shape: list[int]) -> None:
    sent = ASKED[name][1].pooling_output
    assert sent is not None
    numbers = np.frombuffer(sent.data, "<f4").tolist()
    assert answers()[0][name] == ["torch.float32", shape, numbers]


def test_params_are_read_as_the_frontend_writes_them() -> None:
    (sampling, *sampling_frames), (pooling, *_) = answers()[1]
    assert len(sampling_frames) == 1
    params = read_sampling_params(unpack(sampling), "sampling_params", sampling_frames)
    assert params.prompt_logprob_token_ids == Tensor("<i4", (100, 2), np.arange(200, dtype="<i4").tobytes())
    assert params.prompt_logprob_start == 3
    assert read_pooling_params(unpack(pooling), "pooling_params") == PoolingParams(
        "token_embed",
        use_activation=False,
        dimensions=8,
        step_tag_id=12,
        returned_token_ids=(1, 2),
        skip_reading_prefix_cache=True,
        late_interaction_params=LateInteractionParams("cache_query", "q", 2),
        compressed_token_type_ids=7,
    )
