# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: which are loaded, who has to go for whom, and who waits for a slot, however requests run."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mockengine.engine.config import EngineConfig, LoraConfig
from mockengine.wire.outputs import EventType, FinishReason, RequestError
from mockengine.wire.requests import EngineCoreRequest, LoraRequest
from tests.engine.test_batching import said_at
from tests.support.rig import Rig, request
from tests.support.runners import ITL_S, RUNNERS, WITH_CACHE, answer, call, failure, is_answered, is_due, play, reply

LOAD_S = 0.5
ALL_PINNED = "All items are pinned, cannot remove oldest from the cache."

runners = pytest.mark.parametrize("config", RUNNERS.values(), ids=RUNNERS)


def with_loras(config: EngineConfig, max_loras: int, max_cpu_loras: int | None = None, **more: Any) -> EngineConfig:
    return replace(
        config, loras=LoraConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras or max_loras, **more), clients=2
    )


def lora(number: int, *, inplace: bool = False) -> list[Any]:
    """Return an adapter as frontends name it."""
    return [f"l{number}", number, f"/adapters/l{number}", None, inplace, False]


def asked(name: str, number: int | None, max_tokens: int = 10, **more: Any) -> EngineCoreRequest:
    adapter = None if number is None else LoraRequest(f"l{number}", number, f"/adapters/l{number}")
    return request(name, prompt=[3] * 20, max_tokens=max_tokens, lora_request=adapter, **more)


def load(rig: Rig, *numbers: int) -> None:
    for number in numbers:
        assert answer(rig, "add_lora", lora(number)) is True


# Calls.


@pytest.mark.parametrize("method", ["add_lora", "remove_lora", "pin_lora", "list_loras"])
def test_without_slots_there_is_no_lora(method: str) -> None:
    args = {"add_lora": (lora(1),), "list_loras": ()}.get(method, (1,))
    assert failure(Rig(RUNNERS["steps"]), method, *args) == (
        f"Call to {method} method failed: LoRA is not enabled. Use --enable-lora to enable LoRA."
    )


def test_adapters_come_and_go() -> None:
    rig = Rig(with_loras(RUNNERS["steps"], 2))
    load(rig, 1, 2, 1)
    assert answer(rig, "list_loras") == [1, 2]
    assert [answer(rig, "remove_lora", number) for number in (1, 1, 7)] == [True, False, False]
    assert answer(rig, "list_loras") == [2]


def test_the_adapter_that_went_unused_for_longest_has_to_go() -> None:
    rig = Rig(with_loras(RUNNERS["steps"], 2, 3))
    load(rig, 1, 2, 3)
    rig.add(asked("a", 1, max_tokens=1))
    play(rig)
    load(rig, 4)
    assert answer(rig, "list_loras") == [1, 3, 4]
    load(rig, 3, 5)
    assert answer(rig, "list_loras") == [3, 4, 5]


def test_pinned_adapters_stay() -> None:
    rig = Rig(with_loras(RUNNERS["steps"], 2))
    load(rig, 1, 2)
    assert answer(rig, "pin_lora", 1) is True
    load(rig, 3)
    assert answer(rig, "list_loras") == [1, 3]
    assert answer(rig, "pin_lora", 3) is True
    assert failure(rig, "add_lora", lora(4)) == f"Call to add_lora method failed: {ALL_PINNED}"
    assert failure(rig, "pin_lora", 4) == ("Call to pin_lora method failed: Pinning failed. LoRA 4 is not registered.")
    # Once removed it is pinned no more.
    assert answer(rig, "remove_lora", 3) is True
    load(rig, 4, 5)
    assert answer(rig, "list_loras") == [1, 5]


@pytest.mark.parametrize(
    ("method", "argument", "reason"),
    [
        ("add_lora", ["l1", 0, "/p"], "id must be > 0, got 0"),
        ("add_lora", ["l1", 1, ""], "lora_path cannot be empty"),
        ("add_lora", ["l1", 1], "lora_request: 2 items where at least a name, an id and a path are expected"),
        ("add_lora", "l1", "lora_request: str 'l1' where an array is expected"),
        ("remove_lora", "l1", "lora_id: str 'l1' where an int is expected"),
        ("remove_lora", 0, "lora_id must be greater than 0."),
        ("pin_lora", [1], "lora_id: array of 1 where an int is expected"),
    ],
)
def test_call_that_names_no_adapter_fails(method: str, argument: object, reason: str) -> None:
    rig = Rig(with_loras(RUNNERS["steps"], 2))
    assert failure(rig, method, argument) == f"Call to {method} method failed: {reason}"
    assert answer(rig, "list_loras") == []


def test_adapter_that_is_not_there_is_not_found_by_calls_and_requests() -> None:
    rig = Rig(with_loras(RUNNERS["steps"], 1, is_there=lambda path: path.endswith("l1")))
    load(rig, 1)
    reason = "Loading lora l2 failed: No adapter found for /adapters/l2"
    assert failure(rig, "add_lora", lora(2)) == f"Call to add_lora method failed: {reason}"
    rig.add(asked("a", 2), asked("b", 1))
    assert rig.outputs("a")[0].error == RequestError("validation_error", reason)
    play(rig)
    assert rig.finish_reason("b") is FinishReason.LENGTH
    assert answer(rig, "list_loras") == [1]


# Requests.


@runners
def test_request_is_refused_where_there_is_no_lora(config: EngineConfig) -> None:
    rig = Rig(config)
    rig.add(asked("a", 1))
    assert rig.outputs("a")[0].error == RequestError("validation_error", "LoRA is not enabled (asked for str 'l1')")
    assert rig.ranks.num_requests == 0


@runners
def test_request_has_an_adapter_loaded_that_is_not(config: EngineConfig) -> None:
    rig = Rig(with_loras(config, 1))
    rig.add(asked("a", 7))
    play(rig)
    assert rig.finish_reason("a") is FinishReason.LENGTH
    assert answer(rig, "list_loras") == [7]


@runners
def test_no_more_adapters_run_at_once_than_there_are_slots(config: EngineConfig) -> None:
    rig = Rig(with_loras(config, 1))
    rig.add(asked("a", 1, 30), asked("b", 2), asked("c", 1, 30), asked("d", None, 30))
    play(rig, 5 * ITL_S)
    assert all(rig.tokens(name) for name in "acd")
    assert rig.tokens("b") == []
    assert (rig.ranks.engines[0].num_running, rig.ranks.engines[0].num_waiting) == (3, 1)
    play(rig)
    assert {rig.finish_reason(name) for name in "abcd"} == {FinishReason.LENGTH}
    assert min(said_at(rig, "b")) > max(*said_at(rig, "a"), *said_at(rig, "c"))
    (queued, scheduled) = rig.outputs("b")[0].events
    assert (queued.type, scheduled.type) == (EventType.QUEUED, EventType.SCHEDULED)
    assert scheduled.timestamp - queued.timestamp > 5 * ITL_S


@runners
def test_slot_is_free_when_its_last_request_is_aborted(config: EngineConfig) -> None:
    rig = Rig(with_loras(config, 1))
    rig.add(asked("a", 1, 400), asked("b", 2), asked("c", 1, 400), asked("d", 2))
    play(rig, 3 * ITL_S)
    rig.abort("a")
    play(rig, 3 * ITL_S)
    assert rig.tokens("b") == []
    rig.abort("c", "d")
    play(rig)
    assert rig.finish_reason("b") is FinishReason.LENGTH
    assert rig.outputs("d") == []
    assert rig.ranks.num_requests == 0


def test_slot_that_is_free_between_two_beats_changes_no_beat() -> None:
    rig = Rig(with_loras(RUNNERS["free"], 1))
    rig.add(asked("a", 1, max_tokens=90), asked("b", None, max_tokens=20), asked("c", 2))
    play(rig, 5.5 * ITL_S)
    rig.abort("a")
    play(rig)
    assert [later - earlier for earlier, later in pairwise(said_at(rig, "b"))] == pytest.approx([ITL_S] * 19)
    assert len(rig.tokens("c")) == 10


@runners
def test_request_that_waits_for_a_slot_is_there(config: EngineConfig) -> None:
    rig = Rig(with_loras(config, 1))
    rig.add(asked("a", 1), asked("b", 2))
    play(rig, 3 * ITL_S)
    rig.add(asked("b", 2))
    assert rig.outputs("b")[0].finish_reason is FinishReason.ERROR
    rig.heard.clear()
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert [rig.finish_reason(name) for name in "ab"] == [FinishReason.ABORT] * 2


@runners
def test_client_that_does_not_read_keeps_its_slot(config: EngineConfig) -> None:
    rig = Rig(with_loras(config, 1))
    rig.add(asked("a", 1, client=1))
    play(rig, 3 * ITL_S)
    rig.add(asked("b", 2))
    for _ in range(20):
        rig.now += ITL_S
        rig._hear(rig.ranks.step(rig.now, frozenset({1})))
    assert rig.tokens("b") == []
    play(rig)
    assert [rig.finish_reason(name) for name in "ab"] == [FinishReason.LENGTH] * 2


@runners
def test_pause_lets_nobody_into_a_slot(config: EngineConfig) -> None:
    rig = Rig(with_loras(config, 1))
    rig.add(asked("a", 1), asked("b", 2))
    play(rig, 3 * ITL_S)
    pause = call(rig, "pause_generation", "wait", False)  # noqa: FBT003 - as on the wire
    play(rig)
    assert rig.finish_reason("a") is FinishReason.LENGTH
    assert is_answered(rig, pause)
    assert (rig.outputs("b"), is_due(rig)) == ([], None)
    answer(rig, "resume_scheduler")
    play(rig)
    assert rig.finish_reason("b") is FinishReason.LENGTH


def test_adapters_of_those_who_run_are_loaded_again_if_others_took_their_place() -> None:
    rig = Rig(with_loras(RUNNERS["steps"], 1))
    rig.add(asked("a", 1))
    play(rig, 3 * ITL_S)
    added = call(rig, "add_lora", lora(2))
    play(rig, ITL_S)
    assert reply(rig, added).result is True
    listed = call(rig, "list_loras")
    play(rig, ITL_S)
    assert reply(rig, listed).result == [1]


# What loading takes.


@pytest.mark.parametrize("runner", RUNNERS)
def test_loading_by_a_call_keeps_the_engine_busy(runner: str) -> None:
    rig = Rig(with_loras(RUNNERS[runner], 2, load_s=LOAD_S))
    rig.add(asked("a", None, 20))
    play(rig, 5.5 * ITL_S)
    began = rig.now
    added = call(rig, "add_lora", lora(1))
    play(rig)
    assert reply(rig, added).timestamp - began == pytest.approx(LOAD_S, abs=2 * ITL_S)
    moments = said_at(rig, "a")
    assert not [each for each in moments if began + 2 * ITL_S < each < began + LOAD_S]
    # What was missed is not made up for.
    later = [each - reply(rig, added).timestamp for each in moments if each > began + LOAD_S]
    assert later[-1] > 4 * ITL_S
    # Nor is a step computed meanwhile that was to be the next one.
    assert runner != "steps" or later[0] > 0.9 * ITL_S
    again = call(rig, "add_lora", lora(1))
    assert is_answered(rig, again)
    inplace = call(rig, "add_lora", lora(1, inplace=True))
    assert not is_answered(rig, inplace)
    play(rig)
    assert reply(rig, inplace).result is True


@runners
def test_loading_for_a_request_delays_its_first_token(config: EngineConfig) -> None:
    waited = []
    for load_s in (0.0, LOAD_S):
        rig = Rig(with_loras(config, 1, load_s=load_s))
        for name in ("first", "again"):
            began = rig.now
            rig.add(asked(name, 1))
            play(rig)
            waited.append(said_at(rig, name)[0] - began)
    usual, usual_again, first, again = waited
    assert first - usual == pytest.approx(LOAD_S)
    assert again == pytest.approx(usual_again, abs=1e-6)


def test_loading_for_a_request_keeps_others_waiting_no_longer_than_it_takes() -> None:
    load_s = 0.3 * ITL_S
    rig = Rig(with_loras(RUNNERS["free"], 1, load_s=load_s))
    rig.add(asked("a", None, 20))
    play(rig, 5.5 * ITL_S)
    rig.add(asked("b", 1))
    play(rig)
    gaps = [later - earlier for earlier, later in pairwise(said_at(rig, "a"))]
    assert max(gaps) == pytest.approx(ITL_S + load_s)


def test_every_runner_with_a_cache_names_blocks_after_the_adapter() -> None:
    for name in WITH_CACHE:
        rig = Rig(with_loras(RUNNERS[name], 2))
        for asks, number in enumerate((1, 2, 1, None)):
            rig.add(asked(f"r{asks}", number))
            play(rig)
        cached = [rig.outputs(f"r{asks}")[0].prefill_stats for asks in range(4)]
        assert [stats.num_cached_tokens for stats in cached if stats] == [0, 0, 16, 0]
