# SPDX-License-Identifier: Apache-2.0
"""Pooling requests run as others do, and say numbers once instead of tokens."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.timing import TimingConfig
from mockengine.replies.planner import RepliesConfig
from mockengine.replies.pooling import Pooler
from mockengine.wire.lines import LINES, Line
from mockengine.wire.messages import Add
from mockengine.wire.outputs import EngineCoreOutput, EventType, FinishReason, RequestError, StepOutputs
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, LateInteractionParams, PoolingParams
from mockengine.wire.stats import PrefillStats
from mockengine.wire.tensors import Tensor
from tests.engine.test_batching import play, said_at, steps
from tests.support.rig import CONFIG, Rig, request
from tests.wire.forms import SEARCH

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
NOBODY: frozenset[int] = frozenset()


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


def test_an_id_stays_taken_until_its_numbers_are_said() -> None:
    rig = Rig(replace(POOLING, clients=2))
    rig.add(pooling("slow", task="token_embed", prompt=[5] * 500))
    engine = rig.ranks.engines[0]
    engine._pooled.complete(engine._runner.step(rig.now, NOBODY, 1), frozenset({0}))
    assert (engine.num_requests, engine.num_running) == (1, 1)
    rig.add(pooling("slow"))
    assert "a request of the same id is in flight" in the_error(rig, "slow").message
    play(rig)
    assert [output.finish_reason for output in rig.outputs("slow")] == [FinishReason.ERROR, FinishReason.STOP]


# Clients that go away or do not read, and engines that leave.


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("turns", range(5))
def test_who_is_aborted_hears_nothing_whenever_that_is(runner: str, turns: int) -> None:
    rig = Rig(RUNNERS[runner])
    rig.add(pooling(), pooling("other"))
    for _ in range(turns):
        if rig.ranks.next_deadline(rig.now, NOBODY) is not None:
            rig.step()
    was_said = len(rig.outputs("r1"))
    rig.abort("r1", "r1", "unknown")
    play(rig)
    assert len(rig.outputs("r1")) == was_said
    assert the_tensor(rig, "other") == expected(pooling())
    assert sorted(reason for _, reason, _ in rig.watcher.finished) == ["stop" if was_said else "abort", "stop"]


LONG = replace(POOLING, max_model_len=2**20, clients=2)
MANY = 4_000 * [*range(1_000, 1_050)]
"""A prompt of 200 000 tokens, whose embeddings take many parts."""


def test_a_large_reply_holds_up_nobody_and_can_be_aborted_half_way() -> None:
    rig = Rig(LONG)
    rig.add(pooling("large", "token_embed", MANY), request("t", max_tokens=1_000), pooling("small"))
    for _ in range(5):
        rig.step()
    assert rig.outputs("large") == rig.outputs("small") == []
    assert len(rig.tokens("t")) == 5, "those who say tokens go on meanwhile"
    assert rig.ranks.num_requests == 3
    rig.abort("large")
    rig.step()
    assert the_tensor(rig, "small") == expected(pooling())
    assert rig.outputs("large") == []


@pytest.mark.parametrize("runner", ["pace", "vllm step", "vllm per_request"])
def test_a_large_reply_changes_nobodys_times(runner: str) -> None:
    stamps = []
    for prompt in ([5], MANY):
        config = replace(RUNNERS[runner], max_model_len=2**18, replies=LONG.replies)
        if config.batching is not None:
            config = replace(config, batching=BatchingConfig(num_gpu_blocks=2**15, max_num_batched_tokens=2**18))
        rig = Rig(config)
        rig.add(pooling("other", "token_embed", prompt), request("t", max_tokens=20))
        play(rig)
        assert the_tensor(rig, "other").shape[0] == len(prompt)
        stamps.append(said_at(rig, "t"))
    assert len(stamps[0]) == 20
    # Moments are told together that are so close.
    assert stamps[1] == pytest.approx(stamps[0], abs=0.000_6)


def test_a_large_reply_is_whole_at_the_end() -> None:
    rig = Rig(LONG)
    rig.add(pooling("large", "token_embed", MANY))
    rig.step()
    assert rig.ranks.next_deadline(rig.now, NOBODY) == rig.now
    play(rig)
    assert the_tensor(rig, "large") == expected(pooling("large", "token_embed", MANY))
    assert len(steps(rig)) <= 3


def test_nothing_is_computed_for_who_does_not_read() -> None:
    rig = Rig(replace(RUNNERS["vllm"], clients=2))
    rig.add(pooling("a", client=0), pooling("b", client=1))
    engine = rig.ranks.engines[0]
    blocked = frozenset({1})
    # Their step is under way when the client stops reading.
    rig.step()
    while (due := rig.ranks.next_deadline(rig.now, blocked)) is not None and due <= rig.now:
        rig.step(blocked)
    assert the_tensor(rig, "a") == expected(pooling())
    assert rig.outputs("b") == []
    assert (len(engine._pooled), rig.ranks.num_requests) == (1, 1)
    rig.run()
    assert the_tensor(rig, "b") == expected(pooling())
    assert [destination for destination, envelope in rig.heard if isinstance(envelope, StepOutputs)].count(1) >= 1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_an_engine_that_leaves_sends_tensors_with_its_aborts(runner: str, turns: int) -> None:
    rig = Rig(RUNNERS[runner])
    rig.add(pooling(), pooling("large", "token_embed", [5] * 500))
    for _ in range(turns):
        rig.step()
    rig.ranks.begin_shutdown()
    rig.add(pooling("late"))
    rig._hear(rig.ranks.abort_everything(rig.now))
    play(rig)
    for name in ("r1", "large", "late"):
        output = the_output(rig, name)
        if output.finish_reason is FinishReason.ABORT:
            assert output.pooling_output == EMPTY_POOLING_OUTPUT
        else:
            assert turns
            assert output.finish_reason is FinishReason.STOP
    assert rig.ranks.num_requests == 0


def test_numbers_that_are_still_computed_are_aborted_with_a_tensor() -> None:
    rig = Rig(LONG)
    rig.add(pooling("large", "token_embed", MANY))
    rig.step()
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert the_output(rig, "large").finish_reason is FinishReason.ABORT
    assert rig.ranks.num_requests == 0


def test_a_balanced_rank_reports_each_id_once_and_never_before_its_output() -> None:
    rig = Rig(replace(LONG, data_parallel_size=2, has_coordinator=True))
    rig.add(pooling("large", "token_embed", MANY), *(pooling(f"p{number}") for number in range(60)))
    rig.step()
    rig.abort("p59")
    rig.run()
    said: list[str] = []
    finished: list[str] = []
    for envelope in steps(rig):
        said += [output.request_id for output in envelope.outputs]
        finished += envelope.finished_requests
        assert set(finished) <= {*said, "p59"}
    assert sorted(finished) == sorted({*said, "p59"})
    assert len(finished) == 61


# Late interaction.


@pytest.mark.parametrize("runner", RUNNERS)
def test_documents_are_scored_against_the_query_before_them(runner: str) -> None:
    rig = Rig(RUNNERS[runner])
    rig.add(pooling("q", prompt=PROMPT[:5], **late("cache_query", uses=3)))
    play(rig)
    assert the_tensor(rig, "q").shape == ()
    other = np.random.default_rng(1).integers(1_000, 32_000, 30).tolist()
    documents = [other, other[:15] + PROMPT[:2], other[:9] + PROMPT[:5]]
    rig.add(*(pooling(f"d{place}", prompt=prompt, **late("score_doc")) for place, prompt in enumerate(documents)))
    play(rig)
    scores = [np.frombuffer(the_tensor(rig, f"d{place}").data, "<f4")[0] for place in range(3)]
    assert scores == sorted(scores)
    rig.add(pooling("d3", **late("score_doc")))
    play(rig)
    assert "no query str 'q' is held (send it before its documents)" in the_error(rig, "d3").message
    assert [reason for _, reason, _ in rig.watcher.finished] == ["stop"] * 4 + ["error"]


def test_a_query_and_its_documents_may_come_at_once() -> None:
    rig = Rig(POOLING)
    rig.add(pooling("q", **late("cache_query", uses=1)), pooling("d", **late("score_doc")))
    play(rig)
    assert the_tensor(rig, "d").shape == ()


def test_an_aborted_document_lets_its_query_go() -> None:
    rig = Rig(POOLING)
    rig.add(pooling("q", **late("cache_query", uses=1)))
    play(rig)
    rig.add(pooling("d", **late("score_doc")))
    rig.abort("d")
    rig.add(pooling("e", **late("score_doc")))
    play(rig)
    assert the_error(rig, "e").code == "validation_error"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_every_line_hears_numbers_and_errors(line: Line) -> None:
    rig = Rig(POOLING, line=line)
    rig.add(pooling(), pooling("d", **late("score_doc")))
    play(rig)
    assert the_tensor(rig).shape == (DIM,)
    failed = the_output(rig, "d")
    assert (failed.finish_reason, failed.pooling_output) == (FinishReason.ERROR, EMPTY_POOLING_OUTPUT)


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
