# SPDX-License-Identifier: Apache-2.0
"""Pooling requests run as others do, and say numbers once instead of tokens."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig
from mockengine.engine.timing import TimingConfig
from mockengine.wire.messages import Add
from mockengine.wire.outputs import EventType, FinishReason, RequestError
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import PrefillStats
from mockengine.wire.tensors import Tensor
from tests.engine.test_batching import NOBODY, play, said_at, steps
from tests.support.pooling import (
    DIM,
    LABELS,
    LIMITS,
    POOLING,
    PROMPT,
    RUNNERS,
    TASKS,
    expected,
    late,
    pooling,
    the_error,
    the_output,
    the_tensor,
)
from tests.support.rig import Rig, request
from tests.wire.forms import SEARCH

# However requests run.


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("task", "shape"),
    [("embed", (DIM,)), ("classify", (LABELS,)), ("token_embed", (40, DIM)), ("token_classify", (40, LABELS))],
)
def test_numbers_are_said_once_with_what_any_first_and_last_output_says(
    runner: str, task: str, shape: tuple[int, ...]
) -> None:
    rig = Rig(RUNNERS[runner])
    asked = pooling(task=task)
    rig.add(replace(asked, trace_headers={"traceparent": "00-1"}))
    play(rig)
    tensor = the_tensor(rig)
    assert (tensor.dtype, tensor.shape) == ("float32", shape)
    assert tensor == expected(asked)
    output = the_output(rig)
    queued, scheduled = output.events
    assert (queued.type, scheduled.type) == (EventType.QUEUED, EventType.SCHEDULED)
    assert 100.0 == queued.timestamp <= scheduled.timestamp <= said_at(rig, "r1")[0]
    assert output.prefill_stats is not None
    assert (output.prefill_stats.num_prompt_tokens, output.prefill_stats.num_computed_tokens) == (40, 40)
    assert output.trace_headers == {"traceparent": "00-1"}
    assert output.spec_decode_metrics is None
    assert [(served.request_id, reason) for served, reason, _ in rig.watcher.finished] == [("r1", "stop")]
    assert [(served.prompt_tokens, served.max_tokens) for served in rig.watcher.started] == [(40, 0)]
    assert rig.ranks.num_requests == 0
    last = steps(rig)[-1].scheduler_stats
    assert last is not None
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0)


@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_and_numbers_are_the_same_beside_each_other(runner: str) -> None:
    alone, rig = Rig(RUNNERS[runner]), Rig(RUNNERS[runner])
    for each in (alone, rig):
        each.add(*(request(f"t{number}", prompt=[number] * 20, max_tokens=30) for number in range(3)))
    for number in range(20):
        rig.add(pooling(f"p{number}", prompt=[*PROMPT, number]))
    for each in (alone, rig):
        play(each)
    for number in range(3):
        assert rig.tokens(f"t{number}") == alone.tokens(f"t{number}")
        assert len(rig.tokens(f"t{number}")) == 30
    for number in range(20):
        assert the_tensor(rig, f"p{number}") == expected(pooling(prompt=[*PROMPT, number]))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_may_fill_the_context(runner: str) -> None:
    rig = Rig(RUNNERS[runner])
    rig.add(pooling(prompt=[5] * 512), pooling("r2", prompt=[5] * 513))
    play(rig)
    assert the_tensor(rig).shape == (DIM,)
    assert "the prompt has 513 tokens where max_model_len is 512" in the_error(rig, "r2").message


@SEARCH
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 300), st.sampled_from(TASKS), st.integers(0, 4)),
        min_size=1,
        max_size=20,
    ),
    runner=st.sampled_from(sorted(RUNNERS)),
    tight=st.booleans(),
)
def test_everybody_is_answered_once_and_rightly_whatever_else_runs(
    arrivals: list[tuple[int, int, str, int]], runner: str, *, tight: bool
) -> None:
    config = RUNNERS[runner]
    if config.batching is not None and tight:
        limits = replace(config.batching, num_gpu_blocks=33, max_num_seqs=4, max_num_batched_tokens=64)
        config = replace(config, batching=limits)
    rig, aborted = Rig(config), set()
    for number, (pause, tokens, task, abort) in enumerate(arrivals):
        name, prompt = f"r{number}", [number % 3 + 1_000] * tokens
        rig.add(request(name, prompt=prompt, max_tokens=7) if task == "generate" else pooling(name, task, prompt))
        for _ in range(pause):
            if rig.ranks.next_deadline(rig.now, NOBODY) is not None:
                rig.step()
        if not abort and not rig.outputs(name):
            aborted.add(name)
            rig.abort(name)
    play(rig)
    for number, (_, tokens, task, _) in enumerate(arrivals):
        name = f"r{number}"
        if name in aborted:
            assert rig.outputs(name) == []
        elif task == "generate":
            assert len(rig.tokens(name)) == 7
        else:
            assert the_tensor(rig, name) == expected(pooling(name, task, [number % 3 + 1_000] * tokens))
    assert rig.ranks.num_requests == 0
    assert len(rig.watcher.finished) == len(arrivals)


def test_prompts_of_embeddings_are_pooled() -> None:
    rig = Rig(RUNNERS["vllm"])
    embeds = Tensor("bfloat16", (20, 8), np.random.default_rng(0).bytes(320))
    rig.add(replace(pooling(), prompt_token_ids=None, prompt_embeds=embeds))
    play(rig)
    assert the_tensor(rig).shape == (DIM,)


def test_both_kinds_of_params_are_a_pooling_request() -> None:
    rig = Rig(POOLING)
    rig.receive(Add(replace(request(), pooling_params=pooling().pooling_params, prompt_token_ids=array("I", PROMPT))))
    play(rig)
    assert the_tensor(rig) == expected(pooling())


# As a scheduler has it.


def test_a_long_prompt_is_computed_in_chunks_and_takes_their_time() -> None:
    config = replace(RUNNERS["vllm step"], batching=replace(LIMITS, max_num_batched_tokens=64))
    rig = Rig(config)
    rig.add(pooling(prompt=[5] * 200))
    play(rig)
    assert said_at(rig, "r1") == pytest.approx([100.0 + 4 * 0.01], abs=1e-6)


def test_it_takes_the_time_of_a_first_token() -> None:
    rig = Rig(RUNNERS["per_request"])
    rig.add(pooling(prompt=[5] * 200))
    play(rig)
    assert said_at(rig, "r1") == pytest.approx([100.0 + 0.005 + 200 * 0.000_1], abs=0.000_6)


@pytest.mark.parametrize(
    ("params", "cached"),
    [
        ({}, 32),
        ({"task": "classify"}, 32),
        ({"skip_reading_prefix_cache": True}, 0),
        ({"task": "token_embed", "skip_reading_prefix_cache": True}, 0),
        ({"task": "token_embed", "late_chunk_size": 4}, 0),
    ],
)
def test_the_beginning_of_a_prompt_comes_out_of_the_cache_where_it_may(params: dict[str, Any], cached: int) -> None:
    rig = Rig(RUNNERS["vllm"])
    for name in ("first", "again"):
        rig.add(pooling(name, **params))
        play(rig)
    assert the_output(rig, "first").prefill_stats == PrefillStats(40, 40, num_cache_creation_tokens=32)
    stats = the_output(rig, "again").prefill_stats
    assert stats is not None
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (cached, 40 - cached)
    assert the_output(rig, "again").pooling_output == the_output(rig, "first").pooling_output


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_computed_after_a_prompt(*, is_async: bool) -> None:
    rig = Rig(replace(RUNNERS["vllm step"], batching=replace(LIMITS, async_scheduling=is_async)))
    rig.add(pooling("a"))
    play(rig, until=rig.now + 0.005)
    rig.add(pooling("b", prompt=[7] * 20))
    play(rig)
    # A step that computed anything more of the first one would come before that of the second one, and take as long.
    assert [*said_at(rig, "a"), *said_at(rig, "b")] == pytest.approx([100.01, 100.02], abs=0.001_5)


def test_who_finds_no_slot_waits() -> None:
    rig = Rig(replace(RUNNERS["vllm step"], batching=replace(LIMITS, max_num_seqs=1, async_scheduling=False)))
    rig.add(pooling("a"), pooling("b", prompt=[7] * 20))
    play(rig)
    (first,), (second,) = said_at(rig, "a"), said_at(rig, "b")
    assert second - first == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_is_computed_anew_and_tells_so(*, is_async: bool) -> None:
    limits = BatchingConfig(
        num_gpu_blocks=34,
        max_num_batched_tokens=33,
        max_num_seqs=4,
        enable_prefix_caching=False,
        async_scheduling=is_async,
    )
    rig = Rig(replace(POOLING, batching=limits, timing=TimingConfig(timing="step", step_base_ms=1.0)))
    rig.add(request("t", prompt=[3] * 230, max_tokens=60))
    play(rig, until=rig.now + 0.03)
    # It just fits, until the other one needs another block.
    rig.add(pooling(prompt=[5] * 272))
    play(rig)
    assert the_tensor(rig) == expected(pooling(prompt=[5] * 272))
    happened = [event.type for event in the_output(rig).events]
    assert happened == [EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED, EventType.SCHEDULED]
    assert len(rig.tokens("t")) == 60


# What cannot be answered.


@pytest.mark.parametrize(
    ("supported", "asked", "said"),
    [
        (("generate",), pooling(), "the task str 'embed' is none of supported_tasks, which are generate"),
        (("embed", "token_embed"), pooling(task="classify"), "supported_tasks, which are embed, token_embed"),
        (("embed",), pooling(task="plugin"), "the task str 'plugin' is none of"),
        (("embed",), pooling(task=None), "the task nil is none of"),
        (TASKS, pooling(dimensions=33), "dimensions: 33 where embedding_dim of this engine allows 1 to 32"),
        (TASKS, pooling(prompt=()), "the prompt is empty"),
        (TASKS, pooling(**late("other")), "mode: str 'other' is neither cache_query nor score_doc"),
    ],
)
def test_what_cannot_be_answered_is_the_clients_fault(
    supported: tuple[str, ...], asked: EngineCoreRequest, said: str
) -> None:
    rig = Rig(replace(POOLING, supported_tasks=supported))
    rig.add(asked)
    play(rig)
    error = the_error(rig)
    assert error.code == "validation_error"
    assert said in error.message
    assert rig.watcher.refused == [("r1", error.message)]
    assert rig.watcher.started == []


@pytest.mark.parametrize(
    ("supported", "is_answered"),
    [(("embed",), False), (("generate",), True), (("transcription",), True), (("embed", "generate"), True)],
)
def test_tokens_are_said_where_that_is_a_task(supported: tuple[str, ...], *, is_answered: bool) -> None:
    rig = Rig(replace(POOLING, supported_tasks=supported))
    rig.add(request())
    play(rig)
    assert (rig.finish_reason("r1") is FinishReason.LENGTH) is is_answered
    if not is_answered:
        (output,) = rig.outputs("r1")
        assert output.pooling_output is None
        message = "the task str 'generate' is none of supported_tasks, which are embed"
        assert output.error == RequestError("validation_error", message)
