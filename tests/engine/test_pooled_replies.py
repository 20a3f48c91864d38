# SPDX-License-Identifier: Apache-2.0
"""What becomes of replies that take long to compute, of those that nobody waits for, and of queries that are held."""

from dataclasses import replace

import numpy as np
import pytest

from mockengine.engine.config import BatchingConfig
from mockengine.wire.lines import LINES, Line
from mockengine.wire.messages import Add
from mockengine.wire.outputs import FinishReason, StepOutputs
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT
from tests.engine.test_batching import NOBODY, play, said_at, steps
from tests.support.pooling import (
    DIM,
    POOLING,
    PROMPT,
    RUNNERS,
    expected,
    late,
    pooling,
    the_error,
    the_output,
    the_tensor,
)
from tests.support.rig import Rig, request

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


def test_who_is_refused_for_an_id_does_not_report_it_as_finished() -> None:
    rig = Rig(replace(LONG, data_parallel_size=2, has_coordinator=True))
    rig.add(pooling("large", "token_embed", MANY))
    rig.step()
    (refusal,) = rig.receive(Add(pooling("large")))
    assert isinstance(refusal, StepOutputs)
    assert refusal.outputs[0].finish_reason is FinishReason.ERROR
    assert refusal.finished_requests == ()


def test_numbers_are_said_once_beside_many_steps_at_once() -> None:
    rig = Rig(LONG)
    rig.add(request("t", max_tokens=5_000))
    rig.step()
    assert rig.burst(NOBODY, 16) == 16
    rig.add(pooling("large", "token_embed", MANY), pooling("small"))
    while not rig.outputs("small"):
        assert rig.burst(NOBODY, 16) == 1
    assert the_tensor(rig, "small") == expected(pooling())
    assert the_tensor(rig, "large").shape == (200_000, DIM)
    assert rig.burst(NOBODY, 16) == 16


def test_statistics_are_told_although_the_first_client_is_told_nothing_yet() -> None:
    limits = BatchingConfig(num_gpu_blocks=2**15, max_num_batched_tokens=2**18, async_scheduling=False)
    rig = Rig(replace(LONG, max_model_len=2**18, batching=limits))
    rig.add(pooling("large", "token_embed", MANY, client=0), request("t", client=1))
    while not rig.outputs("t"):
        rig.step()
    assert rig.outputs("large") == []
    (envelope,) = rig.to(1)
    assert isinstance(envelope, StepOutputs)
    assert envelope.scheduler_stats is not None


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
