# SPDX-License-Identifier: Apache-2.0
"""Sleep: which memory is there after which calls, what that means for requests, and how long it takes."""

from dataclasses import replace
from typing import Any

import pytest

from mockengine.engine.config import ControlConfig, EngineConfig
from mockengine.wire.outputs import EventType, FinishReason
from mockengine.wire.utility import UtilityCall
from tests.engine.test_batching import expected_tokens, said_at
from tests.support.rig import Rig, request
from tests.support.runners import (
    ITL_S,
    RUNNERS,
    answer,
    call,
    failure,
    is_answered,
    is_due,
    play,
    reply,
)

SLEEP_S, WAKE_UP_S = 2.0, 1.0
SLOW = ControlConfig(sleep_s=SLEEP_S, wake_up_s=WAKE_UP_S)
NOT_PAUSED = "release_kv_cache_memory() requires a completed pause first"
NOT_RESIDENT = "release_kv_cache_memory() requires all executor memory to be resident"

runners = pytest.mark.parametrize("config", RUNNERS.values(), ids=RUNNERS)


@pytest.mark.parametrize(
    "calls",
    [
        [("is_sleeping", (), False), ("wake_up", (None,), True)],
        [("sleep", (0, "abort"), None), ("is_sleeping", (), True), ("is_scheduler_paused", (), True)],
        [("sleep", (0, "keep"), None), ("wake_up", (["scheduling"],), True), ("is_sleeping", (), False)],
        [("sleep", (0, "abort"), None), ("wake_up", (None,), True), ("is_sleeping", (), False)],
        [("sleep", (1, "abort"), None), ("wake_up", (["scheduling"],), False), ("is_scheduler_paused", (), True)],
        [("sleep", (1, "wait"), None), ("wake_up", ([],), False), ("wake_up", (), True)],
        [
            ("sleep", (2, "abort"), None),
            ("wake_up", (["weights"],), False),
            ("is_sleeping", (), True),
            ("wake_up", (["kv_cache"],), True),
            ("is_sleeping", (), False),
        ],
        [
            ("sleep", (1, "abort"), None),
            ("wake_up", (["kv_cache", "scheduling"],), False),
            ("wake_up", (["kv_cache", "weights"],), False),
            ("wake_up", (["weights"],), True),
        ],
        [("sleep", (1, "abort"), None), ("wake_up", (["bogus", "weights"],), False), ("wake_up", (None,), True)],
        [("sleep", (1, "abort"), None), ("sleep", (2, "abort"), None), ("wake_up", (None,), True)],
        # Resumed, an engine goes on although its memory is gone, where a GPU would fail.
        [("sleep", (1, "abort"), None), ("resume_scheduler", (), None), ("is_scheduler_paused", (), False)],
        [("sleep", (1, "abort"), None), ("resume_scheduler", (), None), ("is_sleeping", (), True)],
        [("pause_scheduler", ("keep", False), None), ("is_sleeping", (), True), ("wake_up", (None,), True)],
        [
            ("pause_scheduler", ("keep", False), None),
            ("release_kv_cache_memory", (), None),
            ("wake_up", (["weights"],), False),
            ("wake_up", (["kv_cache"],), True),
            ("is_sleeping", (), False),
        ],
        # After it, falling asleep takes the weights too.
        [
            ("pause_scheduler", ("abort", True), None),
            ("release_kv_cache_memory", (), None),
            ("sleep", (1, "abort"), None),
            ("wake_up", (["kv_cache"],), False),
            ("wake_up", (["weights"],), True),
        ],
    ],
)
def test_calls_one_after_the_other(calls: list[tuple[str, tuple[Any, ...], Any]]) -> None:
    rig = Rig(RUNNERS["steps"])
    assert [answer(rig, method, *args) for method, args, _ in calls] == [result for _, _, result in calls]


@pytest.mark.parametrize(
    ("method", "args", "reason"),
    [
        ("sleep", (3, "abort"), "level: int 3 where 0, 1 or 2 is expected"),
        ("sleep", ("1", "abort"), "level: str '1' where 0, 1 or 2 is expected"),
        ("sleep", (1, "bogus"), "Invalid pause mode: bogus"),
        (
            "wake_up",
            ("weights",),
            "tags: str 'weights' where a list of names is expected, such as weights and kv_cache",
        ),
        ("wake_up", ([1],), "tags: array of 1 where a list of names is expected, such as weights and kv_cache"),
        ("release_kv_cache_memory", (), NOT_PAUSED),
    ],
)
def test_call_that_fails_changes_nothing(method: str, args: tuple[Any, ...], reason: str) -> None:
    rig = Rig(RUNNERS["steps"])
    assert failure(rig, method, *args) == f"Call to {method} method failed: {reason}"
    assert answer(rig, "is_sleeping") is False


def test_memory_is_released_after_a_complete_pause_and_once() -> None:
    rig = Rig(RUNNERS["steps"])
    rig.add(request("a", max_tokens=20))
    play(rig, 3 * ITL_S)
    pause = call(rig, "pause_scheduler", "wait", False)  # noqa: FBT003 - as on the wire
    early = call(rig, "release_kv_cache_memory")
    play(rig, ITL_S)
    assert reply(rig, early).failure == f"Call to release_kv_cache_memory method failed: {NOT_PAUSED}"
    play(rig)
    assert reply(rig, pause).failure is None
    assert answer(rig, "release_kv_cache_memory") is None
    assert failure(rig, "release_kv_cache_memory") == f"Call to release_kv_cache_memory method failed: {NOT_RESIDENT}"


@runners
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_that_come_in_the_sleep_wait_for_its_end(config: EngineConfig, level: int, mode: str) -> None:
    rig = Rig(config)
    rig.add(request("runs", prompt=[1] * 20, max_tokens=20))
    play(rig, 5.5 * ITL_S)
    sleep = call(rig, "sleep", level, mode)
    play(rig)
    assert reply(rig, sleep).failure is None
    assert rig.finish_reason("runs") is {"abort": FinishReason.ABORT, "wait": FinishReason.LENGTH, "keep": None}[mode]
    rig.add(request("comes", prompt=[2] * 20, max_tokens=20))
    play(rig, 60)
    assert (is_due(rig), rig.outputs("comes")) == (None, [])
    assert answer(rig, "wake_up", None) is True
    play(rig)
    assert rig.tokens("comes") == expected_tokens([2] * 20, 20)
    assert mode == "abort" or rig.tokens("runs") == expected_tokens([1] * 20, 20)
    assert rig.ranks.num_requests == 0


@runners
def test_sleep_takes_its_time_after_the_pause_and_waking_up_before_anything_goes_on(config: EngineConfig) -> None:
    rig = Rig(replace(config, control=SLOW))
    rig.add(request("a", max_tokens=20))
    play(rig, 5.5 * ITL_S)
    sleep = call(rig, "sleep", 1, "wait")
    play(rig)
    ended_at = said_at(rig, "a")[-1]
    assert reply(rig, sleep).timestamp - ended_at == pytest.approx(SLEEP_S, abs=3 * ITL_S)

    began = rig.now
    wake_up = call(rig, "wake_up", None)
    rig.add(request("b", max_tokens=2))
    play(rig)
    assert reply(rig, wake_up).timestamp - began == WAKE_UP_S
    (queued, scheduled) = rig.outputs("b")[0].events
    assert queued.type is EventType.QUEUED
    assert scheduled.timestamp - began >= WAKE_UP_S


def test_calls_that_find_nothing_to_do_take_no_time() -> None:
    rig = Rig(replace(RUNNERS["free"], control=SLOW))
    assert answer(rig, "wake_up", None) is True
    assert answer(rig, "sleep", 0, "abort") is None
    assert answer(rig, "wake_up", None) is True
    call(rig, "sleep", 1, "abort")
    play(rig)
    assert answer(rig, "sleep", 1, "abort") is None
    assert answer(rig, "wake_up", ["bogus"]) is False


@runners
def test_busy_engine_takes_nothing_in_and_then_everything_in_its_order(config: EngineConfig) -> None:
    rig = Rig(replace(config, control=SLOW), ranks=2)
    sleep = call(rig, "sleep", 1, "abort")
    began = rig.now
    rig.add(request("kept", max_tokens=2), request("gone", max_tokens=2))
    rig.abort("gone")
    asked = [call(rig, "is_sleeping"), call(rig, "wake_up", ["kv_cache"]), call(rig, "is_sleeping")]
    fault = call(rig, "handle_fault_tolerance", {"instruction": "retry", "params": {}, "request_id": "x"})
    assert [is_answered(rig, each) for each in (sleep, *asked)] == [False] * 4
    assert reply(rig, fault).result["success"] is False
    assert is_due(rig) == began + SLEEP_S
    # The other rank is not busy.
    rig.receive(UtilityCall(0, 1, "is_sleeping"), rank=1)
    assert reply(rig, 1).result is False
    rig.add(request("there", max_tokens=2), rank=1)
    play(rig, 4 * ITL_S)
    assert rig.finish_reason("there") is FinishReason.LENGTH

    play(rig)
    assert [reply(rig, each).timestamp - began for each in (sleep, *asked)] == [
        SLEEP_S,
        SLEEP_S,
        *[SLEEP_S + WAKE_UP_S] * 2,
    ]
    assert [reply(rig, each).result for each in asked] == [True, False, True]
    call(rig, "wake_up", ["weights"])
    play(rig)
    assert rig.finish_reason("kept") is FinishReason.LENGTH
    assert rig.outputs("gone") == []


@runners
def test_engine_that_leaves_while_it_is_busy_answers_everybody(config: EngineConfig) -> None:
    rig = Rig(replace(config, control=SLOW))
    waiting = [call(rig, "sleep", 1, "abort"), call(rig, "is_sleeping"), call(rig, "sleep", 1, "abort")]
    rig.add(request("a"))
    assert rig.ranks.can_go_on
    rig.ranks.begin_shutdown()
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert [reply(rig, each).failure for each in waiting] == ["Server shutting down"] * 3
    assert rig.finish_reason("a") is FinishReason.ABORT
    play(rig)
    assert not rig.ranks.can_go_on


@runners
def test_engine_whose_frontend_is_lost_while_it_is_busy_forgets_everything(config: EngineConfig) -> None:
    rig = Rig(replace(config, control=SLOW))
    for _ in range(3):
        call(rig, "sleep", 1, "abort")
    rig.add(request("a"))
    rig._hear(rig.ranks.abort_everything(rig.now))
    play(rig)
    assert (rig.ranks.num_requests, rig.ranks.can_go_on) == (0, False)


@pytest.mark.parametrize("name", ["moments", "moments, limited"])
def test_time_in_which_an_engine_is_busy_is_not_made_up_for(name: str) -> None:
    config = replace(RUNNERS[name], control=SLOW)
    rig = Rig(config)
    rig.add(request("a", max_tokens=20))
    play(rig, 5.5 * ITL_S)
    call(rig, "pause_scheduler", "keep", False)  # noqa: FBT003 - as on the wire
    call(rig, "sleep", 1, "keep")
    play(rig)
    call(rig, "wake_up", None)
    play(rig)
    last = said_at(rig, "a")[-15:]
    assert last[-1] - last[0] == pytest.approx(14 * ITL_S, abs=2 * ITL_S)
