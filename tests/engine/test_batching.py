# SPDX-License-Identifier: Apache-2.0
"""Requests that share an engine as vLLM's scheduler has it: what frontends hear of it, and when."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.timing import TimingConfig
from mockengine.replies.key import reply_key
from mockengine.replies.random import RandomTokens
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.outputs import EventType, FinishReason, StepOutputs, UtilityReply
from mockengine.wire.requests import LoraRequest
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import PrefillStats
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig, request

STEP_MS = 10.0
RESET_RUNNING = True
NOBODY: frozenset[int] = frozenset()


def config(*, timing: TimingConfig | None = None, chunk: int = 1, clients: int = 1, **limits: Any) -> EngineConfig:
    return replace(
        CONFIG,
        max_model_len=512,
        output_token_chunk_size=chunk,
        clients=clients,
        batching=BatchingConfig(**{"num_gpu_blocks": 200, "async_scheduling": False, **limits}),
        timing=timing or TimingConfig(timing="instant"),
    )


def steps_of(milliseconds: float, **more: Any) -> TimingConfig:
    return TimingConfig(timing="step", step_base_ms=milliseconds, **more)


def play(rig: Rig, until: float | None = None, most_turns: int = 5_000) -> None:
    """Let time pass from deadline to deadline, until nothing is due or until some time."""
    for _ in range(most_turns):
        due = rig.ranks.next_deadline(rig.now, NOBODY)
        if due is None or (until is not None and due > until):
            rig.now = rig.now if until is None else until
            return
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, NOBODY))
    raise AssertionError(f"still stepping after {most_turns} turns")


def steps(rig: Rig) -> list[StepOutputs]:
    return [envelope for envelope in rig.to(0) if isinstance(envelope, StepOutputs)]


def said_at(rig: Rig, request_id: str) -> list[float]:
    return [
        envelope.timestamp
        for envelope in steps(rig)
        if any(output.request_id == request_id for output in envelope.outputs)
    ]


def expected_tokens(prompt: list[int], count: int, lora_request: LoraRequest | None = None) -> list[int]:
    key = reply_key(request(prompt=prompt, lora_request=lora_request), CONFIG.replies.seed, CONFIG.replies.seed_scope)
    return RandomTokens(Vocabulary(32_000)).tokens(key, 0, count)


# What is said.


@pytest.mark.parametrize(("is_async", "envelopes"), [(False, 4), (True, 5)])
def test_three_tokens_are_as_many_messages_as_from_a_real_engine(envelopes: int, *, is_async: bool) -> None:
    rig = Rig(config(async_scheduling=is_async))
    rig.add(request(prompt=[1] * 40, max_tokens=3))
    play(rig)
    said = steps(rig)
    assert [len(envelope.outputs) for envelope in said] == [1, 1, 1] + [0] * (envelopes - 3)
    first, *_, last = [output for envelope in said for output in envelope.outputs]
    assert [event.type for event in first.events] == [EventType.QUEUED, EventType.SCHEDULED]
    assert first.prefill_stats == PrefillStats(40, 40, num_cache_creation_tokens=32)
    assert last.finish_reason is FinishReason.LENGTH
    loads = [envelope.scheduler_stats for envelope in said if envelope.scheduler_stats is not None]
    assert [load.num_running_reqs for load in loads] == [1, 1] + [0] * (envelopes - 2)
    assert [load.prefix_cache_stats.queries for load in loads] == [40] + [0] * (envelopes - 1)
    assert loads[0].kv_cache_usage == pytest.approx(3 / 199)
    assert loads[-1].kv_cache_usage == 0


@settings(deadline=None, max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=25),
    chunk=st.sampled_from([1, 2, 8]),
    blocks=st.integers(33, 60),
    is_async=st.booleans(),
)
def test_every_reply_is_whole_whatever_runs_beside_it(
    arrivals: list[tuple[int, int, int]], chunk: int, blocks: int, *, is_async: bool
) -> None:
    rig = Rig(
        config(chunk=chunk, num_gpu_blocks=blocks, max_num_seqs=6, max_num_batched_tokens=64, async_scheduling=is_async)
    )
    prompts = {}
    for number, (pause, prompt_tokens, max_tokens) in enumerate(arrivals):
        prompts[f"r{number}"] = [number % 3] * prompt_tokens
        rig.add(request(f"r{number}", prompt=prompts[f"r{number}"], max_tokens=max_tokens))
        for _ in range(pause):
            if rig.ranks.next_deadline(rig.now, NOBODY) is not None:
                rig.step()
    play(rig)
    for (name, prompt), (_, _, max_tokens) in zip(prompts.items(), arrivals, strict=True):
        assert rig.tokens(name) == expected_tokens(prompt, max_tokens)
        assert rig.finish_reason(name) is FinishReason.LENGTH
        stats = [output.prefill_stats for output in rig.outputs(name) if output.prefill_stats is not None]
        assert [stat.num_prompt_tokens for stat in stats] == [len(prompt)]
    last = steps(rig)[-1].scheduler_stats
    assert last is not None
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 4, 8])
@pytest.mark.parametrize("prompt_tokens", [1, 7, 100, 400])
def test_tokens_of_an_iteration_add_up(chunk: int, prompt_tokens: int) -> None:
    rig = Rig(config(chunk=chunk, max_num_batched_tokens=64))
    prompt = list(range(prompt_tokens))
    for name in ("first", "again"):
        rig.add(request(name, prompt=prompt, max_tokens=50))
        play(rig)
    outputs = [output for envelope in steps(rig) for output in envelope.outputs]
    computed = sum(output.prefill_stats.num_computed_tokens for output in outputs if output.prefill_stats)
    cached = (prompt_tokens - 1) // 16 * 16
    assert computed == 2 * prompt_tokens - cached
    assert sum(len(output.new_token_ids) for output in outputs) == 100


def test_a_preempted_request_tells_so_and_goes_on_where_it_was() -> None:
    rig = Rig(config(num_gpu_blocks=33, max_num_seqs=4))
    rig.add(*(request(f"r{number}", prompt=[number] * 150, max_tokens=200) for number in range(2)))
    play(rig)
    events = [[event.type for output in rig.outputs(f"r{number}") for event in output.events] for number in range(2)]
    assert EventType.PREEMPTED not in events[0]
    assert events[1][:2] == [EventType.QUEUED, EventType.SCHEDULED]
    assert events[1][2:4] == [EventType.PREEMPTED, EventType.SCHEDULED]
    stamps = [event.timestamp for output in rig.outputs("r1") for event in output.events]
    assert stamps == sorted(stamps)
    for number in range(2):
        assert rig.tokens(f"r{number}") == expected_tokens([number] * 150, 200)


def test_what_exceeds_the_cache_together_waits_instead_of_preempting() -> None:
    rig = Rig(config(num_gpu_blocks=33))
    prompt_tokens = round(0.6 * 32 * 16)
    rig.add(*(request(f"r{number}", prompt=[number] * prompt_tokens, max_tokens=20) for number in range(2)))
    rig.step()
    rig.step()
    load = steps(rig)[-1].scheduler_stats
    assert load is not None
    assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 1)
    play(rig)
    assert not [event for output in rig.outputs("r0") for event in output.events if event.type is EventType.PREEMPTED]


def test_a_repeated_prompt_is_hit_exactly() -> None:
    rig = Rig(config())
    for name in ("first", "again"):
        rig.add(request(name, prompt=list(range(100)), max_tokens=2))
        play(rig)
    stats = rig.outputs("again")[0].prefill_stats
    assert stats == PrefillStats(100, 4, num_cached_tokens=96, num_local_cached_tokens=96)
    hits = [envelope.scheduler_stats.prefix_cache_stats.hits for envelope in steps(rig) if envelope.scheduler_stats]
    assert sum(hits) == 96


@pytest.mark.parametrize(
    "params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}], ids=lambda params: next(iter(params))
)
def test_who_must_not_read_the_cache_computes_everything(params: dict[str, Any]) -> None:
    rig = Rig(config())
    rig.add(request("first", prompt=list(range(100)), max_tokens=2))
    play(rig)
    rig.add(request("again", prompt=list(range(100)), sampling_params=SamplingParams(max_tokens=2, **params)))
    play(rig)
    stats = rig.outputs("again")[0].prefill_stats
    assert stats is not None
    assert stats.num_computed_tokens == 100


def test_resetting_the_cache_has_an_effect_and_fails_while_it_is_in_use() -> None:
    rig = Rig(config())

    def reset(*args: object) -> object:
        asked_at = len(rig.heard)
        rig.receive(UtilityCall(0, asked_at, "reset_prefix_cache", args))
        # It is answered between steps.
        while not (replies := [each for _, each in rig.heard[asked_at:] if isinstance(each, UtilityReply)]):
            rig.step()
        return replies[0].result

    rig.add(request("first", prompt=list(range(100)), max_tokens=30))
    rig.step()
    assert reset() is False
    assert reset(RESET_RUNNING) is True
    play(rig)
    assert rig.tokens("first") == expected_tokens(list(range(100)), 30)
    assert reset() is True
    rig.add(request("again", prompt=list(range(100)), max_tokens=2))
    play(rig)
    stats = rig.outputs("again")[0].prefill_stats
    assert stats is not None
    assert stats.num_cached_tokens == 0
    assert any(envelope.scheduler_stats.prefix_cache_stats.reset for envelope in steps(rig) if envelope.scheduler_stats)


def test_priorities_decide_who_is_admitted() -> None:
    rig = Rig(config(max_num_seqs=1, scheduling_policy="priority"))
    rig.add(*(request(f"r{number}", max_tokens=2, priority=9 - number) for number in range(3)))
    play(rig)
    order = [output.request_id for envelope in steps(rig) for output in envelope.outputs]
    assert order == ["r2", "r2", "r1", "r1", "r0", "r0"]


# When it is said.


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_end_so_long_after_one_another_however_late_the_loop_is(*, is_async: bool) -> None:
    rig = Rig(config(timing=steps_of(STEP_MS), async_scheduling=is_async))
    began = rig.now
    rig.add(request("r", max_tokens=50))
    due: list[float] = []
    while (deadline := rig.ranks.next_deadline(rig.now, NOBODY)) is not None:
        due.append(deadline)
        # Each time some microseconds late, and once by several milliseconds.
        rig.now = max(rig.now, deadline) + (0.004 if len(due) == 20 else 0.000_05)
        rig._hear(rig.ranks.step(rig.now, NOBODY))
    last = said_at(rig, "r")[-1]
    assert began + 50 * STEP_MS / 1e3 <= last <= began + 50 * STEP_MS / 1e3 + 0.000_2


def test_a_step_takes_what_it_computes() -> None:
    timing = steps_of(10.0, step_ms_per_prefill_token=0.1, step_ms_per_decode=1.0, step_ms_per_context_token=0.01)
    rig = Rig(config(timing=timing, max_num_batched_tokens=256))
    began = rig.now
    rig.add(request("r", prompt=[1] * 200, max_tokens=3))
    play(rig)
    first, second, third = (at - began for at in said_at(rig, "r"))
    assert first == pytest.approx(0.010 + 200 * 0.0001)
    assert second - first == pytest.approx(0.010 + 0.001 + 200 * 0.00001)
    assert third - second == pytest.approx(0.010 + 0.001 + 201 * 0.00001)


def test_all_durations_are_scaled() -> None:
    rig = Rig(config(timing=steps_of(STEP_MS, time_scale=0.5)))
    began = rig.now
    rig.add(request("r", max_tokens=4))
    play(rig)
    assert said_at(rig, "r")[-1] == pytest.approx(began + 4 * STEP_MS / 1e3 / 2)


def test_a_long_prompt_delays_those_who_decode() -> None:
    rig = Rig(config(timing=steps_of(1.0, step_ms_per_prefill_token=1.0), max_num_batched_tokens=512))
    rig.add(request("decoding", max_tokens=60))
    play(rig, until=rig.now + 0.02)
    rig.add(request("long", prompt=[1] * 300, max_tokens=2))
    play(rig)
    stamps = said_at(rig, "decoding")
    assert max(later - earlier for earlier, later in pairwise(stamps)) > 0.3


@pytest.mark.parametrize(("is_async", "steps_later"), [(False, 2), (True, 3)])
def test_who_arrives_in_the_middle_of_a_step_waits_for_its_end(steps_later: int, *, is_async: bool) -> None:
    rig = Rig(config(timing=steps_of(STEP_MS), async_scheduling=is_async))
    began = rig.now
    rig.add(request("running", max_tokens=20))
    play(rig, until=began + 0.035)
    rig.add(request("late", max_tokens=2))
    play(rig)
    # The step under way, the one that is scheduled already where scheduling is ahead, and its own.
    assert said_at(rig, "late")[0] == pytest.approx(began + 0.030 + steps_later * STEP_MS / 1e3)


def test_the_same_seed_gives_the_same_times() -> None:
    timing = steps_of(STEP_MS, step_jitter=0.3)

    def stamps() -> list[float]:
        rig = Rig(config(timing=timing))
        rig.add(*(request(f"r{number}", max_tokens=20) for number in range(3)))
        play(rig)
        return [envelope.timestamp for envelope in steps(rig)]

    once = stamps()
    assert once == stamps()
    gaps = {round(later - earlier, 6) for earlier, later in pairwise(once)}
    assert len(gaps) > 10


# Clients that go away, or do not read.


@pytest.mark.parametrize("is_async", [False, True])
def test_an_abort_frees_the_place_at_once(*, is_async: bool) -> None:
    rig = Rig(config(timing=steps_of(STEP_MS), max_num_seqs=1, async_scheduling=is_async))
    rig.add(request("gone", max_tokens=100), request("next", max_tokens=2))
    play(rig, until=rig.now + 0.05)
    rig.abort("gone")
    assert len(rig.tokens("gone")) < 10
    play(rig)
    assert len(rig.tokens("next")) == 2
    assert [reason for served, reason, _ in rig.watcher.finished if served.request_id == "gone"] == ["abort"]
    assert said_at(rig, "next")[-1] - said_at(rig, "gone")[-1] < 6 * STEP_MS / 1e3


@pytest.mark.parametrize("is_async", [False, True])
def test_everything_ends_at_a_shutdown(*, is_async: bool) -> None:
    rig = Rig(config(timing=steps_of(STEP_MS), max_num_seqs=2, async_scheduling=is_async))
    rig.add(*(request(f"r{number}", max_tokens=100) for number in range(4)))
    play(rig, until=rig.now + 0.055)
    rig.receive(UtilityCall(0, 1, "is_sleeping", ()))
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert [each.result for each in rig.to(0) if isinstance(each, UtilityReply)] == [False]
    # Without waiting for the step that was computed.
    for _ in range(5):
        if rig.ranks.next_deadline(rig.now, NOBODY) is not None:
            rig._hear(rig.ranks.step(rig.now, NOBODY))
    assert rig.ranks.next_deadline(rig.now, NOBODY) is None
    assert rig.ranks.num_requests == 0
    assert {rig.finish_reason(f"r{number}") for number in range(4)} == {FinishReason.ABORT}


def test_who_does_not_read_holds_up_only_itself() -> None:
    rig = Rig(config(timing=steps_of(STEP_MS), clients=2))
    rig.add(*(request(f"r{client}", client=client, max_tokens=30) for client in range(2)))
    rig.step()
    blocked = frozenset({1})
    for _ in range(60):
        due = rig.ranks.next_deadline(rig.now, blocked)
        if due is None:
            break
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, blocked))
    assert len(rig.tokens("r0")) == 30
    assert len(rig.tokens("r1")) <= 1
    assert rig.ranks.next_deadline(rig.now, blocked) is None
    play(rig)
    assert rig.tokens("r1") == rig.tokens("r0")


def test_every_client_hears_that_the_load_is_gone() -> None:
    rig = Rig(config(clients=3))
    rig.add(*(request(f"r{client}", client=client, max_tokens=2 + 3 * client) for client in range(3)))
    play(rig)
    for client in range(3):
        loads = [each.scheduler_stats for each in rig.to(client) if isinstance(each, StepOutputs)]
        heard = [load for load in loads if load is not None]
        assert not heard or heard[-1].num_running_reqs == 0


def test_a_client_that_does_not_read_is_sent_nothing_while_others_wait_for_its_place() -> None:
    rig = Rig(config(max_num_seqs=1, clients=2))
    rig.add(request("unread", client=0, max_tokens=30))
    rig.step()
    rig.add(request("waiting", client=1, max_tokens=2))
    blocked, heard, turns = frozenset({0}), len(rig.to(0)), 0
    while (due := rig.ranks.next_deadline(rig.now, blocked)) is not None:
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, blocked))
        turns += 1
    assert turns < 10
    assert len(rig.to(0)) - heard <= 2
    play(rig)
    assert len(rig.tokens("waiting")) == 2


def test_the_gauge_of_those_who_wait_for_something_else_returns_to_nothing() -> None:
    rig = Rig(config(clients=2))
    rig.add(request("running", client=1, max_tokens=30))
    rig.step(frozenset({0}))
    rig.add(*(request(f"held{number}", client=0, max_tokens=2) for number in range(3)))
    for _ in range(5):
        rig.step(frozenset({0}))
    play(rig)
    for client in range(2):
        loads = [each.scheduler_stats for each in rig.to(client) if isinstance(each, StepOutputs)]
        heard = [load for load in loads if load is not None]
        assert heard[-1].num_skipped_waiting_reqs == heard[-1].num_waiting_reqs == heard[-1].num_running_reqs == 0
