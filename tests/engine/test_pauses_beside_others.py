# SPDX-License-Identifier: Apache-2.0
"""What a pause means to requests of other kinds: sessions, those with a timing of their own, pooling, waves."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mockengine.engine.config import ControlConfig, LoraConfig
from mockengine.replies.wish import OwnTiming
from mockengine.wire.outputs import FinishReason, StartWave, StepOutputs
from mockengine.wire.requests import LoraRequest
from tests.engine import test_own_timing as own_timing
from tests.engine import test_pooled_replies as pooled
from tests.engine import test_sessions as sessions
from tests.engine.test_batching import said_at
from tests.engine.test_pausing import CLEAR, KEEP_CACHE, LONG_S, PAUSED
from tests.support import pooling
from tests.support.rig import Rig, request
from tests.support.runners import ITL_S, RUNNERS, answer, call, is_answered, is_due, kind, play

# Sessions.


@sessions.everywhere
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_session_that_waits_for_input_keeps_no_pause_from_being_complete(runner: str, mode: str) -> None:
    rig = Rig(sessions.config(runner))
    rig.add(sessions.turn([1, 2, 3]))
    play(rig)
    pause = call(rig, "pause_generation", mode, KEEP_CACHE)
    play(rig)
    assert is_answered(rig, pause)
    assert is_due(rig) is None
    assert rig.finish_reason("s1") is (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)


@sessions.everywhere
def test_input_of_an_open_session_is_not_refused_but_a_new_session_is(runner: str) -> None:
    rig = Rig(sessions.config(runner))
    rig.add(sessions.turn([1, 2, 3]))
    play(rig)
    answer(rig, "pause_generation", "wait", KEEP_CACHE)
    rig.add(sessions.turn([4, 5]), sessions.turn([1], request_id="new"))
    assert rig.outputs("new")[0].error == PAUSED
    assert rig.watcher.refused == [("new", PAUSED.message)]
    play(rig, LONG_S)
    answer(rig, "resume_scheduler")
    rig.add(sessions.no_more())
    play(rig)
    first = sessions.reply([1, 2, 3], 4)
    assert rig.tokens("s1") == [*first, *sessions.reply([1, 2, 3, *first[:-1], 4, 5], 4)]
    assert [output.finish_reason for output in rig.outputs("s1") if output.finish_reason] == [FinishReason.LENGTH] * 2
    assert rig.ranks.num_requests == 0


@sessions.everywhere
def test_turn_that_is_kept_goes_on(runner: str) -> None:
    rig = Rig(sessions.config(runner))
    rig.add(sessions.turn([1, 2, 3], max_tokens=40))
    play(rig, 0.03)
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    rig.add(sessions.turn([4, 5]), sessions.no_more())
    play(rig, LONG_S)
    assert is_due(rig) is None
    call(rig, "resume_scheduler")
    play(rig)
    first = sessions.reply([1, 2, 3], 40)
    assert rig.tokens("s1") == [*first, *sessions.reply([1, 2, 3, *first[:-1], 4, 5], 4)]


@sessions.everywhere
def test_sessions_are_aborted_and_forgotten(runner: str) -> None:
    rig = Rig(replace(sessions.config(runner), data_parallel_size=2))
    rig.add(sessions.turn([1, 2, 3], request_id="waits"))
    play(rig)
    rig.add(sessions.turn([1, 2, 3], max_tokens=400, request_id="runs"))
    rig.step()
    pause = call(rig, "pause_scheduler", "abort", CLEAR)
    play(rig)
    assert is_answered(rig, pause)
    assert [rig.finish_reason(name) for name in ("waits", "runs")] == [FinishReason.ABORT] * 2
    reported = [name for each in rig.to(0) if isinstance(each, StepOutputs) for name in each.finished_requests]
    assert sorted(reported) == ["runs", "waits"]
    answer(rig, "resume_scheduler")
    rig.heard.clear()
    rig.add(sessions.turn([7], request_id="waits"))
    play(rig)
    assert rig.tokens("waits") == sessions.reply([7], 4)


@sessions.everywhere
def test_turn_that_follows_a_call_begins_no_later_than_without_it(runner: str) -> None:
    began: list[list[float]] = []
    for calls in ((), ("is_sleeping",)):
        rig = Rig(sessions.config(runner))
        rig.add(sessions.turn([1, 2, 3]), request("other", max_tokens=200))
        play(rig, 0.1)
        rig.heard.clear()
        for method in calls:
            call(rig, method)
        rig.add(sessions.turn([4, 5]), sessions.no_more())
        play(rig)
        began.append(said_at(rig, "s1"))
        assert rig.ranks.num_requests == 0
    assert began[0] == began[1]


# Requests with a timing of their own.


@pytest.mark.parametrize("engine", own_timing.ENGINES)
def test_time_that_was_slept_through_is_not_made_up_for(engine: str) -> None:
    timing = OwnTiming(ttft_s=own_timing.TTFT_S, itl_s=own_timing.ITL_S)
    rig = own_timing.rig_of(engine, {"own": timing, "not begun": timing})
    rig.add(request("own", prompt=[1] * 20, max_tokens=200))
    play(rig, own_timing.TTFT_S + 5.5 * own_timing.ITL_S)
    rig.add(request("not begun", prompt=[2] * 20, max_tokens=4))
    play(rig, 0.1)
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig, LONG_S)
    said = len(rig.outputs("own"))
    assert is_due(rig) is None
    resumed_at = rig.now
    call(rig, "resume_scheduler")
    play(rig)
    later = [moment for moment in own_timing.said_at(rig, "own") if moment >= resumed_at]
    assert len(later) == len(rig.outputs("own")) - said
    assert all(after - before > 0.5 * own_timing.ITL_S for before, after in pairwise(later[:50]))
    assert own_timing.said_at(rig, "not begun")[0] - resumed_at == pytest.approx(own_timing.TTFT_S - 0.1, abs=0.01)


@pytest.mark.parametrize("engine", own_timing.ENGINES)
def test_request_that_came_in_a_pause_has_its_time_from_when_it_is_admitted(engine: str) -> None:
    rig = own_timing.rig_of(engine, {"own": OwnTiming(ttft_s=own_timing.TTFT_S, itl_s=own_timing.ITL_S)})
    answer(rig, "pause_scheduler", "wait", KEEP_CACHE)
    rig.add(request("own", max_tokens=4))
    play(rig, LONG_S)
    assert is_due(rig) is None
    resumed_at = rig.now
    answer(rig, "resume_scheduler")
    play(rig)
    assert own_timing.said_at(rig, "own")[0] - resumed_at == pytest.approx(own_timing.TTFT_S, abs=0.01)
    assert own_timing.scheduled_at(rig, "own") >= resumed_at


@pytest.mark.parametrize("engine", own_timing.ENGINES)
def test_pause_waits_for_moments_and_aborts_what_never_ends(engine: str) -> None:
    rig = own_timing.rig_of(engine, {"slow": OwnTiming(itl_s=2.0), "stuck": OwnTiming(stalls_after=2)})
    rig.add(request("slow", max_tokens=3))
    play(rig, 1.0)
    pause = call(rig, "pause_generation", "wait", CLEAR)
    play(rig)
    assert is_answered(rig, pause)
    assert rig.finish_reason("slow") is FinishReason.LENGTH
    answer(rig, "resume_scheduler")
    rig.add(request("stuck", max_tokens=9))
    play(rig, 1.0)
    patient = call(rig, "pause_generation", "wait", CLEAR)
    play(rig, LONG_S)
    assert not is_answered(rig, patient)
    call(rig, "pause_generation", "abort", CLEAR)
    play(rig)
    assert is_answered(rig, patient)
    assert rig.finish_reason("stuck") is FinishReason.ABORT


@pytest.mark.parametrize("engine", own_timing.ENGINES)
def test_report_of_who_was_aborted_in_a_pause_brings_no_moment_forward(engine: str) -> None:
    rig = own_timing.rig_of(engine, {"own": OwnTiming(itl_s=2.0)}, data_parallel_size=2)
    rig.add(request("own", max_tokens=9), request("other", max_tokens=100))
    play(rig, 1.0)
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig, LONG_S)
    due_s = own_timing.said_at(rig, "own")[0] + 2.0 - (rig.now - LONG_S)
    said = len(rig.outputs("own"))
    rig.add(request("more", max_tokens=1))
    rig.abort("more")
    play(rig, 1.0)
    assert "more" in [name for each in rig.to(0) if isinstance(each, StepOutputs) for name in each.finished_requests]
    resumed_at = rig.now
    call(rig, "resume_scheduler")
    play(rig)
    assert own_timing.said_at(rig, "own")[said] - resumed_at == pytest.approx(due_s, abs=0.05)


@pytest.mark.parametrize("engine", own_timing.ENGINES)
def test_nothing_is_due_for_who_was_aborted(engine: str) -> None:
    rig = own_timing.rig_of(engine, {"own": OwnTiming(itl_s=2.0)})
    rig.add(request("own", max_tokens=9))
    play(rig, 1.0)
    pause = call(rig, "pause_generation", "abort", KEEP_CACHE)
    play(rig, 0.5)
    assert is_answered(rig, pause)
    answer(rig, "resume_scheduler")
    assert is_due(rig) is None


def test_who_has_own_moments_waits_while_an_adapter_is_loaded_too() -> None:
    loras = LoraConfig(max_loras=1, max_cpu_loras=1, load_s=1.0)
    rig = own_timing.rig_of("pace", {"own": OwnTiming(ttft_s=0.0, itl_s=0.5)}, loras=loras)
    began = rig.now
    rig.add(request("own", max_tokens=4))
    play(rig, 0.6)
    rig.add(request("adapted", max_tokens=4, lora_request=LoraRequest("l1", 1, "/adapters/l1")))
    play(rig)
    assert own_timing.said_at(rig, "own") == pytest.approx([began + each for each in (0.0, 0.5, 2.0, 2.5)], abs=0.01)
    assert own_timing.said_at(rig, "adapted")[0] == pytest.approx(began + 1.6, abs=0.01)


# Pooling.


@pytest.mark.parametrize("runner", pooling.RUNNERS)
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pooling_requests_meet_pauses_too(runner: str, mode: str) -> None:
    rig = Rig(pooling.RUNNERS[runner])
    rig.add(*(pooling.pooling(f"r{number}") for number in range(3)))
    pause = call(rig, "pause_generation", mode, KEEP_CACHE)
    play(rig, LONG_S)
    assert is_answered(rig, pause)
    rig.add(pooling.pooling("late"))
    if mode == "keep":
        assert rig.outputs("late") == []
    else:
        (refused,) = rig.outputs("late")
        assert refused.error == PAUSED
        assert refused.pooling_output is not None
    answer(rig, "resume_scheduler")
    play(rig)
    ended = {rig.finish_reason(f"r{number}") for number in range(3)}
    assert ended == {FinishReason.ABORT if mode == "abort" else FinishReason.STOP}
    assert all(rig.outputs(f"r{number}")[-1].pooling_output is not None for number in range(3))
    assert rig.ranks.num_requests == 0


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pause_is_not_complete_before_the_numbers_that_are_computed_are_said(mode: str) -> None:
    rig = Rig(pooled.LONG)
    rig.add(pooling.pooling("large", "token_embed", pooled.MANY))
    rig.step()
    assert rig.outputs("large") == []
    pause = call(rig, "pause_generation", mode, KEEP_CACHE)
    assert is_answered(rig, pause) is (mode == "abort")
    play(rig)
    names = [kind(each) for each in rig.to(0)]
    assert names.index("reply") > names.index("aborts" if mode == "abort" else "tokens")
    assert rig.finish_reason("large") is (FinishReason.ABORT if mode == "abort" else FinishReason.STOP)
    assert rig.outputs("large")[0].pooling_output is not None
    assert rig.ranks.num_requests == 0


def test_document_that_a_pause_aborts_lets_its_query_go() -> None:
    rig = Rig(pooling.POOLING)
    rig.add(pooling.pooling("q", **pooling.late("cache_query", uses=1)))
    play(rig)
    rig.add(pooling.pooling("d", **pooling.late("score_doc")))
    answer(rig, "pause_generation", "abort", KEEP_CACHE)
    answer(rig, "resume_scheduler")
    rig.add(pooling.pooling("e", **pooling.late("score_doc")))
    play(rig)
    assert pooling.the_error(rig, "e").code == "validation_error"


# Waves.


def test_wave_goes_on_when_a_slow_waking_up_has_ended_the_pause() -> None:
    config = replace(
        RUNNERS["free"],
        data_parallel_size=2,
        has_coordinator=True,
        has_waves=True,
        control=ControlConfig(wake_up_s=1.0),
    )
    rig = Rig(config)
    rig.add(request("a", max_tokens=20))
    play(rig, 3 * ITL_S)
    call(rig, "sleep", 1, "keep")
    play(rig, LONG_S)
    rig.heard.clear()
    call(rig, "wake_up", None)
    play(rig)
    assert [each.wave for each in rig.to_coordinator if isinstance(each, StartWave)] == [1]
    assert rig.finish_reason("a") is FinishReason.LENGTH
