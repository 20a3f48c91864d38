# SPDX-License-Identifier: Apache-2.0
"""What no well-behaved frontend sends, or only seldom and at bad moments, to a rank with a scheduler."""

import weakref
from dataclasses import replace
from typing import Any

import pytest

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.timing import TimingConfig
from mockengine.wire.requests import MultiModalFeature
from mockengine.wire.utility import UtilityCall
from tests.engine.test_batching import expected_tokens, play
from tests.support.rig import CONFIG, Rig, request

PER_REQUEST = TimingConfig(timing="per_request", ttft_ms=10.0, itl_ms=5.0)
STEPS = TimingConfig(timing="step", step_base_ms=10.0)
BOTH = pytest.mark.parametrize("timing", [PER_REQUEST, STEPS], ids=["per_request", "step"])


def config(timing: TimingConfig, **limits: Any) -> EngineConfig:
    batching = BatchingConfig(**{"num_gpu_blocks": 200, **limits})
    return replace(CONFIG, max_model_len=256, batching=batching, timing=timing)


def reset_prefix_cache(rig: Rig) -> None:
    rig.receive(UtilityCall(0, 1, "reset_prefix_cache", (True,)))


@BOTH
def test_a_threshold_for_long_prompts_leaves_nobody_behind(timing: TimingConfig) -> None:
    rig = Rig(config(timing, long_prefill_token_threshold=10))
    prompts = {name: list(range(start, start + 100)) for name, start in (("a", 0), ("b", 1_000))}
    rig.add(*(request(name, prompt=prompt, max_tokens=4) for name, prompt in prompts.items()))
    play(rig)
    for name, prompt in prompts.items():
        assert rig.tokens(name) == expected_tokens(prompt, 4)


@BOTH
def test_a_preemption_neither_repeats_nor_skips_a_token(timing: TimingConfig) -> None:
    rig = Rig(config(timing, num_gpu_blocks=17))
    prompts = {f"r{number}": [number] * 16 for number in range(3)}
    rig.add(*(request(name, prompt=prompt, max_tokens=200) for name, prompt in prompts.items()))
    play(rig)
    assert len([event for output in rig.outputs("r2") for event in output.events]) > 2
    for name, prompt in prompts.items():
        assert rig.tokens(name) == expected_tokens(prompt, 200)


@BOTH
def test_an_abort_after_a_reset_that_preempted_costs_nothing_else(timing: TimingConfig) -> None:
    rig = Rig(config(timing))
    rig.add(*(request(name, max_tokens=20) for name in ("gone", "stays")))
    play(rig, until=rig.now + 0.05)
    reset_prefix_cache(rig)
    rig.abort("gone")
    play(rig)
    assert rig.tokens("stays") == expected_tokens([1, 2, 3], 20)
    assert rig.ranks.num_requests == 0


@BOTH
def test_an_arrival_time_that_is_no_number_is_ordered_somehow(timing: TimingConfig) -> None:
    rig = Rig(config(timing, max_num_seqs=1, scheduling_policy="priority"))
    for number in range(30):
        arrival_time = float("nan") if number % 3 == 0 else float(-number)
        rig.add(request(f"r{number}", prompt=[number], arrival_time=arrival_time))
    rig.abort(*(f"r{number}" for number in range(0, 30, 2)))
    play(rig)
    for number in range(1, 30, 2):
        assert rig.tokens(f"r{number}") == expected_tokens([number], 4)
    assert rig.ranks.num_requests == 0


@BOTH
@pytest.mark.parametrize(("offset", "length"), [(3, 2**62), (-(2**62), 2**62 + 9), (2**62, 5), (5, -9), (-3, 8)])
def test_an_image_that_claims_more_than_the_prompt_costs_no_more(
    offset: int, length: int, timing: TimingConfig
) -> None:
    feature = MultiModalFeature("image", "an image", offset, length, mm_hash=None, has_data=False)
    rig = Rig(config(timing))
    rig.add(request(prompt=[1] * 40, mm_features=(feature,)))
    rig.add(request("honest", prompt=[1] * 40, mm_features=(replace(feature, offset=3, length=8),)))
    play(rig)
    assert rig.tokens("r1") == rig.tokens("honest")
    assert len(rig.tokens("r1")) == 4


def test_requests_that_are_aborted_long_before_their_moment_leave_nothing_behind() -> None:
    prompts: list[weakref.ref[Any]] = []
    rig = Rig(replace(config(replace(PER_REQUEST, ttft_ms=3_600_000.0)), batching=None))
    for number in range(5_000):
        asked = request(f"r{number}", prompt=[number])
        prompts.append(weakref.ref(asked.prompt_token_ids))
        rig.add(asked)
        rig.step()
        rig.abort(f"r{number}")
    del asked
    assert sum(prompt() is not None for prompt in prompts) < 1_500


@BOTH
def test_requests_of_a_client_that_does_not_read_keep_their_places(timing: TimingConfig) -> None:
    rig = Rig(replace(config(timing, max_num_seqs=1), clients=2))
    rig.step(frozenset({1}))
    rig.add(request("first", max_tokens=30))
    play(rig, until=rig.now + 0.05)
    names = [f"r{number}" for number in range(6)]
    rig.add(*(request(name, max_tokens=1, client=1 - number % 2) for number, name in enumerate(names)))
    for _ in range(3):
        rig.step(frozenset({1}))
    play(rig)
    outputs = [output for _, envelope in rig.heard for output in getattr(envelope, "outputs", ())]
    assert [output.request_id for output in outputs if output.request_id in names] == names
