# SPDX-License-Identifier: Apache-2.0
"""Engines that pool, pooling requests, and what is heard of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.timing import TimingConfig
from mockengine.replies.planner import RepliesConfig
from mockengine.replies.pooling import Pooler
from mockengine.wire.outputs import EngineCoreOutput, FinishReason, RequestError
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, LateInteractionParams, PoolingParams
from mockengine.wire.tensors import Tensor
from tests.support.rig import CONFIG, Rig, request

TASKS = ("generate", "embed", "classify", "token_embed", "token_classify")
DIM, LABELS = 32, 3
POOLING = replace(
    CONFIG,
    max_model_len=512,
    supported_tasks=TASKS,
    replies=RepliesConfig(vocab_size=32_000, embedding_dim=DIM, num_labels=LABELS),
)
LIMITS = BatchingConfig(num_gpu_blocks=40)
DRAFTS = SpeculationConfig(acceptance_rates=(0.8, 0.5))
PER_REQUEST = TimingConfig(timing="per_request", ttft_ms=5.0, prefill_ms_per_token=0.1, itl_ms=1.0)
RUNNERS: dict[str, EngineConfig] = {
    "off": POOLING,
    "chunks": replace(POOLING, output_token_chunk_size=4),
    "pace": replace(POOLING, itl_s=0.01),
    "per_request": replace(POOLING, timing=PER_REQUEST),
    "drafts": replace(POOLING, speculation=DRAFTS),
    "vllm": replace(POOLING, batching=LIMITS),
    "vllm synchronous": replace(POOLING, batching=replace(LIMITS, async_scheduling=False)),
    "vllm step": replace(POOLING, batching=LIMITS, timing=TimingConfig(timing="step", step_base_ms=10.0)),
    "vllm per_request": replace(POOLING, batching=LIMITS, timing=PER_REQUEST),
    "vllm drafts": replace(POOLING, batching=LIMITS, speculation=DRAFTS),
    "vllm chunks": replace(POOLING, batching=LIMITS, output_token_chunk_size=4),
}
PROMPT = np.random.default_rng(0).integers(1_000, 32_000, 40).tolist()


def pooling(
    name: str = "r1", task: str | None = "embed", prompt: Any = PROMPT, client: int = 0, **params: Any
) -> EngineCoreRequest:
    asked = PoolingParams(task, **{"use_activation": True, "dimensions": None, **params})
    return request(name, prompt=prompt, client=client, sampling_params=None, pooling_params=asked)


def late(mode: str, key: str = "q", uses: int | None = None) -> dict[str, Any]:
    return {"task": "token_embed", "late_interaction_params": LateInteractionParams(mode, key, uses)}


def the_output(rig: Rig, name: str = "r1") -> EngineCoreOutput:
    (output,) = rig.outputs(name)
    assert output.pooling_output is not None, "a Python frontend dies of that"
    assert not output.new_token_ids
    return output


def the_tensor(rig: Rig, name: str = "r1") -> Tensor:
    output = the_output(rig, name)
    assert (output.finish_reason, output.error) == (FinishReason.STOP, None)
    assert output.pooling_output is not None
    return output.pooling_output


def the_error(rig: Rig, name: str = "r1") -> RequestError:
    output = the_output(rig, name)
    assert output.finish_reason is FinishReason.ERROR
    assert output.pooling_output == EMPTY_POOLING_OUTPUT
    assert output.error is not None
    return output.error


def expected(asked: EngineCoreRequest) -> Tensor:
    reply = Pooler(DIM, LABELS).ask(asked)
    while (tensor := reply.go_on()) is None:
        pass
    return tensor
