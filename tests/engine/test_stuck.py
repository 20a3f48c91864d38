# SPDX-License-Identifier: Apache-2.0
"""Nobody waits who could go on, even if what everybody else waits for is far away."""

from dataclasses import replace
from typing import Any

import pytest

from mockengine.engine.batching import BatchRunner
from mockengine.engine.config import BatchingConfig, KvTransferConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.timing import StepLoad, TimingConfig
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from tests.support.rig import CONFIG, Rig, request

FAR_S = 30.0
SOON_S = 0.1
NOBODY = frozenset[int]()


def rig_with_kept_blocks(kept_tokens: int = 16, clients: int = 1, **limits: Any) -> Rig:
    """Return a rig of four blocks, some of which are kept for another instance until far away."""
    batching = BatchingConfig(
        **{"max_num_batched_tokens": 64, "num_gpu_blocks": 5, "async_scheduling": False, **limits}
    )
    transfer = KvTransferConfig(engine_id="here", hold_s=FAR_S)
    rig = Rig(replace(CONFIG, batching=batching, kv_transfer=transfer, clients=clients))
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    rig.add(request("kept", prompt=[9] * kept_tokens, sampling_params=params))
    play(rig, "kept")
    return rig


def play(rig: Rig, until: str, blocked: frozenset[int] = NOBODY) -> float:
    """Step whenever something is due, until a request has ended; return how long that took."""
    began = rig.now
    while rig.finish_reason(until) is None:
        due = rig.ranks.next_deadline(rig.now, blocked)
        assert due is not None, "nothing is due any more"
        rig.now = max(due, rig.now)
        rig._hear(rig.ranks.step(rig.now, blocked))
    return rig.now - began


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_comes_after_one_that_is_aborted_takes_its_turn(*, async_scheduling: bool) -> None:
    rig = rig_with_kept_blocks(async_scheduling=async_scheduling)
    rig.add(request("big", prompt=[1] * 60, max_tokens=1), request("small", prompt=[2] * 16, max_tokens=1))
    rig.step()
    rig.now -= 0.000_5
    rig.abort("big")
    assert play(rig, "small") < SOON_S


def test_a_client_that_reads_again_while_nothing_is_computed_is_heard() -> None:
    rig = rig_with_kept_blocks(clients=2)
    rig.add(request("reads again", client=1))
    rig.add(request("too large", prompt=[5] * 60, max_tokens=2))
    rig.step(frozenset({1}))
    assert play(rig, "reads again") < SOON_S


def test_who_preempts_itself_leaves_its_place_to_others() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 1, "scheduling_policy": "priority", "enable_prefix_caching": False}
    rig = rig_with_kept_blocks(kept_tokens=33, **limits)
    rig.add(request("grows", prompt=[1] * 14, max_tokens=10, priority=5))
    rig.step()
    rig.step()
    rig.add(request("urgent", prompt=[2] * 4, max_tokens=2, priority=-1))
    assert play(rig, "urgent") < SOON_S


def test_an_id_that_has_ended_is_reported_at_once() -> None:
    loads = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "there",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
    }
    transfer = KvTransferConfig(engine_id="here", transfer_s=FAR_S)
    rig = Rig(replace(CONFIG, batching=BatchingConfig(), kv_transfer=transfer, data_parallel_size=2))
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": loads})
    rig.add(request("loads", prompt=[1] * 16, sampling_params=params))
    rig.step()
    while (due := rig.ranks.next_deadline(rig.now, NOBODY)) is not None and due < rig.now + SOON_S:
        rig.step()
    rig.add(request("gone", prompt=[2] * 4, abort_immediately=True))
    due = rig.ranks.next_deadline(rig.now, NOBODY)
    assert due is not None
    assert due <= rig.now
    (envelope,) = rig.step()
    assert getattr(envelope, "finished_requests", None) == ("gone",)


def _filling_prompt(length: int) -> EngineCoreRequest:
    return request(prompt=[1] * length, max_tokens=1)


@pytest.mark.parametrize(
    ("timing", "batching"),
    [
        (TimingConfig(timing="per_request", itl_ms=3.0), None),
        (TimingConfig(timing="per_request", itl_ms=3.0), BatchingConfig(num_gpu_blocks=20)),
        (
            TimingConfig(timing="instant"),
            BatchingConfig(num_gpu_blocks=20, max_num_batched_tokens=4, async_scheduling=False),
        ),
        (TimingConfig(timing="instant"), BatchingConfig(num_gpu_blocks=20, max_num_batched_tokens=4)),
    ],
)
def test_a_prompt_that_fills_the_context_ends_with_drafts_as_without(
    timing: TimingConfig, batching: BatchingConfig | None
) -> None:
    config = replace(CONFIG, max_model_len=16, timing=timing, batching=batching)
    for speculation in (None, SpeculationConfig(acceptance_rates=(0.5,))):
        rig = Rig(replace(config, speculation=speculation))
        rig.add(_filling_prompt(16))
        rig.run()
        assert rig.finish_reason("r1") is not None


def test_padding_takes_no_time() -> None:
    speculation = SpeculationConfig(acceptance_rates=(0.5,) * 7)
    batching = BatchingConfig(num_gpu_blocks=20, async_scheduling=False)
    rig = Rig(replace(CONFIG, batching=batching, speculation=speculation))
    loads: list[StepLoad] = []
    runner = rig.ranks.engines[0]._runner
    assert isinstance(runner, BatchRunner)
    duration_s = runner._timing.duration_s

    def noting(load: StepLoad) -> float:
        loads.append(load)
        return duration_s(load)

    runner._timing.duration_s = noting  # type: ignore[method-assign]  # looked at, and passed on
    rig.add(request(prompt=[1] * 17, max_tokens=1))
    rig.run()
    rig.add(request("r2", prompt=[1] * 17, max_tokens=1))
    rig.run()
    # The second prompt is cached but for its last token, beside which there is padding.
    assert [load.prefill_tokens for load in loads] == [17, 1]
