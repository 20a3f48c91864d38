# SPDX-License-Identifier: Apache-2.0
"""An engine that gets other times, limits and replies while it runs."""

from dataclasses import replace

import pytest

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.reception import make_planner
from mockengine.engine.timing import TimingConfig
from mockengine.replies.length import fixed_length
from mockengine.wire.outputs import FinishReason
from mockengine.wire.sampling import SamplingParams
from tests.support.rig import CONFIG, EOS, Rig, request

PACED = replace(CONFIG, itl_s=0.01)
PER_REQUEST = replace(
    CONFIG, batching=BatchingConfig(), timing=TimingConfig(timing="per_request", ttft_ms=10, itl_ms=10)
)
STEPPING = replace(CONFIG, batching=BatchingConfig(), timing=TimingConfig(timing="step", step_base_ms=10))


def reconfigure(rig: Rig, config: EngineConfig) -> None:
    for engine in rig.ranks.engines:
        engine.reconfigure(config, make_planner(config))


@pytest.mark.parametrize(
    ("config", "slower"),
    [
        (PACED, replace(PACED, itl_s=0.1)),
        (PER_REQUEST, replace(PER_REQUEST, timing=replace(PER_REQUEST.timing, itl_ms=100))),
        (STEPPING, replace(STEPPING, timing=replace(STEPPING.timing, step_base_ms=100))),
    ],
    ids=["pace", "moments", "steps"],
)
def test_other_times_hold_from_the_next_step_on(config: EngineConfig, slower: EngineConfig) -> None:
    rig = Rig(config)
    rig.add(request(max_tokens=20))
    while len(rig.tokens("r1")) < 4:
        rig.step_when_due()
    reconfigure(rig, slower)
    # What is due already, or computed, stays so.
    for _ in range(3):
        rig.step_when_due()
    began, before = rig.now, len(rig.tokens("r1"))
    while len(rig.tokens("r1")) < before + 5:
        rig.step_when_due()
    assert rig.now - began == pytest.approx(0.5, rel=0.01)


def test_other_limits_hold_from_the_next_step_on() -> None:
    rig = Rig(PER_REQUEST)
    rig.add(*[request(f"r{number}", max_tokens=50) for number in range(4)])
    rig.step_when_due()
    assert rig.ranks.engines[0].num_running == 4
    limited = replace(PER_REQUEST, batching=replace(BatchingConfig(), max_num_seqs=2))
    reconfigure(rig, limited)
    rig.add(request("late", max_tokens=1))
    for _ in range(5):
        rig.step()
    assert (rig.ranks.engines[0].num_running, rig.ranks.engines[0].num_waiting) == (4, 1)
    rig.abort("r0", "r1", "r2")
    for _ in range(60):
        rig.step()
    assert rig.finish_reason("late") is FinishReason.LENGTH


def test_other_replies_are_given_to_the_next_request() -> None:
    rig = Rig()
    params = SamplingParams(max_tokens=9, eos_token_id=EOS)
    rig.add(request("before", sampling_params=params))
    reconfigure(rig, replace(CONFIG, replies=replace(CONFIG.replies, output_length=fixed_length(2))))
    rig.add(request("after", sampling_params=params))
    rig.run()
    assert [len(rig.tokens(each)) for each in ("before", "after")] == [9, 2]


@pytest.mark.parametrize("config", [CONFIG, PACED, PER_REQUEST, STEPPING])
def test_requests_in_flight_are_listed_with_what_they_have_said(config: EngineConfig) -> None:
    rig = Rig(config)
    rig.add(*[request(f"r{number}", max_tokens=10 * (number + 1)) for number in range(3)])
    rig.add(request("late", max_tokens=5))
    for _ in range(12):
        rig.step_when_due()
        listed = {served.request_id: served.output_tokens for served, _ in rig.ranks.engines[0].in_flight()}
        said = {each: len(rig.tokens(each)) for each in ("r0", "r1", "r2", "late") if rig.finish_reason(each) is None}
        assert listed == said


def test_a_rank_that_is_drained_refuses_what_is_new_and_goes_on_with_the_rest() -> None:
    rig = Rig()
    rig.add(request("runs", max_tokens=5))
    rig.step()
    rig.ranks.engines[0].is_draining = True
    rig.add(request("new"))
    rig.run()
    assert (rig.finish_reason("runs"), rig.finish_reason("new")) == (FinishReason.LENGTH, FinishReason.ERROR)
    (output,) = rig.outputs("new")
    assert output.error is not None
    assert (output.error.code, output.error.retryable) == ("engine_draining", True)
    rig.ranks.engines[0].is_draining = False
    rig.add(request("later"))
    rig.run()
    assert rig.finish_reason("later") is FinishReason.LENGTH
