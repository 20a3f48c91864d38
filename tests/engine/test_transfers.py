# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation: what a producer answers and keeps, and what a consumer waits for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig, KvTransferConfig
from mockengine.engine.timing import TimingConfig
from mockengine.wire.outputs import EventType, FinishReason, UtilityReply
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import KvFetchStages, PrefillStats, PrefixCacheStats, SchedulerStats
from mockengine.wire.utility import UtilityCall
from tests.engine.test_batching import NOBODY, expected_tokens, play, said_at, steps, steps_of
from tests.support.rig import CONFIG, Rig, request

STEP_S = 0.01
TRANSFER_S = 0.5
PER_TOKEN_S = 0.001
HOLD_S = 2.0
BLOCKS = 199
PROMPT = list(range(100))
NO_NUMBERS: tuple[object, ...] = (None, [], [[]], "1", 7, {}, [1, [2]], [None], [["1"]], [[True]])
SEND = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
RECEIVE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_engine_id": "there",
    "remote_request_id": "its-name-there",
    "remote_host": "10.0.0.7",
    "remote_port": 5_600,
    "tp_size": 1,
    "remote_num_tokens": 100,
}


def config(*, timing: TimingConfig | None = None, size: int = 1, role: str = "both", **limits: Any) -> EngineConfig:
    transfer = KvTransferConfig(
        engine_id="here",
        is_producer=role != "consumer",
        is_consumer=role != "producer",
        transfer_s=TRANSFER_S,
        transfer_s_per_token=PER_TOKEN_S,
        hold_s=HOLD_S,
    )
    return replace(
        CONFIG,
        max_model_len=512,
        data_parallel_size=size,
        batching=BatchingConfig(**{"num_gpu_blocks": BLOCKS + 1, "async_scheduling": False, **limits}),
        kv_transfer=None if role == "none" else transfer,
        timing=timing or steps_of(STEP_S * 1e3),
    )


def transfer(
    request_id: str, params: object, *, prompt: list[int] = PROMPT, max_tokens: int = 1, **fields: Any
) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params})
    return request(request_id, prompt=prompt, sampling_params=sampling, **fields)


def answer(rig: Rig, request_id: str) -> Mapping[str, Any] | None:
    *others, last = rig.outputs(request_id)
    assert all(output.kv_transfer_params is None for output in others)
    return last.kv_transfer_params


def loads(rig: Rig) -> list[SchedulerStats]:
    return [envelope.scheduler_stats for envelope in steps(rig) if envelope.scheduler_stats is not None]


def hits(rig: Rig) -> tuple[int, int]:
    """Return queries and hits of other instances' caches so far."""
    told = [load.connector_prefix_cache_stats or PrefixCacheStats() for load in loads(rig)]
    return sum(stats.queries for stats in told), sum(stats.hits for stats in told)


def scheduled_at(rig: Rig, request_id: str) -> float:
    events = [event for output in rig.outputs(request_id) for event in output.events]
    return next(event.timestamp for event in events if event.type is EventType.SCHEDULED)


# A producer.


def test_a_prefill_is_answered_with_what_a_decode_instance_needs() -> None:
    rig = Rig(config())
    rig.add(transfer("r", SEND))
    play(rig)
    assert rig.tokens("r") == expected_tokens(PROMPT, 1)
    assert answer(rig, "r") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "remote_engine_id": "here",
        "remote_request_id": "r",
        "remote_host": "localhost",
        "remote_port": 5_600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_registration_generation": 1,
        "remote_prefill_cached_tokens": 0,
    }


def test_ranks_have_names_and_ports_of_their_own() -> None:
    rig = Rig(config(size=2), ranks=2)
    for rank in range(2):
        rig.add(transfer(f"r{rank}", SEND), rank=rank)
    play(rig)
    answers = [answer(rig, f"r{rank}") or {} for rank in range(2)]
    assert [(each["remote_engine_id"], each["remote_port"]) for each in answers] == [
        ("here_dp0", 5_600),
        ("here_dp1", 5_601),
    ]


def test_blocks_are_kept_until_they_have_been_loaded() -> None:
    rig = Rig(config())
    rig.add(transfer("r", SEND))
    ended = rig.now + STEP_S
    free_at = ended + HOLD_S + TRANSFER_S + 100 * PER_TOKEN_S
    play(rig, until=free_at - 0.001)
    assert loads(rig)[-1].num_running_reqs == 0
    assert loads(rig)[-1].kv_cache_usage == pytest.approx(7 / BLOCKS)
    assert rig.ranks.next_deadline(rig.now, NOBODY) == pytest.approx(free_at)
    heard = len(rig.heard)
    play(rig)
    assert rig.now == pytest.approx(free_at)
    assert [load.kv_cache_usage for load in loads(rig)[heard:]] == [0.0]


def test_numbers_of_blocks_are_those_of_no_others() -> None:
    rig = Rig(config())
    shared = PROMPT[:64]
    rig.add(transfer("first", SEND), transfer("second", SEND, prompt=[*shared, *[7] * 36]))
    play(rig, until=rig.now + 1)
    (first,), (second,) = (dict(answer(rig, name) or {})["remote_block_ids"] for name in ("first", "second"))
    assert first[:4] == second[:4]
    assert len({*first, *second}) == 7 + 3
    play(rig)
    rig.add(transfer("third", SEND, prompt=[8] * 40))
    play(rig, until=rig.now + 1)
    assert dict(answer(rig, "third") or {})["remote_block_ids"] == [[1, 2, 3]]


def test_tokens_that_were_cached_are_told_to_whoever_goes_on() -> None:
    rig = Rig(config())
    for name in ("first", "again"):
        rig.add(transfer(name, SEND))
        play(rig)
    assert dict(answer(rig, "again") or {})["remote_prefill_cached_tokens"] == 96


def test_only_what_has_been_said_in_one_output_is_a_prefill_whose_hits_are_told() -> None:
    rig = Rig(config())
    rig.add(transfer("r", SEND, max_tokens=3))
    play(rig)
    params = dict(answer(rig, "r") or {})
    assert params["remote_num_tokens"] == 102
    assert "remote_prefill_cached_tokens" not in params


def test_a_prefill_that_is_aborted_keeps_nothing() -> None:
    rig = Rig(config())
    rig.add(transfer("r", SEND, max_tokens=50))
    play(rig, until=rig.now + 3 * STEP_S)
    rig.abort("r")
    play(rig, until=rig.now + 2 * STEP_S)
    assert all(output.kv_transfer_params is None for output in rig.outputs("r"))
    assert loads(rig)[-1].kv_cache_usage == 0
    assert rig.ranks.next_deadline(rig.now, NOBODY) is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
def test_who_asks_for_nothing_gets_no_answer_and_keeps_nothing(params: object) -> None:
    rig = Rig(config())
    rig.add(transfer("r", params))
    play(rig, until=rig.now + 3 * STEP_S)
    assert answer(rig, "r") is None
    assert loads(rig)[-1].kv_cache_usage == 0
    assert rig.watcher.transfers_ignored == []


@pytest.mark.parametrize("params", [SEND, RECEIVE])
def test_without_a_role_nothing_is_exchanged_and_a_warning_says_so(params: object) -> None:
    rig = Rig(config(role="none"))
    rig.add(transfer("r", params))
    play(rig)
    assert answer(rig, "r") is None
    assert rig.outputs("r")[0].prefill_stats == PrefillStats(100, 100, num_cache_creation_tokens=96)
    assert loads(rig)[0].connector_prefix_cache_stats is None
    assert rig.watcher.transfers_ignored == [("r", "kv_role is none")]


def test_who_finds_no_room_beside_kept_blocks_sleeps_until_they_are_free() -> None:
    rig = Rig(config(num_gpu_blocks=33))
    rig.add(transfer("kept", SEND, prompt=[1] * 400))
    came = rig.now
    play(rig, until=came + 2 * STEP_S)
    rig.add(request("waits", prompt=[2] * 200))
    free_at = came + STEP_S + HOLD_S + TRANSFER_S + 400 * PER_TOKEN_S
    play(rig, until=came + 1)
    assert rig.ranks.next_deadline(rig.now, NOBODY) == pytest.approx(free_at)
    play(rig)
    assert scheduled_at(rig, "waits") == pytest.approx(free_at)


def test_kept_blocks_cannot_be_forgotten() -> None:
    rig = Rig(config())
    rig.add(transfer("r", SEND))
    play(rig, until=rig.now + 1)

    def reset() -> object:
        (reply,) = rig.receive(UtilityCall(0, len(rig.heard), "reset_prefix_cache", ()))
        assert isinstance(reply, UtilityReply)
        return reply.result

    assert reset() is False
    play(rig)
    assert reset() is True


# A consumer.


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_waits_for_the_transfer_and_then_computes_one_token(*, is_async: bool) -> None:
    rig = Rig(config(async_scheduling=is_async))
    came = rig.now
    rig.add(transfer("r", RECEIVE, max_tokens=3))
    loaded_at = came + TRANSFER_S + 100 * PER_TOKEN_S
    play(rig, until=loaded_at - 0.001)
    assert rig.outputs("r") == []
    load = loads(rig)[-1]
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_skipped_waiting_reqs) == (0, 0, 1)
    assert load.kv_cache_usage == pytest.approx(7 / BLOCKS)
    assert load.num_kv_fetch_reqs_by_stage == KvFetchStages(in_progress=1)
    # It sleeps until then.
    assert len(steps(rig)) <= 2
    assert rig.ranks.next_deadline(rig.now, NOBODY) == pytest.approx(loaded_at)
    play(rig)
    assert rig.tokens("r") == expected_tokens(PROMPT, 3)
    first, *_ = rig.outputs("r")
    assert first.prefill_stats == PrefillStats(100, 0, num_cached_tokens=100, num_external_cached_tokens=100)
    assert [event.type for event in first.events] == [EventType.QUEUED, EventType.SCHEDULED]
    assert scheduled_at(rig, "r") == pytest.approx(loaded_at)
    assert said_at(rig, "r")[0] == pytest.approx(loaded_at + STEP_S)
    stages = [each.num_kv_fetch_reqs_by_stage for each in loads(rig)]
    assert KvFetchStages(completed_waiting=1) in stages
    assert stages[-1] == KvFetchStages()
    assert hits(rig) == (100, 100)
    assert loads(rig)[-1].kv_cache_usage == 0


def test_only_what_is_not_cached_is_loaded() -> None:
    rig = Rig(config())
    rig.add(request("before", prompt=PROMPT[:64], max_tokens=1))
    play(rig)
    came = rig.now
    rig.add(transfer("r", RECEIVE, max_tokens=2))
    play(rig)
    stats = rig.outputs("r")[0].prefill_stats
    assert stats == PrefillStats(100, 0, 100, num_local_cached_tokens=64, num_external_cached_tokens=36)
    assert scheduled_at(rig, "r") - came == pytest.approx(TRANSFER_S + 36 * PER_TOKEN_S)
    # The one before asked other instances too.
    assert hits(rig) == (64 + 36, 36)


def test_what_has_been_loaded_can_be_hit_and_not_before() -> None:
    rig = Rig(config())
    rig.add(transfer("r", RECEIVE))
    play(rig, until=rig.now + TRANSFER_S / 2)
    rig.add(request("meanwhile", prompt=PROMPT, max_tokens=1))
    play(rig)
    rig.add(request("after", prompt=PROMPT, max_tokens=1))
    play(rig)
    cached = {name: rig.outputs(name)[0].prefill_stats for name in ("meanwhile", "after")}
    assert cached["meanwhile"] == PrefillStats(100, 100, num_cache_creation_tokens=96)
    assert cached["after"] == PrefillStats(100, 4, 96, num_local_cached_tokens=96)


def test_others_go_on_while_one_loads() -> None:
    rig = Rig(config())
    rig.add(transfer("loads", RECEIVE), request("runs", prompt=[5] * 10, max_tokens=80))
    came = rig.now
    play(rig)
    assert said_at(rig, "runs")[-1] == pytest.approx(came + 80 * STEP_S)
    # At the end of the step that is under way then.
    assert scheduled_at(rig, "loads") - came == pytest.approx(TRANSFER_S + 100 * PER_TOKEN_S, abs=STEP_S)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_host": None}, "kv_transfer_params.remote_host: nil where a str is expected"),
        ({"remote_port": 5.5}, "kv_transfer_params.remote_port: float 5.5 where an int or a str is expected"),
        ({"remote_engine_id": 7}, "kv_transfer_params.remote_engine_id: int 7 where a str is expected"),
        ({"remote_request_id": []}, "kv_transfer_params.remote_request_id: array of 0 where a str is expected"),
        *(({"remote_block_ids": blocks}, "where block numbers are expected") for blocks in NO_NUMBERS),
        ({"remote_num_tokens": "100"}, "kv_transfer_params.remote_num_tokens: str '100' where an int is expected"),
        ({"remote_num_tokens": 99}, "the other instance holds 99 tokens of a prompt of 100"),
        ({"remote_num_tokens": None, "remote_block_ids": [1] * 6}, "holds 96 tokens of a prompt of 100"),
    ],
)
def test_params_that_cannot_be_followed_cost_a_warning_and_the_prompt_is_computed(
    change: dict[str, object], reason: str
) -> None:
    rig = Rig(config())
    rig.add(transfer("r", RECEIVE | change))
    play(rig)
    assert rig.finish_reason("r") is FinishReason.LENGTH
    assert rig.outputs("r")[0].prefill_stats == PrefillStats(100, 100, num_cache_creation_tokens=96)
    ((name, told),) = rig.watcher.transfers_ignored
    assert name == "r"
    assert reason in told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(params=JSON | st.dictionaries(st.sampled_from(list(RECEIVE)), JSON).map(lambda change: RECEIVE | change))
def test_whatever_the_params_the_request_is_served(params: object) -> None:
    rig = Rig(config())
    rig.add(transfer("r", params, max_tokens=3))
    play(rig)
    assert rig.tokens("r") == expected_tokens(PROMPT, 3)
    assert loads(rig)[-1].kv_cache_usage == 0


@pytest.mark.parametrize("params", ["yes", 7, [RECEIVE]])
def test_params_that_are_no_map_cost_a_warning(params: object) -> None:
    rig = Rig(config())
    rig.add(transfer("r", params))
    play(rig)
    assert rig.finish_reason("r") is FinishReason.LENGTH
    assert len(rig.watcher.transfers_ignored) == 1


@pytest.mark.parametrize(
    "change", [{"remote_block_ids": list(range(1, 8))}, {"remote_port": "5600"}, {"remote_num_tokens": None}]
)
def test_the_forms_of_older_releases_will_do(change: dict[str, object]) -> None:
    rig = Rig(config())
    rig.add(transfer("r", RECEIVE | change))
    play(rig)
    assert hits(rig) == (100, 100)
    assert rig.watcher.transfers_ignored == []


def test_a_prompt_may_be_shorter_than_what_the_other_instance_holds() -> None:
    rig = Rig(config())
    rig.add(transfer("r", RECEIVE, prompt=PROMPT[:50]))
    play(rig)
    assert hits(rig) == (50, 50)


def test_who_must_not_read_a_cache_loads_nothing() -> None:
    rig = Rig(config())
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, extra_args={"kv_transfer_params": RECEIVE})
    rig.add(request("r", prompt=PROMPT, sampling_params=sampling))
    came = rig.now
    play(rig)
    assert said_at(rig, "r")[0] - came == pytest.approx(STEP_S)
    assert hits(rig) == (100, 0)
    assert rig.watcher.transfers_ignored == []


@pytest.mark.parametrize("has_moments", [False, True])
def test_blocks_of_a_request_that_is_aborted_are_free_when_they_are_loaded(*, has_moments: bool) -> None:
    rig = Rig(config(timing=TimingConfig(timing="per_request") if has_moments else None))
    came = rig.now
    rig.add(transfer("r", RECEIVE))
    play(rig, until=came + 0.1)
    rig.abort("r")
    play(rig, until=came + 0.2)
    load = loads(rig)[-1]
    assert (load.num_skipped_waiting_reqs, load.num_kv_fetch_reqs_by_stage) == (0, KvFetchStages())
    assert load.kv_cache_usage == pytest.approx(7 / BLOCKS)
    play(rig)
    assert rig.now == pytest.approx(came + TRANSFER_S + 100 * PER_TOKEN_S)
    assert loads(rig)[-1].kv_cache_usage == 0
    assert rig.outputs("r") == []


def test_blocks_of_a_request_that_is_aborted_after_that_are_free_at_once() -> None:
    rig = Rig(config(max_num_seqs=1))
    came = rig.now
    rig.add(transfer("loads", RECEIVE), request("runs", prompt=[5] * 10, max_tokens=200))
    play(rig, until=came + 1)
    assert loads(rig)[-1].num_kv_fetch_reqs_by_stage == KvFetchStages(completed_waiting=1)
    before = loads(rig)[-1].kv_cache_usage
    rig.abort("loads")
    play(rig, until=came + 1 + STEP_S)
    assert loads(rig)[-1].kv_cache_usage == pytest.approx(before - 7 / BLOCKS, abs=1 / BLOCKS)


def test_who_waits_for_a_slot_has_not_begun_to_load() -> None:
    rig = Rig(config(max_num_seqs=1))
    rig.add(request("runs", prompt=[5] * 10, max_tokens=20), transfer("loads", RECEIVE))
    play(rig, until=rig.now + 5 * STEP_S)
    assert loads(rig)[-1].num_kv_fetch_reqs_by_stage == KvFetchStages(waiting_to_start=1)
    play(rig)
    assert hits(rig) == (10 + 100, 100)


def test_blocks_that_a_prompt_is_still_to_be_computed_into_are_not_loaded_into() -> None:
    rig = Rig(config(num_gpu_blocks=33, long_prefill_token_threshold=64))
    came = rig.now
    rig.add(request("long", prompt=[5] * 400, max_tokens=1), transfer("loads", RECEIVE))
    rig.add(transfer("loads too", RECEIVE | {"remote_num_tokens": 200}, prompt=[6] * 200))
    play(rig, until=came + 1.5 * STEP_S)
    # Of 32 blocks the long prompt has 4 and needs 21 more; the 7 that are left do for the first of the others.
    assert loads(rig)[-1].kv_cache_usage == pytest.approx((4 + 7) / 32)
    play(rig, until=came + 6.5 * STEP_S)
    assert loads(rig)[-1].num_kv_fetch_reqs_by_stage == KvFetchStages(waiting_to_start=1, in_progress=1)
    play(rig, until=came + 8.5 * STEP_S)
    assert loads(rig)[-1].num_kv_fetch_reqs_by_stage == KvFetchStages(in_progress=2)


def test_a_request_that_was_rejected_before_it_came_says_and_holds_nothing() -> None:
    rig = Rig(config())
    rig.add(transfer("r", RECEIVE, prompt=[0], abort_immediately=True))
    play(rig)
    assert rig.outputs("r") == []
    assert [served.request_id for served, _, _ in rig.watcher.finished] == ["r"]
    assert all(load.kv_cache_usage == 0 for load in loads(rig))
    assert rig.ranks.next_deadline(rig.now, NOBODY) is None


# Both.


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_no_role_forbids_what_is_asked(role: str) -> None:
    rig = Rig(config(role=role))
    rig.add(transfer("sends", SEND), transfer("receives", RECEIVE, prompt=[3] * 100))
    play(rig)
    assert answer(rig, "sends") is not None
    assert hits(rig) == (200, 100)


@pytest.mark.parametrize(("role", "steps_waited"), [("consumer", 1.5), ("producer", 0.5)])
def test_blocks_that_a_step_under_way_may_write_into_are_not_free_before_its_end(
    role: str, steps_waited: float
) -> None:
    rig = Rig(config(role=role, async_scheduling=True, num_gpu_blocks=33))
    rig.add(request("first", prompt=[1] * 300, max_tokens=100))
    play(rig, until=rig.now + 3.5 * STEP_S)
    # It is in both steps that are under way.
    rig.abort("first")
    rig.add(request("second", prompt=[2] * 300, max_tokens=1))
    aborted = rig.now
    play(rig)
    assert (scheduled_at(rig, "second") - aborted) / STEP_S == pytest.approx(steps_waited)
    assert loads(rig)[-1].kv_cache_usage == 0


@pytest.mark.parametrize("timing", ["instant", "per_request", "step"])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_producer_answers_a_consumer_can_use(timing: str, *, is_async: bool) -> None:
    models = {
        "instant": TimingConfig(timing="instant"),
        "per_request": TimingConfig(timing="per_request", ttft_ms=40.0, prefill_ms_per_token=1.0, itl_ms=3.0),
        "step": steps_of(STEP_S * 1e3),
    }
    producer, consumer = (Rig(config(timing=models[timing], async_scheduling=is_async)) for _ in range(2))
    producer.add(transfer("r", SEND))
    play(producer)
    came = consumer.now
    consumer.add(transfer("r", answer(producer, "r"), max_tokens=9))
    play(consumer)
    assert consumer.tokens("r") == expected_tokens(PROMPT, 9)
    assert hits(consumer) == (100, 100)
    # Of what takes time per token of the prompt nothing is left.
    first_s = {"instant": 0.0, "per_request": 0.04, "step": STEP_S}[timing]
    assert said_at(consumer, "r")[0] - came == pytest.approx(TRANSFER_S + 100 * PER_TOKEN_S + first_s, abs=0.001)
    for rig in (producer, consumer):
        assert (loads(rig)[-1].num_running_reqs, loads(rig)[-1].kv_cache_usage) == (0, 0)


@settings(deadline=None, max_examples=40)
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 0.3), st.integers(2, 90), st.integers(1, 40), st.sampled_from("sr-")),
        min_size=1,
        max_size=20,
    ),
    aborted=st.sets(st.integers(0, 19), max_size=5),
    blocks=st.integers(33, 60),
    is_async=st.booleans(),
    has_moments=st.booleans(),
)
def test_every_reply_is_whole_and_every_block_free_in_the_end(
    arrivals: list[tuple[float, int, int, str]], aborted: set[int], blocks: int, *, is_async: bool, has_moments: bool
) -> None:
    timing = TimingConfig(timing="per_request", ttft_ms=20.0, itl_ms=3.0) if has_moments else steps_of(5.0)
    rig = Rig(
        config(
            timing=timing, num_gpu_blocks=blocks, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=is_async
        )
    )
    asked = {"s": SEND, "r": RECEIVE, "-": None}
    for number, (pause, prompt_tokens, max_tokens, kind) in enumerate(arrivals):
        prompt = [number % 3] * prompt_tokens
        rig.add(transfer(f"r{number}", asked[kind], prompt=prompt, max_tokens=max_tokens))
        play(rig, until=rig.now + pause)
        if number in aborted:
            rig.abort(f"r{number}")
    play(rig, most_turns=20_000)
    for number, (_, prompt_tokens, max_tokens, kind) in enumerate(arrivals):
        if number not in aborted:
            assert rig.tokens(f"r{number}") == expected_tokens([number % 3] * prompt_tokens, max_tokens)
            assert (answer(rig, f"r{number}") is not None) == (kind == "s")
    last = loads(rig)[-1]
    assert (last.num_running_reqs, last.num_waiting_reqs, last.num_skipped_waiting_reqs) == (0, 0, 0)
    assert (last.kv_cache_usage, last.num_kv_fetch_reqs_by_stage) == (0, KvFetchStages())


@pytest.mark.parametrize("has_moments", [False, True])
def test_who_loads_while_nobody_reads_goes_on_when_somebody_does(*, has_moments: bool) -> None:
    timing = TimingConfig(timing="per_request", itl_ms=3.0) if has_moments else steps_of(STEP_S * 1e3)
    rig = Rig(config(timing=timing))
    rig.add(transfer("r", RECEIVE, max_tokens=3))
    play(rig, until=rig.now + 0.1)
    everybody = frozenset({0})
    turns = 0
    while (due := rig.ranks.next_deadline(rig.now, everybody)) is not None:
        rig.now = max(rig.now, due)
        rig.ranks.step(rig.now, everybody)
        turns += 1
    assert turns <= 4
    assert rig.outputs("r") == []
    play(rig)
    assert rig.tokens("r") == expected_tokens(PROMPT, 3)
