# SPDX-License-Identifier: Apache-2.0
"""Requests with moments of their own: when they say what, with and without a scheduler."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.timing import TimingConfig
from mockengine.wire.outputs import EventType, FinishReason, StepOutputs
from tests.engine.test_batching import expected_tokens, play, said_at, steps
from tests.support.rig import CONFIG, Rig, request

TTFT_S = 0.5
ITL_S = 0.004_68
TICK_S = 0.000_5
NOBODY: frozenset[int] = frozenset()


def config(*, limits: dict[str, Any] | None = None, clients: int = 1, chunk: int = 1, **timing: Any) -> EngineConfig:
    values: dict[str, Any] = {"ttft_ms": 1e3 * TTFT_S, "itl_ms": 1e3 * ITL_S, **timing}
    return replace(
        CONFIG,
        max_model_len=512,
        clients=clients,
        output_token_chunk_size=chunk,
        batching=None if limits is None else BatchingConfig(**{"num_gpu_blocks": 200, **limits}),
        timing=TimingConfig(timing="per_request", **values),
    )


@pytest.mark.parametrize("requests", [1, 64])
@pytest.mark.parametrize("limits", [None, {"num_gpu_blocks": 1_000}], ids=["off", "vllm"])
def test_tokens_leave_at_their_moments_and_never_before(requests: int, limits: dict[str, Any] | None) -> None:
    rig = Rig(config(limits=limits))
    arrived: dict[str, float] = {}
    for number in range(requests):
        name = f"r{number}"
        arrived[name] = rig.now
        rig.add(request(name, prompt=[number], max_tokens=100))
        play(rig, until=rig.now + 0.000_37)
    play(rig)
    for name, came in arrived.items():
        stamps = said_at(rig, name)
        assert len(stamps) == 100
        for position, stamp in enumerate(stamps):
            due = came + TTFT_S + position * ITL_S
            assert due - 1e-9 <= stamp <= due + TICK_S + 1e-6


def test_what_is_due_at_almost_the_same_time_is_said_in_one_step() -> None:
    rig = Rig(config())
    for number in range(100):
        rig.add(request(f"r{number}", prompt=[number], max_tokens=50))
        rig.now += 0.000_01
    play(rig)
    assert len(steps(rig)) < 4 * 50


def test_cached_prompt_tokens_cost_nothing() -> None:
    rig = Rig(config(limits={}, prefill_ms_per_token=1.0))
    waited = []
    for name in ("first", "again"):
        came = rig.now
        rig.add(request(name, prompt=list(range(100)), max_tokens=1))
        play(rig)
        waited.append(said_at(rig, name)[0] - came)
    assert waited == pytest.approx([TTFT_S + 0.1, TTFT_S + 0.004], abs=TICK_S)


def test_everything_takes_longer_beside_others() -> None:
    rig = Rig(config(limits={"max_num_seqs": 10}, time_factor_under_load=2.0))
    rig.add(*(request(f"r{number}", prompt=[number], max_tokens=2) for number in range(10)))
    began = rig.now
    play(rig)
    assert said_at(rig, "r0")[0] - began == pytest.approx(2 * TTFT_S, abs=TICK_S)


def test_who_finds_no_slot_waits_for_a_whole_request() -> None:
    rig = Rig(config(limits={"max_num_seqs": 2}))
    began = rig.now
    rig.add(*(request(f"r{number}", prompt=[number], max_tokens=11) for number in range(6)))
    rig.step()
    load = rig.ranks.engines[0]
    assert (load.num_running, load.num_waiting) == (2, 4)
    play(rig)
    takes_s = TTFT_S + 10 * ITL_S
    for number in range(6):
        scheduled = next(
            event.timestamp
            for output in rig.outputs(f"r{number}")
            for event in output.events
            if event.type is EventType.SCHEDULED
        )
        assert scheduled - began == pytest.approx(number // 2 * takes_s, abs=0.01)
    last = steps(rig)[-1].scheduler_stats
    assert last is not None
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0)


def test_without_a_scheduler_nothing_is_counted_of_a_cache() -> None:
    rig = Rig(config())
    rig.add(request("r", max_tokens=3))
    play(rig)
    for envelope in steps(rig):
        assert envelope.scheduler_stats is None or envelope.scheduler_stats.kv_cache_usage == 0


@settings(deadline=None, max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=20),
    chunk=st.sampled_from([1, 4]),
    blocks=st.sampled_from([None, 33, 50]),
    spread=st.sampled_from([0.0, 2.0]),
)
def test_every_reply_is_whole_whatever_runs_beside_it(
    arrivals: list[tuple[float, int, int]], chunk: int, blocks: int | None, spread: float
) -> None:
    limits = None if blocks is None else {"num_gpu_blocks": blocks, "max_num_seqs": 5}
    rig = Rig(config(limits=limits, chunk=chunk, itl_stddev_ms=spread))
    for number, (pause_s, prompt_tokens, max_tokens) in enumerate(arrivals):
        rig.add(request(f"r{number}", prompt=[number % 3] * prompt_tokens, max_tokens=max_tokens))
        play(rig, until=rig.now + pause_s)
    play(rig)
    for number, (_, prompt_tokens, max_tokens) in enumerate(arrivals):
        assert rig.tokens(f"r{number}") == expected_tokens([number % 3] * prompt_tokens, max_tokens)
    assert rig.ranks.num_requests == 0
    assert rig.ranks.next_deadline(rig.now, NOBODY) is None


def test_an_abort_lets_the_next_one_in() -> None:
    rig = Rig(config(limits={"max_num_seqs": 1}))
    rig.add(request("gone", max_tokens=100), request("next", max_tokens=2))
    play(rig, until=rig.now + 0.6)
    aborted_at = rig.now
    rig.abort("gone")
    play(rig)
    assert said_at(rig, "next")[0] - aborted_at == pytest.approx(TTFT_S, abs=0.001)


def test_who_does_not_read_holds_up_only_itself_and_costs_no_core() -> None:
    rig = Rig(config(clients=2))
    rig.add(*(request(f"r{client}", client=client, max_tokens=30) for client in range(2)))
    blocked, turns = frozenset({1}), 0
    while (due := rig.ranks.next_deadline(rig.now, blocked)) is not None:
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, blocked))
        turns += 1
    assert turns < 100
    assert len(rig.tokens("r0")) == 30
    assert rig.tokens("r1") == []
    play(rig)
    assert rig.tokens("r1") == rig.tokens("r0")


def test_everything_ends_at_a_shutdown() -> None:
    rig = Rig(config(limits={"max_num_seqs": 2}))
    rig.add(*(request(f"r{number}", max_tokens=100) for number in range(4)))
    play(rig, until=rig.now + 0.6)
    rig._hear(rig.ranks.abort_everything(rig.now))
    play(rig)
    assert {rig.finish_reason(f"r{number}") for number in range(4)} == {FinishReason.ABORT}
    assert rig.ranks.num_requests == 0


def test_the_same_seed_gives_the_same_times() -> None:
    def stamps() -> list[float]:
        rig = Rig(config(itl_stddev_ms=1.0, ttft_stddev_ms=100.0, timing_distribution="lognormal"))
        rig.add(*(request(f"r{number}", prompt=[number], max_tokens=20) for number in range(3)))
        play(rig)
        return [envelope.timestamp for envelope in rig.to(0) if isinstance(envelope, StepOutputs)]

    assert stamps() == stamps()
