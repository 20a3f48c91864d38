# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: how long outputs are, what is counted of drafts, and that replies stay what they are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import Acceptance, MetricsLevel, SpeculationConfig, even_rates
from mockengine.engine.timing import TimingConfig
from mockengine.replies.key import reply_key
from mockengine.wire.lines import line_of_release
from mockengine.wire.outputs import EventType, FinishReason, SpecDecodeMetrics
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import SpecDecodingStats
from tests.engine.test_batching import expected_tokens, play, said_at, steps, steps_of
from tests.support.rig import CONFIG, EOS, Rig, request

RATES = (0.8, 0.6, 0.3)
K = len(RATES)
ALL, NONE = (1.0,) * K, (0.0,) * K
RUNNERS: dict[str, dict[str, Any]] = {
    "off": {},
    "off, per_request": {"timing": TimingConfig(timing="per_request", itl_ms=5)},
    "vllm, per_request": {"timing": TimingConfig(timing="per_request", itl_ms=5), "batching": {}},
    "vllm, synchronous": {"batching": {"async_scheduling": False}},
    "vllm, asynchronous": {"batching": {"async_scheduling": True}},
}
everywhere = pytest.mark.parametrize("runner", RUNNERS)


def config(
    rates: Sequence[float] = RATES, runner: str = "off", metrics: MetricsLevel = "summary", **more: Any
) -> EngineConfig:
    values: dict[str, Any] = {"max_model_len": 1_024, **RUNNERS[runner], **more}
    if "batching" in values:
        values["batching"] = BatchingConfig(**{"num_gpu_blocks": 1_000, **values["batching"]})
    return replace(CONFIG, speculation=SpeculationConfig(acceptance_rates=tuple(rates), metrics=metrics), **values)


def lengths(rig: Rig, request_id: str = "r1") -> list[int]:
    return [len(output.new_token_ids) for output in rig.outputs(request_id)]


def counted(rig: Rig, k: int = K) -> SpecDecodingStats:
    """Return what all statistics say together."""
    said = [envelope.scheduler_stats.spec_decoding_stats for envelope in steps(rig) if envelope.scheduler_stats]
    of = [stats for stats in said if stats is not None]
    return SpecDecodingStats(
        num_spec_tokens=k,
        num_drafts=sum(stats.num_drafts for stats in of),
        num_draft_tokens=sum(stats.num_draft_tokens for stats in of),
        num_accepted_tokens=sum(stats.num_accepted_tokens for stats in of),
        num_accepted_tokens_per_pos=tuple(sum(stats.num_accepted_tokens_per_pos[i] for stats in of) for i in range(k)),
        num_draft_tokens_per_pos=tuple(sum(stats.num_draft_tokens_per_pos[i] for stats in of) for i in range(k)),
    )


# How many tokens an output has.


@everywhere
@pytest.mark.parametrize(
    ("rates", "expected"), [(ALL, [1, 4, 4, 4, 2]), (NONE, [1] * 15), ((1.0, 1.0, 0.0), [1, *[3] * 4, 2])]
)
def test_an_output_has_one_token_and_the_accepted_drafts(
    rates: Sequence[float], expected: list[int], runner: str
) -> None:
    rig = Rig(config(rates, runner))
    rig.add(request(prompt=[5] * 20, max_tokens=15))
    play(rig)
    assert lengths(rig) == expected
    assert rig.tokens("r1") == expected_tokens([5] * 20, 15)
    assert rig.finish_reason("r1") is FinishReason.LENGTH


@everywhere
def test_rates_are_those_of_each_draft_and_all_before_it(runner: str) -> None:
    rig = Rig(config(runner=runner))
    rig.add(*(request(f"r{number}", prompt=[number] * 20, max_tokens=900) for number in range(20)))
    play(rig)
    said = counted(rig)
    assert said.num_drafts > 6_000
    assert said.num_accepted_tokens == sum(said.num_accepted_tokens_per_pos)
    for rate, accepted, drafted in zip(
        RATES, said.num_accepted_tokens_per_pos, said.num_draft_tokens_per_pos, strict=True
    ):
        assert accepted / drafted == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize("k", [1, 2, 5, 128])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 0.7, 0.99, 1.0])
def test_one_rate_is_the_share_of_all_drafts(rate: float, k: int) -> None:
    rates = even_rates(rate, k)
    assert sum(rates) / k == pytest.approx(rate, abs=1e-9)
    ratios = [later / earlier for earlier, later in zip((1.0, *rates), rates, strict=False) if earlier > 1e-9]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_how_many_are_accepted_follows_from_key_and_position() -> None:
    acceptance = Acceptance(RATES)
    key = reply_key(request(), CONFIG.replies.seed, CONFIG.replies.seed_scope)
    whole = acceptance.draw(key, 0, 500)
    assert [acceptance.draw(key, start, 1)[0] for start in range(500)] == list(whole)
    assert set(whole) == set(range(K + 1))
    assert acceptance.draw(key + 1, 0, 500) != whole


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=20),
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    blocks=st.integers(33, 60),
    runner=st.sampled_from(list(RUNNERS)),
)
def test_a_reply_is_the_same_with_drafts_whatever_runs_beside_it(
    arrivals: list[tuple[int, int, int]], rates: list[float], blocks: int, runner: str
) -> None:
    rates = sorted(rates, reverse=True)
    values = RUNNERS[runner]
    limits = {"num_gpu_blocks": blocks, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    more: dict[str, Any] = {"batching": {**values["batching"], **limits}} if "batching" in values else {}
    rig = Rig(config(rates, runner, max_model_len=512, **more))
    for number, (pause, prompt_tokens, max_tokens) in enumerate(arrivals):
        rig.add(request(f"r{number}", prompt=[number % 3] * prompt_tokens, max_tokens=max_tokens))
        for _ in range(pause):
            if rig.ranks.next_deadline(rig.now, frozenset()) is not None:
                rig.step()
    play(rig)
    outputs = tokens = 0
    for number, (_, prompt_tokens, max_tokens) in enumerate(arrivals):
        said = lengths(rig, f"r{number}")
        assert rig.tokens(f"r{number}") == expected_tokens([number % 3] * prompt_tokens, max_tokens)
        assert all(1 <= count <= 1 + len(rates) for count in said)
        assert said[0] == 1
        outputs, tokens = outputs + len(said), tokens + sum(said)
    assert rig.watcher.tokens == tokens
    assert rig.ranks.num_requests == 0
    total = counted(rig, len(rates))
    # Padding has drafts too, and who was preempted gets one token when it comes back.
    assert tokens - outputs <= total.num_accepted_tokens <= tokens - outputs + len(rates) * len(arrivals)
    last = steps(rig)[-1].scheduler_stats
    assert last is not None
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0)


@everywhere
def test_a_run_is_like_the_one_before(runner: str) -> None:
    def run() -> list[list[int]]:
        rig = Rig(config(runner=runner))
        rig.add(*(request(f"r{number}", prompt=[number] * 20, max_tokens=200) for number in range(5)))
        play(rig)
        return [lengths(rig, f"r{number}") for number in range(5)]

    assert run() == run()


def test_outputs_are_alike_however_requests_run() -> None:
    said = []
    for runner in RUNNERS:
        rig = Rig(config(runner=runner))
        rig.add(*(request(f"r{number}", prompt=[number] * 20, max_tokens=300) for number in range(5)))
        play(rig)
        said.append([lengths(rig, f"r{number}") for number in range(5)])
    assert all(each == said[0] for each in said)


# Where a reply ends.


@everywhere
def test_what_is_accepted_beyond_the_end_is_counted_and_not_said(runner: str) -> None:
    rig = Rig(config(ALL, runner))
    rig.add(request(prompt=[5] * 20, max_tokens=3))
    play(rig)
    assert lengths(rig) == [1, 2]
    assert counted(rig).num_accepted_tokens == 3


@everywhere
def test_a_reply_that_ends_by_itself_ends_with_its_eos(runner: str) -> None:
    rig = Rig(config(ALL, runner, replies=replace(CONFIG.replies, default_output_tokens=7)))
    params = SamplingParams(max_tokens=None, eos_token_id=EOS)
    rig.add(request(prompt=[5] * 20, sampling_params=params))
    play(rig)
    assert lengths(rig) == [1, 4, 2]
    assert rig.tokens("r1")[-1] == EOS
    assert rig.finish_reason("r1") is FinishReason.STOP


@everywhere
def test_drafts_end_with_the_context(runner: str) -> None:
    rig = Rig(config(ALL, runner, max_model_len=64))
    rig.add(request(prompt=[5] * 57, max_tokens=None))
    play(rig)
    # 57 + 1 + 4 leave room for two tokens, the second of which is not computed any more.
    assert lengths(rig) == [1, 4, 2]
    assert counted(rig).num_draft_tokens_per_pos == (2, 1, 1)


# What is counted.


@everywhere
def test_every_output_but_the_first_has_drafts(runner: str) -> None:
    rig = Rig(config(runner=runner))
    rig.add(*(request(f"r{number}", prompt=[number] * 20, max_tokens=200) for number in range(5)))
    play(rig)
    outputs = [lengths(rig, f"r{number}") for number in range(5)]
    said = counted(rig)
    assert said.num_drafts == sum(map(len, outputs)) - 5
    assert said.num_draft_tokens == K * said.num_drafts
    # A last output may have lost some of what was accepted.
    for place in range(K):
        whole = sum(count > 1 + place for each in outputs for count in each[:-1])
        assert 0 <= said.num_accepted_tokens_per_pos[place] - whole <= 5


@everywhere
def test_statistics_have_no_drafts_where_there_were_none(runner: str) -> None:
    rig = Rig(config(runner=runner))
    rig.add(request(prompt=[5] * 20, max_tokens=1))
    play(rig)
    said = [envelope.scheduler_stats for envelope in steps(rig) if envelope.scheduler_stats is not None]
    assert said
    assert all(stats.spec_decoding_stats is None for stats in said)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_of_one_token_left_is_padded_beside_others(*, is_async: bool) -> None:
    rig = Rig(config(ALL, "vllm, synchronous", batching={"async_scheduling": is_async}))
    rig.add(request("long", prompt=[9] * 20, max_tokens=40))
    for _ in range(3):
        rig.step()
    rig.add(request("short", prompt=[5], max_tokens=1))
    play(rig)
    assert lengths(rig, "short") == [1]
    # Beside those of the other one there is one more, with nothing accepted.
    assert counted(rig).num_drafts == len(lengths(rig, "long")) - 1 + 1
    assert counted(rig).num_accepted_tokens == K * (len(lengths(rig, "long")) - 1)


@everywhere
def test_the_last_output_tells_of_the_drafts_of_its_request(runner: str) -> None:
    rig = Rig(config((1.0, 1.0, 0.0), runner))
    rig.add(request(prompt=[5] * 20, max_tokens=12))
    play(rig)
    *others, last = [output.spec_decode_metrics for output in rig.outputs("r1")]
    assert others == [None] * 4
    assert last == SpecDecodeMetrics(num_spec_tokens=3, histogram=(0, 0, 4, 0), num_draft_tokens=12)


@pytest.mark.parametrize("level", ["none", "detailed"])
def test_that_may_be_nothing_or_every_output(level: MetricsLevel) -> None:
    rig = Rig(config((1.0, 1.0, 0.0), metrics=level, max_model_len=64))
    rig.add(request(prompt=[5] * 57, max_tokens=None))
    play(rig)
    expected = SpecDecodeMetrics(
        num_spec_tokens=3,
        histogram=(0, 0, 2, 0),
        num_draft_tokens=5,
        per_step_accepted=(2, 2),
        per_step_drafted=(3, 2),
    )
    assert rig.outputs("r1")[-1].spec_decode_metrics == (expected if level == "detailed" else None)


@pytest.mark.parametrize(("release", "is_told"), [("0.24", False), ("0.28", False), ("0.29", True), ("0.33", True)])
def test_only_lines_that_know_them_hear_of_drafts_of_a_request(release: str, *, is_told: bool) -> None:
    rig = Rig(config(), line=line_of_release(release))
    rig.add(request(max_tokens=9))
    play(rig)
    assert (rig.outputs("r1")[-1].spec_decode_metrics is not None) == is_told
    assert counted(rig).num_drafts > 0


# Preemption, aborts, time.


@pytest.mark.parametrize("runner", ["vllm, synchronous", "vllm, asynchronous", "vllm, per_request"])
def test_a_preempted_request_goes_on_where_it_was(runner: str) -> None:
    rig = Rig(config(RATES, runner, max_model_len=512, batching={**RUNNERS[runner]["batching"], "num_gpu_blocks": 33}))
    rig.add(*(request(f"r{number}", prompt=[number] * 150, max_tokens=200) for number in range(2)))
    play(rig)
    for number in range(2):
        assert rig.tokens(f"r{number}") == expected_tokens([number] * 150, 200)
    events = [event.type for number in range(2) for output in rig.outputs(f"r{number}") for event in output.events]
    assert EventType.PREEMPTED in events


@everywhere
def test_an_aborted_request_says_and_counts_nothing_more(runner: str) -> None:
    rig = Rig(config(runner=runner))
    rig.add(request("gone", prompt=[1] * 20, max_tokens=900), request("stays", prompt=[2] * 20, max_tokens=50))
    play(rig, until=rig.now + 0.02) if "per_request" in runner else [rig.step() for _ in range(6)]
    rig.abort("gone")
    said = len(rig.outputs("gone"))
    play(rig)
    assert len(rig.outputs("gone")) == said
    assert rig.tokens("stays") == expected_tokens([2] * 20, 50)
    assert rig.ranks.num_requests == 0


@everywhere
def test_who_does_not_read_holds_up_only_itself(runner: str) -> None:
    rig = Rig(config(runner=runner, clients=2))
    rig.add(*(request(f"r{client}", prompt=[client] * 20, client=client, max_tokens=60) for client in range(2)))
    for _ in range(400):
        rig.now += 0.001
        rig._hear(rig.ranks.step(rig.now, frozenset({1})))
    assert rig.tokens("r0") == expected_tokens([0] * 20, 60)
    assert rig.tokens("r1") == []
    play(rig)
    assert rig.tokens("r1") == expected_tokens([1] * 20, 60)


def test_drafts_make_replies_faster_and_steps_no_longer() -> None:
    took = []
    for rates in (NONE, ALL):
        rig = Rig(config(rates, "vllm, asynchronous", timing=steps_of(10, step_ms_per_decode=1)))
        began = rig.now
        rig.add(request(prompt=[5] * 20, max_tokens=41))
        play(rig)
        stamps = said_at(rig, "r1")
        gaps = [later - earlier for earlier, later in pairwise(stamps)]
        assert gaps == pytest.approx([0.011] * len(gaps))
        took.append(stamps[-1] - began)
    assert took == pytest.approx([0.01 + 40 * 0.011, 0.01 + 10 * 0.011])


def test_itl_is_the_time_between_outputs() -> None:
    rig = Rig(config(ALL, "off, per_request"))
    rig.add(request(prompt=[5] * 20, max_tokens=41))
    play(rig)
    stamps = said_at(rig, "r1")
    assert len(stamps) == 11
    assert stamps[-1] - stamps[0] == pytest.approx(10 * 0.005, abs=0.001)
