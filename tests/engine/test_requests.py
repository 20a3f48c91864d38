# SPDX-License-Identifier: Apache-2.0
"""How a request is served: lengths, chunks, endings, events, statistics."""

from dataclasses import replace

import pytest

from mockengine.engine.config import EngineConfig
from mockengine.wire.outputs import EngineCoreEvent, EventType, FinishReason, StepOutputs
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import PrefillStats
from tests.support.rig import CONFIG, EOS, Rig, request


def test_tokens_come_one_at_a_time_and_the_last_one_with_the_finish_reason() -> None:
    rig = Rig()
    rig.add(request(max_tokens=3))
    rig.run()
    outputs = rig.outputs("r1")
    assert [len(output.new_token_ids) for output in outputs] == [1, 1, 1]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert rig.watcher.tokens == 3


def test_last_chunk_is_clipped() -> None:
    rig = Rig(replace(CONFIG, output_token_chunk_size=4))
    rig.add(request(max_tokens=10))
    rig.run()
    assert [len(output.new_token_ids) for output in rig.outputs("r1")] == [4, 4, 2]
    assert rig.finish_reason("r1") is FinishReason.LENGTH


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 64, 65, 1_000])
def test_chunk_size_does_not_change_the_tokens(chunk_size: int) -> None:
    plain, chunked = (
        Rig(replace(CONFIG, max_model_len=500)),
        Rig(replace(CONFIG, max_model_len=500, output_token_chunk_size=chunk_size)),
    )
    for rig in (plain, chunked):
        rig.add(request(max_tokens=200))
        rig.run()
    assert chunked.tokens("r1") == plain.tokens("r1")
    assert len(plain.tokens("r1")) == 200


def test_max_tokens_zero_ends_at_once_without_a_token() -> None:
    rig = Rig()
    rig.add(request(max_tokens=0))
    rig.run()
    (output,) = rig.outputs("r1")
    assert (output.new_token_ids, output.finish_reason) == ((), FinishReason.LENGTH)


def test_reply_ends_where_the_context_ends() -> None:
    rig = Rig()
    rig.add(request(prompt=range(60), max_tokens=100))
    rig.run()
    assert len(rig.tokens("r1")) == 4
    assert rig.finish_reason("r1") is FinishReason.LENGTH


def _default_length(tokens: int) -> EngineConfig:
    return replace(CONFIG, replies=replace(CONFIG.replies, default_output_tokens=tokens))


def test_prompt_that_fills_the_context_ends_without_a_token() -> None:
    rig = Rig()
    rig.add(request(prompt=range(64)))
    rig.run()
    assert (rig.tokens("r1"), rig.finish_reason("r1")) == ([], FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [61, None])
def test_reply_without_max_tokens_ends_by_itself(max_tokens: int | None) -> None:
    """A frontend asks for all the context that is left (64 - 3) when its client sets no max_tokens."""
    rig = Rig(_default_length(10))
    rig.add(request(sampling_params=SamplingParams(max_tokens=max_tokens, eos_token_id=EOS)))
    rig.run()
    assert len(rig.tokens("r1")) == 10
    assert rig.tokens("r1")[-1] == EOS
    assert rig.finish_reason("r1") is FinishReason.STOP
    assert rig.outputs("r1")[-1].stop_reason is None


def test_reply_without_max_tokens_and_without_eos_ends_with_length() -> None:
    rig = Rig(_default_length(10))
    rig.add(request(max_tokens=61))
    rig.run()
    assert len(rig.tokens("r1")) == 10
    assert rig.finish_reason("r1") is FinishReason.LENGTH


def test_reply_without_max_tokens_honours_min_tokens() -> None:
    rig = Rig(_default_length(10))
    rig.add(request(sampling_params=SamplingParams(max_tokens=61, min_tokens=30, eos_token_id=EOS)))
    rig.run()
    assert len(rig.tokens("r1")) == 31


def test_explicit_max_tokens_is_not_mistaken_for_none() -> None:
    rig = Rig(_default_length(10))
    rig.add(request(sampling_params=SamplingParams(max_tokens=60, eos_token_id=EOS)))
    rig.run()
    assert len(rig.tokens("r1")) == 60
    assert rig.finish_reason("r1") is FinishReason.LENGTH


def test_default_length_can_be_switched_off() -> None:
    rig = Rig(_default_length(0))
    rig.add(request(sampling_params=SamplingParams(max_tokens=61, eos_token_id=EOS)))
    rig.run()
    assert len(rig.tokens("r1")) == 61


def test_first_output_tells_when_it_was_queued_and_scheduled_and_how_the_prompt_was_computed() -> None:
    rig = Rig()
    rig.add(request(trace_headers={"traceparent": "x"}))
    rig.run()
    first, *rest = rig.outputs("r1")
    assert first.events == (
        EngineCoreEvent(EventType.QUEUED, 100.0),
        EngineCoreEvent(EventType.SCHEDULED, 100.001),
    )
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
    assert first.trace_headers == {"traceparent": "x"}
    assert all(output.events == () and output.prefill_stats is None for output in rest)


def test_trace_headers_are_those_of_the_first_output_and_the_last() -> None:
    rig = Rig()
    headers = {"traceparent": "x"}
    rig.add(request("r1", trace_headers=headers), request("r2", max_tokens=1, trace_headers=headers), request("r3"))
    rig.run()
    assert [output.trace_headers for output in rig.outputs("r1")] == [headers, None, None, headers]
    assert [output.trace_headers for output in rig.outputs("r2")] == [headers]
    assert [output.trace_headers for output in rig.outputs("r3")] == [None] * 4


def test_requests_that_progress_in_one_step_share_one_message_per_client() -> None:
    rig = Rig(replace(CONFIG, clients=2))
    rig.add(request("a"), request("b", client=1), request("c"))
    first, second = rig.step()
    assert isinstance(first, StepOutputs)
    assert isinstance(second, StepOutputs)
    assert [output.request_id for output in first.outputs] == ["a", "c"]
    assert [output.request_id for output in second.outputs] == ["b"]
    assert [destination for destination, _ in rig.heard] == [0, 1]


def test_statistics_go_to_one_client_per_step_and_idle_ones_to_all_that_heard_of_load() -> None:
    rig = Rig(replace(CONFIG, clients=3))
    rig.add(request("a", client=1, max_tokens=2), request("b", client=2, max_tokens=3))
    rig.run()
    loads = {
        client: [
            envelope.scheduler_stats.num_running_reqs
            for envelope in rig.to(client)
            if isinstance(envelope, StepOutputs) and envelope.scheduler_stats is not None
        ]
        for client in range(3)
    }
    # Two requests, then one, told to client 1; the last step tells client 2; then idle, to whoever heard of load.
    assert loads == {0: [], 1: [2, 1, 0], 2: [0]}


def test_nothing_is_said_while_idle() -> None:
    rig = Rig()
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None
    rig.add(request())
    assert rig.ranks.next_deadline(rig.now, frozenset()) == rig.now
    rig.run()
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None
    assert rig.step() == []


def test_blocked_client_holds_only_its_own_requests() -> None:
    rig = Rig(replace(CONFIG, clients=2))
    rig.add(request("a"), request("b", client=1))
    for _ in range(5):
        rig.step(blocked=frozenset({0}))
    assert (len(rig.tokens("a")), len(rig.tokens("b"))) == (0, 4)
    assert rig.ranks.next_deadline(rig.now, frozenset({0})) is None
    rig.run()
    assert len(rig.tokens("a")) == 4


def test_observer_hears_of_start_and_finish() -> None:
    rig = Rig(replace(CONFIG, clients=2))
    rig.add(request(client=1))
    rig.run()
    (started,) = rig.watcher.started
    ((finished, reason, duration_s),) = rig.watcher.finished
    assert (started.request_id, started.engine, started.client, started.prompt_tokens) == ("r1", 0, 1, 3)
    assert (started.max_tokens, started.output_tokens) == (4, 0)
    assert (finished.output_tokens, reason) == (4, "length")
    assert duration_s == pytest.approx(0.004)
