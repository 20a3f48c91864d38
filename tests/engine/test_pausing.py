# SPDX-License-Identifier: Apache-2.0
"""Pauses, however requests run: what becomes of those in flight and of new ones, and when a pause is complete."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mockengine.engine.config import EngineConfig
from mockengine.wire.lines import line_of_release
from mockengine.wire.messages import StartDpWave
from mockengine.wire.outputs import EventType, FinishReason, RequestError, StartWave, StepOutputs, WaveComplete
from mockengine.wire.requests import EngineCoreRequest
from tests.engine.test_batching import expected_tokens, said_at
from tests.support.rig import Rig, request
from tests.support.runners import (
    ITL_S,
    RUNNERS,
    WITH_CACHE,
    answer,
    call,
    failure,
    is_answered,
    is_due,
    kinds,
    play,
    reply,
)

CLEAR, KEEP_CACHE = True, False
PAUSED = RequestError("engine_paused", "Generation is paused. Please retry after it resumes.", retryable=True)
LONG_S = 60.0

runners = pytest.mark.parametrize("config", RUNNERS.values(), ids=RUNNERS)
with_cache = pytest.mark.parametrize("config", [RUNNERS[name] for name in WITH_CACHE], ids=WITH_CACHE)


def asked(name: str, max_tokens: int = 20) -> EngineCoreRequest:
    return request(name, prompt=[len(name)] * 20, max_tokens=max_tokens)


def rig_with(config: EngineConfig, *names: str, tokens: int = 20) -> Rig:
    """Return a rig whose requests have said some of their tokens."""
    rig = Rig(config)
    rig.add(*(asked(name, tokens) for name in names))
    play(rig, 5.5 * ITL_S)
    assert all(0 < len(rig.tokens(name)) < tokens for name in names)
    return rig


def test_word_of_every_runner() -> None:
    assert {type(Rig(config).ranks.engines[0]._runner).__name__ for config in RUNNERS.values()} == {
        "Gate",
        "MomentRunner",
        "BatchRunner",
    }


@runners
def test_abort_ends_what_runs_and_refuses_what_comes_until_resumed(config: EngineConfig) -> None:
    rig = rig_with(config, "a", "b")
    rig.heard.clear()
    pause = call(rig, "pause_generation", "abort", CLEAR)
    play(rig)
    assert [word for word in kinds(rig) if word != "tokens"] == ["aborts", "stats", "reply"]
    (aborts,) = [each for each in rig.to(0) if isinstance(each, StepOutputs) and len(each.finished_requests)]
    assert sorted(aborts.finished_requests) == ["a", "b"]
    assert aborts.weight_version is None
    assert [rig.finish_reason(name) for name in "ab"] == [FinishReason.ABORT] * 2
    assert (reply(rig, pause).failure, is_due(rig), answer(rig, "is_scheduler_paused")) == (None, None, True)

    rig.add(asked("refused"))
    (output,) = rig.outputs("refused")
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, PAUSED)
    assert rig.watcher.refused == [("refused", PAUSED.message)]
    assert answer(rig, "resume_scheduler") is None
    rig.add(asked("served"))
    play(rig)
    assert len(rig.tokens("served")) == 20
    assert answer(rig, "is_scheduler_paused") is False


@runners
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_of_an_idle_engine_is_complete_at_once(config: EngineConfig, mode: str) -> None:
    rig = Rig(config)
    assert answer(rig, "pause_generation", mode, CLEAR) is None
    assert [word for word in kinds(rig) if word != "reply"] == []
    assert is_due(rig) is None


@runners
def test_wait_is_answered_when_the_last_request_has_ended(config: EngineConfig) -> None:
    rig = rig_with(config, "a", "b")
    pause = call(rig, "pause_generation", "wait", CLEAR)
    rig.add(asked("refused"))
    play(rig, 2 * ITL_S)
    assert rig.outputs("refused")[0].error == PAUSED
    assert not is_answered(rig, pause)
    rig.heard.clear()
    play(rig)
    assert [rig.finish_reason(name) for name in "ab"] == [FinishReason.LENGTH] * 2
    assert kinds(rig)[-2:] == ["stats", "reply"]


@runners
def test_what_waits_when_new_requests_are_not_admitted_goes_on_waiting(config: EngineConfig) -> None:
    rig = rig_with(config, "runs")
    pause = call(rig, "pause_scheduler", "wait", CLEAR)
    play(rig, ITL_S)
    rig.add(asked("waits"))
    play(rig)
    assert rig.finish_reason("runs") is FinishReason.LENGTH
    assert (reply(rig, pause).failure, rig.outputs("waits"), is_due(rig)) == (None, [], None)
    assert rig.ranks.engines[0].num_waiting == 1
    play(rig, LONG_S)
    answer(rig, "resume_scheduler")
    play(rig)
    assert rig.tokens("waits") == expected_tokens([5] * 20, 20)
    assert [event.type for event in rig.outputs("waits")[0].events] == [EventType.QUEUED, EventType.SCHEDULED]


@runners
def test_kept_requests_stay_where_they_are_and_cost_nothing_until_resumed(config: EngineConfig) -> None:
    rig = rig_with(config, "a", "b")
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig)
    said = [len(rig.tokens(name)) for name in "ab"]
    assert all(count < 20 for count in said)
    rig.add(asked("later"))
    play(rig, LONG_S)
    assert (is_due(rig), [len(rig.tokens(name)) for name in "ab"], rig.outputs("later")) == (None, said, [])

    resumed_at = rig.now
    answer(rig, "resume_scheduler")
    play(rig)
    for name in ("a", "b", "later"):
        assert rig.tokens(name) == expected_tokens([len(name)] * 20, 20)
        assert rig.finish_reason(name) is FinishReason.LENGTH
        assert EventType.PREEMPTED not in {event.type for output in rig.outputs(name) for event in output.events}
        # Time that was slept through is not made up for.
        moments = [moment for moment in said_at(rig, name) if moment > resumed_at]
        assert all(later - earlier > 0.8 * ITL_S for earlier, later in pairwise(moments))
    assert said_at(rig, "a")[-1] - resumed_at < 25 * ITL_S


@with_cache
def test_kept_requests_are_computed_anew_if_the_cache_was_cleared(config: EngineConfig) -> None:
    rig = rig_with(config, "a", "b")
    call(rig, "pause_generation", "keep", CLEAR)
    play(rig)
    said = {name: len(rig.outputs(name)) for name in "ab"}
    play(rig, LONG_S)
    answer(rig, "resume_scheduler")
    play(rig)
    for name in "ab":
        assert rig.tokens(name) == expected_tokens([1] * 20, 20)
        events = [event.type for output in rig.outputs(name)[said[name] :] for event in output.events]
        assert events == [EventType.PREEMPTED, EventType.SCHEDULED]
    caches = [
        each.scheduler_stats.prefix_cache_stats
        for each in rig.to(0)
        if isinstance(each, StepOutputs) and each.scheduler_stats
    ]
    assert [sum(stats.reset for stats in caches), sum(stats.preempted_requests for stats in caches)] == [1, 2]


@runners
def test_kept_request_can_be_aborted(config: EngineConfig) -> None:
    rig = rig_with(replace(config, data_parallel_size=2), "a", "b")
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig)
    rig.heard.clear()
    rig.abort("a")
    play(rig)
    assert [name for each in rig.to(0) if isinstance(each, StepOutputs) for name in each.finished_requests] == ["a"]
    assert rig.ranks.num_requests == 1
    answer(rig, "resume_scheduler")
    play(rig)
    assert rig.finish_reason("b") is FinishReason.LENGTH
    assert not rig.outputs("a")


@pytest.mark.parametrize("name", ["moments", "moments, limited"])
def test_report_in_a_pause_brings_no_moment_forward(name: str) -> None:
    rig = rig_with(replace(RUNNERS[name], data_parallel_size=2), "a", "b")
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig, LONG_S)
    rig.abort("a")
    play(rig, LONG_S)
    resumed_at = rig.now
    answer(rig, "resume_scheduler")
    play(rig)
    first = next(moment for moment in said_at(rig, "b") if moment > resumed_at)
    # Half of the time to its next token had passed.
    assert first - resumed_at == pytest.approx(0.5 * ITL_S, abs=0.2 * ITL_S)


@runners
def test_request_is_admitted_after_a_pause_although_a_client_does_not_read(config: EngineConfig) -> None:
    rig = Rig(replace(config, clients=2))
    rig.add(replace(asked("stuck"), client_index=1), asked("a"))
    play(rig, 5.5 * ITL_S)
    call(rig, "pause_scheduler", "wait", KEEP_CACHE)
    blocked = frozenset({1})
    for turn in range(400):
        rig.now = max(rig.now, rig.ranks.next_deadline(rig.now, blocked) or rig.now)
        rig._hear(rig.ranks.step(rig.now, blocked))
        if turn == 200:
            assert rig.finish_reason("a") is FinishReason.LENGTH
            rig.add(asked("b"))
        if turn == 300:
            assert rig.outputs("b") == []
            assert rig.ranks.next_deadline(rig.now, blocked) is None
            call(rig, "resume_scheduler")
    assert rig.finish_reason("b") is FinishReason.LENGTH
    assert rig.finish_reason("stuck") is None


@runners
def test_pause_that_is_ended_before_it_is_complete_is_answered_when_the_engine_is_idle(config: EngineConfig) -> None:
    rig = rig_with(config, "a")
    pauses = [call(rig, "pause_generation", "wait", CLEAR), call(rig, "pause_scheduler", "wait", CLEAR)]
    play(rig, 2 * ITL_S)
    call(rig, "resume_scheduler")
    rig.add(asked("served"))
    play(rig)
    assert rig.finish_reason("served") is FinishReason.LENGTH
    assert [reply(rig, pause).failure for pause in pauses] == [None, None]


@runners
def test_pauses_follow_one_another(config: EngineConfig) -> None:
    rig = rig_with(config, "a")
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig, LONG_S)
    # New requests wait, but those that are kept go on.
    pause = call(rig, "pause_scheduler", "wait", KEEP_CACHE)
    rig.add(asked("waits"))
    play(rig)
    assert rig.finish_reason("a") is FinishReason.LENGTH
    assert reply(rig, pause).failure is None
    rig.heard.clear()
    last = call(rig, "pause_generation", "abort", CLEAR)
    play(rig)
    assert (rig.finish_reason("waits"), reply(rig, last).failure) == (FinishReason.ABORT, None)
    assert rig.ranks.num_requests == 0


@runners
def test_pause_of_no_known_mode_changes_nothing(config: EngineConfig) -> None:
    rig = rig_with(config, "a")
    for method in ("pause_generation", "pause_scheduler"):
        bogus = call(rig, method, "bogus")
        play(rig, 2 * ITL_S)
        assert reply(rig, bogus).failure == f"Call to {method} method failed: Invalid pause mode: bogus"
    play(rig)
    rig.add(asked("served"))
    play(rig)
    assert [rig.finish_reason(name) for name in ("a", "served")] == [FinishReason.LENGTH] * 2


@runners
def test_engine_that_leaves_does_not_wait_for_kept_requests(config: EngineConfig) -> None:
    rig = rig_with(config, "a")
    assert rig.ranks.can_go_on
    call(rig, "pause_generation", "keep", KEEP_CACHE)
    play(rig)
    assert (rig.ranks.num_requests, rig.ranks.can_go_on) == (1, False)
    rig.ranks.begin_shutdown()
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert rig.finish_reason("a") is FinishReason.ABORT


@runners
def test_engine_that_leaves_answers_a_pause_that_is_not_complete(config: EngineConfig) -> None:
    rig = rig_with(config, "a")
    pause = call(rig, "pause_generation", "wait", CLEAR)
    play(rig, 2 * ITL_S)
    rig.ranks.begin_shutdown()
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert reply(rig, pause).failure == "Server shutting down"
    play(rig)
    assert reply(rig, call(rig, "resume_scheduler")).failure == "Server shutting down"


@runners
def test_request_that_is_only_to_be_cleaned_up_is_no_new_one(config: EngineConfig) -> None:
    rig = Rig(config)
    answer(rig, "pause_generation", "abort", CLEAR)
    rig.add(request("cleanup", abort_immediately=True))
    assert rig.outputs("cleanup") == []
    assert rig.watcher.refused == []


@pytest.mark.parametrize("release", ["0.32.0", "0.24.0"])
def test_older_frontends_know_the_pause_that_lets_new_requests_wait(release: str) -> None:
    rig = Rig(RUNNERS["steps"], line=line_of_release(release))
    answer(rig, "pause_scheduler", "abort", CLEAR)
    rig.add(asked("waits"))
    play(rig)
    assert rig.outputs("waits") == []
    answer(rig, "resume_scheduler")
    play(rig)
    assert rig.finish_reason("waits") is FinishReason.LENGTH


# Other calls meanwhile.


@pytest.mark.parametrize("name", ["steps", "steps, asynchronous"])
def test_what_comes_after_a_pause_while_a_step_is_computed_meets_it(name: str) -> None:
    rig = rig_with(RUNNERS[name], "a")
    assert rig.ranks.engines[0]._runner.is_computing
    pause = call(rig, "pause_generation", "abort", CLEAR)
    rig.add(asked("too late"), asked("gone"))
    rig.abort("gone")
    play(rig)
    assert [rig.finish_reason(name) for name in ("a", "too late")] == [FinishReason.ABORT, FinishReason.ERROR]
    assert reply(rig, pause).failure is None


# Waves.


def test_paused_ranks_start_no_wave_and_end_the_one_that_runs() -> None:
    config = replace(RUNNERS["free"], data_parallel_size=2, has_coordinator=True, has_waves=True)
    rig = Rig(config, ranks=2)
    rig.add(asked("a"))
    play(rig, 3 * ITL_S)
    for rank in (0, 1):
        call(rig, "pause_scheduler", "keep", KEEP_CACHE, rank=rank)
    play(rig, LONG_S)
    assert is_due(rig) is None
    waves = [each for each in rig.to_coordinator if isinstance(each, StartWave | WaveComplete)]
    assert [(type(each), each.wave) for each in waves] == [(StartWave, 0), (WaveComplete, 0)]

    rig.heard.clear()
    rig.receive(StartDpWave(1, None))
    rig.add(replace(asked("b"), current_wave=1))
    play(rig)
    assert [each for each in rig.to_coordinator if isinstance(each, StartWave)] == []
    for rank in (0, 1):
        answer(rig, "resume_scheduler", rank=rank)
    play(rig)
    assert [rig.finish_reason(name) for name in "ab"] == [FinishReason.LENGTH] * 2
    waves = [each for each in rig.to_coordinator if isinstance(each, StartWave | WaveComplete)]
    assert [(type(each), each.wave) for each in waves] == [(StartWave, 1), (WaveComplete, 1)]
    assert {engine.wave.number for engine in rig.ranks.engines} == {2}


def test_mixture_of_experts_cannot_be_resumed_on_its_way_into_a_pause() -> None:
    rig = rig_with(replace(RUNNERS["free"], data_parallel_size=2, has_coordinator=True, has_waves=True), "a")
    call(rig, "pause_scheduler", "wait", CLEAR)
    assert failure(rig, "resume_scheduler") == (
        "Call to resume_scheduler method failed: resume_scheduler called while pause is still in flight. Wait for the "
        "pause future to resolve before resuming."
    )
    play(rig)
    assert answer(rig, "resume_scheduler") is None
