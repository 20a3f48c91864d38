# SPDX-License-Identifier: Apache-2.0
"""What the messages of an engine are when rules have something go wrong, on a clock that only the test moves."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mockengine.engine.config import BatchingConfig
from mockengine.engine.timing import TimingConfig
from mockengine.replies.steering import Steering
from mockengine.wire.codec import WireError
from mockengine.wire.lines import LINES, Line
from mockengine.wire.messages import StartDpWave
from mockengine.wire.outputs import FinishReason, RequestError, StartWave, UtilityReply, WaveComplete, read_envelope
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, PoolingParams, SamplingParams
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig, request

STEPPING = replace(
    CONFIG,
    batching=BatchingConfig(num_gpu_blocks=9),
    timing=TimingConfig(timing="step", step_base_ms=10, step_jitter=0),
)
PER_REQUEST = replace(
    CONFIG, batching=BatchingConfig(), timing=TimingConfig(timing="per_request", ttft_ms=10, itl_ms=10)
)


EMBED = PoolingParams(task="embed", use_activation=None, dimensions=None)


def rule(what: str, when: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"what": {"fault": what, **fields}, "when": when or {}}


def served(what: str, when: dict[str, Any] | None = None, *, max_tokens: int = 4, **fields: Any) -> Rig:
    """Serve a request that a fault strikes, and one beside it that none does."""
    rig = Rig(faults=[rule(what, {"request_id": "r1"} | (when or {}), **fields)])
    rig.add(request("r1", max_tokens=max_tokens), request("r2", max_tokens=max_tokens))
    rig.run()
    assert rig.finish_reason("r2") is FinishReason.LENGTH
    assert len(rig.tokens("r2")) == max_tokens
    return rig


# What becomes of a request.


def test_error_at_once() -> None:
    rig = served("error")
    (output,) = rig.outputs("r1")
    assert (output.finish_reason, list(output.new_token_ids), output.error) == (FinishReason.ERROR, [], None)
    assert rig.watcher.faults == [("error", "error", 0, "r1")]


def test_error_with_details_after_some_tokens() -> None:
    rig = served("error", code="out_of_memory", message="no room", retryable=True, after_tokens=2)
    assert len(rig.tokens("r1")) == 2
    assert rig.outputs("r1")[-1].error == RequestError("out_of_memory", "no room", retryable=True)


def test_a_reply_that_is_told_ends_early_too() -> None:
    rig = Rig(
        replace(CONFIG, replies=replace(CONFIG.replies, wishes=[Steering(9)])), faults=[rule("abort", after_tokens=2)]
    )
    asked = request(max_tokens=9)
    params = SamplingParams(max_tokens=9, extra_args={"mock_token_ids": [5, 6, 7, 8]})
    rig.add(replace(asked, sampling_params=params))
    rig.run()
    assert rig.tokens("r1") == [5, 6]
    assert rig.finish_reason("r1") is FinishReason.ABORT


def test_hang_until_it_is_aborted() -> None:
    rig = served("hang")
    assert rig.outputs("r1") == []
    assert rig.ranks.num_requests == 1
    rig.abort("r1")
    assert rig.ranks.num_requests == 0


def test_stall_for_ever_and_for_a_time() -> None:
    assert len(served("stall", after_outputs=2).outputs("r1")) == 2
    rig = Rig(faults=[rule("stall", after_outputs=2, for_s=5)])
    rig.add(request())
    for _ in range(10):
        rig.step()
    assert len(rig.tokens("r1")) == 2
    due = rig.ranks.next_deadline(rig.now, frozenset())
    assert due is not None
    assert due == pytest.approx(105.0, abs=0.1)
    rig.now = due
    rig.run()
    assert len(rig.tokens("r1")) == 4
    assert rig.finish_reason("r1") is FinishReason.LENGTH


@pytest.mark.parametrize(
    "config", [replace(CONFIG, itl_s=0.01), PER_REQUEST, STEPPING], ids=["pace", "moments", "steps"]
)
def test_slow_takes_times_as_long(config: Any) -> None:
    gaps = {}
    for factor in (1, 5):
        rig = Rig(config, faults=[rule("slow", factor=factor)])
        rig.add(request(max_tokens=6))
        said: list[float] = []
        while rig.step_when_due():
            said += [rig.now] * (len(rig.tokens("r1")) - len(said))
        gaps[factor] = [later - earlier for earlier, later in pairwise(said)]
    assert gaps[1] == pytest.approx([0.01] * 5, rel=0.02)
    assert gaps[5] == pytest.approx([0.05] * 5, rel=0.02)


@pytest.mark.parametrize(("what", "reason"), [("error", FinishReason.ERROR), ("abort", FinishReason.ABORT)])
def test_a_pooling_request_fails_with_the_tensor_that_frontends_need(what: str, reason: FinishReason) -> None:
    rig = Rig(replace(CONFIG, supported_tasks=("embed",)), faults=[rule(what)])
    rig.add(request(sampling_params=None, pooling_params=EMBED))
    rig.run()
    (output,) = rig.outputs("r1")
    assert (output.finish_reason, output.pooling_output) == (reason, EMPTY_POOLING_OUTPUT)


def steered(*faults: Any, **extra_args: Any) -> Rig:
    rig = Rig(replace(CONFIG, replies=replace(CONFIG.replies, wishes=[Steering(9)])), faults=faults)
    params = SamplingParams(max_tokens=4, extra_args=extra_args)
    rig.add(request("r1", sampling_params=params), request("r2"))
    rig.run()
    assert rig.finish_reason("r2") is FinishReason.LENGTH
    return rig


def test_a_client_asks_for_what_a_rule_says() -> None:
    rules = (rule("wrong_counts", {"steered": True}), rule("error", {"steered": True}))
    assert len(steered(*rules, mock_fault="wrong_counts").tokens("r1")) == 7
    assert steered(*rules, mock_fault="error").finish_reason("r1") is FinishReason.ERROR
    assert steered(*rules).finish_reason("r1") is FinishReason.LENGTH


def test_a_client_that_asks_for_a_rule_that_is_none_is_told() -> None:
    for rules in ((), (rule("error", {"steered": True}),)):
        (output,) = steered(*rules, mock_fault="absent").outputs("r1")
        assert output.error is not None
        assert output.error.code == "validation_error"
        assert output.error.message.startswith("fault: there is none of the name absent")


# What is wrong with messages.


def test_drop_leaves_nothing_and_the_engine_goes_on() -> None:
    rig = served("drop")
    assert rig.outputs("r1") == []
    assert [each[0].request_id for each in rig.watcher.finished] == ["r1", "r2"]


def test_wrong_counts() -> None:
    rig = served("wrong_counts", surplus=3)
    first, last = rig.outputs("r1")[0], rig.outputs("r1")[-1]
    assert len(rig.tokens("r1")) == 4 + 3
    assert last.finish_reason is FinishReason.LENGTH
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_cached_tokens == first.prefill_stats.num_prompt_tokens + 3


def test_duplicate_final_output() -> None:
    rig = served("duplicate_final_output")
    assert [output.finish_reason for output in rig.outputs("r1")][-2:] == [FinishReason.LENGTH] * 2
    assert rig.outputs("r1")[-1].new_token_ids == rig.outputs("r1")[-2].new_token_ids


def test_unknown_id() -> None:
    rig = served("unknown_id")
    assert len(rig.outputs("nobody-asked-for-r1")) == 1
    assert len(rig.tokens("r1")) == 4


BREAKING = {
    "undecodable_frame": "not msgpack",
    "envelope_too_long": "an array of at most",
    "output_too_long": "an array of 2 to",
    "mixed_envelope": "exactly one of",
    "negative_counter": "num_computed_tokens",
    "missing_stats_key": "kv_cache_usage",
}


@pytest.mark.parametrize(
    ("what", "line"),
    [
        pytest.param(what, line, id=f"{what}-{line.name}")
        for what in BREAKING
        for line in LINES
        if what != "negative_counter" or "prefill_stats" in line.output_fields
    ],
)
def test_one_message_is_wrong_as_the_fault_says(what: str, line: Line) -> None:
    rig = Rig(line=line, faults=[rule(what)])
    rig.decodes = False
    rig.add(request(max_tokens=3))
    rig.run()
    told = []
    for frames in rig.sent:
        try:
            read_envelope(frames, line)
        except WireError as error:
            told.append(str(error))
    assert len(told) == 1
    assert BREAKING[what] in told[0]


def test_edits_end_with_their_request() -> None:
    rig = Rig(faults=[rule("drop")])
    rig.add(request(max_tokens=50))
    rig.step()
    rig.abort("r1")
    rig.injector.remove("drop")
    rig.add(request(max_tokens=2))
    rig.run()
    assert len(rig.tokens("r1")) == 2


def test_what_is_not_changed_is_sent_as_it_was() -> None:
    plain, armed = Rig(), Rig(faults=[rule("drop", {"request_id": "absent"}), rule("unknown_id", {"request_id": "r1"})])
    for rig in (plain, armed):
        rig.add(request("r1", max_tokens=2), request("r2", max_tokens=6))
        rig.run()
    assert armed.sent[1:] == plain.sent[1:]


# Calls.


def called(what: str, **fields: Any) -> Rig:
    rig = Rig(faults=[rule(what, {"method": "is_sleeping"}, **fields)])
    rig.receive(UtilityCall(0, 7, "is_sleeping"))
    rig.receive(UtilityCall(0, 8, "is_scheduler_paused"))
    return rig


def replies(rig: Rig) -> list[tuple[int, Any, str | None]]:
    return [(each.call_id, each.result, each.failure) for _, each in rig.heard if isinstance(each, UtilityReply)]


def test_calls_are_not_answered_answered_twice_or_fail() -> None:
    other = (8, False, None)
    assert replies(called("no_reply")) == [other]
    assert replies(called("repeated_reply")) == [(7, False, None)] * 2 + [other]
    assert replies(called("failed_reply", message="no")) == [(7, None, "no"), other]


# The cache, and waves.


@pytest.mark.parametrize("config", [STEPPING, replace(PER_REQUEST, batching=BatchingConfig(num_gpu_blocks=9))])
def test_a_full_cache_keeps_requests_waiting_until_there_is_room(config: Any) -> None:
    rig = Rig(config)
    rig.ranks.engines[0].occupy_kv_cache(1.0)
    rig.add(request(max_tokens=3))
    for _ in range(5):
        rig.step()
    assert (rig.ranks.engines[0].num_running, rig.ranks.engines[0].num_waiting) == (0, 1)
    rig.ranks.engines[0].occupy_kv_cache(0.0)
    for _ in range(1_000):
        rig.now += 0.01
        rig.step()
    assert rig.finish_reason("r1") is FinishReason.LENGTH
    # All blocks are there again.
    rig.ranks.engines[0].occupy_kv_cache(0.5)
    rig.ranks.engines[0].occupy_kv_cache(0.0)
    rig.add(request("r2", prompt=range(1, 60), max_tokens=3))
    for _ in range(1_000):
        rig.now += 0.01
        rig.step()
    assert rig.finish_reason("r2") is FinishReason.LENGTH


def test_a_stale_wave_has_the_number_before_and_only_once() -> None:
    rig = Rig(replace(CONFIG, has_coordinator=True, has_waves=True, data_parallel_size=1))
    rig.receive(StartDpWave(4, None), client=-1)
    rig.ranks.engines[0].faults.make_wave_stale()
    rig.add(request(max_tokens=1))
    rig.run()
    rig.add(request("r2", max_tokens=1))
    rig.run()
    waves = [each for each in rig.to_coordinator if isinstance(each, StartWave | WaveComplete)]
    assert [each.wave for each in waves if isinstance(each, WaveComplete)] == [3, 5]


def test_a_frozen_rank_does_not_step_while_others_do() -> None:
    rig = Rig(ranks=2)
    rig.ranks.freeze(0)
    rig.add(request("r1"), rank=0)
    rig.add(request("r2"), rank=1)
    rig.run()
    assert (rig.outputs("r1"), rig.finish_reason("r2")) == ([], FinishReason.LENGTH)
    rig.ranks.thaw(0)
    rig.run()
    assert rig.finish_reason("r1") is FinishReason.LENGTH
