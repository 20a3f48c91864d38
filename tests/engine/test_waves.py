# SPDX-License-Identifier: Apache-2.0
"""Data parallelism with a coordinator: counts and waves."""

from dataclasses import replace

import pytest

from mockengine.wire.messages import StartDpWave
from mockengine.wire.outputs import Envelope, StartWave, StepOutputs, WaveComplete
from tests.support.rig import CONFIG, Rig, request

COORDINATED = replace(CONFIG, data_parallel_size=2, has_coordinator=True, has_waves=True)


def _counts(envelopes: list[Envelope]) -> list[tuple[int, int, int]]:
    return [
        (envelope.engine_index, envelope.scheduler_stats.num_running_reqs, envelope.scheduler_stats.num_waiting_reqs)
        for envelope in envelopes
        if isinstance(envelope, StepOutputs) and envelope.scheduler_stats is not None
    ]


def _waves(envelopes: list[Envelope]) -> list[tuple[str, int, int]]:
    return [
        (type(envelope).__name__, envelope.engine_index, envelope.wave)
        for envelope in envelopes
        if isinstance(envelope, StartWave | WaveComplete)
    ]


def test_counts_are_published_whenever_they_change() -> None:
    rig = Rig(COORDINATED)
    rig.add(request(max_tokens=3))
    rig.run()
    assert _counts(rig.to_coordinator) == [(0, 0, 1), (0, 1, 0), (0, 0, 0)]


def test_idle_rank_that_gets_a_request_starts_a_wave_and_rank_0_ends_it_for_all() -> None:
    rig = Rig(COORDINATED, ranks=2)
    rig.add(request(), rank=1)
    rig.receive(StartDpWave(0, exclude=1), rank=0, client=-1)
    rig.run()
    # Rank 0 tells that it has been woken, as a real engine does.
    assert _waves(rig.to_coordinator) == [("StartWave", 1, 0), ("StartWave", 0, 0), ("WaveComplete", 0, 0)]
    assert [(engine.wave.number, engine.wave.running) for engine in rig.ranks.engines] == [(1, False), (1, False)]


def test_wave_goes_on_while_any_rank_has_work() -> None:
    rig = Rig(COORDINATED, ranks=2)
    rig.add(request("a", max_tokens=2), rank=0)
    rig.add(request("b", max_tokens=9), rank=1)
    for _ in range(5):
        rig.step()
    assert not any(isinstance(envelope, WaveComplete) for envelope in rig.to_coordinator)
    rig.run()
    assert _waves(rig.to_coordinator)[-1] == ("WaveComplete", 0, 0)


def test_request_stamped_with_a_later_wave_moves_the_rank_there() -> None:
    rig = Rig(COORDINATED)
    rig.add(request(current_wave=5))
    rig.run()
    assert _waves(rig.to_coordinator) == [("StartWave", 0, 5), ("WaveComplete", 0, 5)]


def test_stale_wave_and_own_exclusion_are_ignored_and_a_bytes_exclusion_excludes_nobody() -> None:
    rig = Rig(COORDINATED)
    rig.add(request())
    rig.run()
    wave = rig.ranks.engines[0].wave
    rig.receive(StartDpWave(0), client=-1)
    assert (wave.number, wave.running) == (1, False)
    rig.receive(StartDpWave(1, exclude=0), client=-1)
    assert not wave.running
    rig.receive(StartDpWave(3, exclude=b"\x00\x00"), client=-1)
    assert (wave.number, wave.running) == (3, True)


def test_rank_woken_without_work_lets_the_wave_end() -> None:
    rig = Rig(COORDINATED)
    rig.receive(StartDpWave(0), client=-1)
    rig.receive(StartDpWave(0), client=-1)
    rig.run()
    assert _waves(rig.to_coordinator) == [("StartWave", 0, 0), ("WaveComplete", 0, 0)]


@pytest.mark.parametrize("has_coordinator", [True, False])
def test_dense_ranks_say_nothing_of_waves_and_stay_out_of_them(*, has_coordinator: bool) -> None:
    rig = Rig(replace(COORDINATED, has_coordinator=has_coordinator, has_waves=False), ranks=2)
    rig.receive(StartDpWave(3))
    assert not rig.ranks.engines[0].wave.running
    rig.add(request(current_wave=2), rank=1)
    rig.run()
    assert _waves(rig.to_coordinator) == []
    assert _counts(rig.to_coordinator) == ([(1, 0, 1), (1, 1, 0), (1, 0, 0)] if has_coordinator else [])
