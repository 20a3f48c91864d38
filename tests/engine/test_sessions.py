# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions: what their turns say, when they end, and what they hold meanwhile, whatever runs them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.core import EngineCore
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.ranks import Ranks
from mockengine.engine.timing import TimingConfig
from mockengine.wire.kv_events import BlockStored, KVCacheEvent
from mockengine.wire.messages import Add, Unreadable
from mockengine.wire.outputs import EventType, FinishReason, StartWave, StepOutputs
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import PoolingParams, SamplingParams
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.tensors import Tensor
from tests.engine.test_batching import expected_tokens, play, said_at, steps, steps_of
from tests.support.rig import CONFIG, EOS, Rig, request

QUEUED, SCHEDULED = EventType.QUEUED, EventType.SCHEDULED
SPECULATION = SpeculationConfig(acceptance_rates=(0.8, 0.6))
PER_REQUEST = TimingConfig(timing="per_request", ttft_ms=10.0, itl_ms=5.0)
EMBED = PoolingParams(use_activation=None, dimensions=None, task="embed")
SYNC = {"async_scheduling": False}
RUNNERS: dict[str, dict[str, Any]] = {
    "off": {},
    "off, chunks": {"output_token_chunk_size": 4},
    "off, drafts": {"speculation": SPECULATION},
    "off, per_request": {"timing": PER_REQUEST},
    "vllm, synchronous": {"batching": SYNC, "timing": steps_of(10)},
    "vllm, asynchronous": {"batching": {}, "timing": steps_of(10)},
    "vllm, instant": {"batching": {}},
    "vllm, chunks": {"batching": {}, "output_token_chunk_size": 4},
    "vllm, per_request": {"batching": {}, "timing": PER_REQUEST},
    "vllm, drafts": {"batching": {}, "speculation": SPECULATION, "timing": steps_of(10)},
    "vllm, synchronous, drafts": {"batching": SYNC, "speculation": SPECULATION, "timing": steps_of(10)},
    "vllm, per_request, drafts": {"batching": {}, "speculation": SPECULATION, "timing": PER_REQUEST},
}
everywhere = pytest.mark.parametrize("runner", RUNNERS)
with_scheduler = pytest.mark.parametrize("runner", [name for name in RUNNERS if name.startswith("vllm")])


def config(runner: str, *, limits: dict[str, Any] | None = None, **more: Any) -> EngineConfig:
    values: dict[str, Any] = {"max_model_len": 512, **RUNNERS[runner], **more}
    if "batching" in values:
        values["batching"] = BatchingConfig(**{"num_gpu_blocks": 200, **values["batching"], **(limits or {})})
    return replace(CONFIG, **values)


def turn(prompt: Sequence[int], max_tokens: int = 4, request_id: str = "s1", **fields: Any) -> EngineCoreRequest:
    return request(request_id, prompt=prompt, max_tokens=max_tokens, resumable=True, **fields)


def no_more(request_id: str = "s1") -> EngineCoreRequest:
    """Make what a Python frontend sends when the input of a session has ended."""
    return request(request_id, prompt=[0])


def reply(prompt: Sequence[int], count: int) -> list[int]:
    """Return what is said to a plain request of this prompt."""
    return expected_tokens(list(prompt), count)


def turns(rig: Rig, request_id: str = "s1") -> list[tuple[list[int], FinishReason]]:
    """Return the turns that have ended: tokens and finish reason."""
    ended, tokens = [], list[int]()
    for output in rig.outputs(request_id):
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            ended.append((tokens, output.finish_reason))
            tokens = []
    return ended


def load(rig: Rig) -> SchedulerStats:
    return [envelope.scheduler_stats for envelope in steps(rig) if envelope.scheduler_stats is not None][-1]


def is_empty(rig: Rig) -> bool:
    last = load(rig)
    return (last.num_running_reqs, last.num_waiting_reqs, last.num_skipped_waiting_reqs, last.kv_cache_usage) == (
        *(0, 0, 0),
        0.0,
    )


# What is said.


@everywhere
def test_a_turn_goes_on_from_prompt_and_reply_but_for_the_last_token(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1] * 20, 9))
    play(rig)
    rig.add(turn([2] * 7, 1))
    play(rig)
    rig.add(turn([3], 6))
    play(rig)
    first = [1] * 20
    second = first + reply(first, 8) + [2] * 7
    third = [*second, 3]
    assert turns(rig) == [
        (reply(first, 9), FinishReason.LENGTH),
        (reply(second, 1), FinishReason.LENGTH),
        (reply(third, 6), FinishReason.LENGTH),
    ]
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None


@everywhere
def test_turns_that_come_early_are_said_one_after_the_other(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1, 2], 5), turn([3], 2))
    rig.step()
    rig.add(turn([4, 5], 3), no_more())
    play(rig)
    second = [1, 2, *reply([1, 2], 4), 3]
    third = [*second, *reply(second, 1), 4, 5]
    assert turns(rig) == [
        (reply([1, 2], 5), FinishReason.LENGTH),
        (reply(second, 2), FinishReason.LENGTH),
        (reply(third, 3), FinishReason.LENGTH),
    ]
    assert is_empty(rig)
    assert "s1" not in rig.ranks.engines[0]._sessions


@everywhere
def test_each_turn_has_limits_of_its_own_and_ends_by_them(runner: str) -> None:
    rig = Rig(config(runner))
    stops = SamplingParams(max_tokens=20, eos_token_id=EOS, logit_bias={EOS: 100.0}, min_tokens=3)
    rig.add(replace(turn([1, 2]), sampling_params=stops))
    play(rig)
    rig.add(turn([3], 2))
    play(rig)
    (said, reason), (_, last) = turns(rig)
    assert (len(said), said[-1], reason) == (4, EOS, FinishReason.STOP)
    assert last is FinishReason.LENGTH
    second = [1, 2, *said[:-1], 3]
    assert rig.tokens("s1")[4:] == reply(second, 2)


@everywhere
def test_how_a_prompt_was_computed_is_told_once(runner: str) -> None:
    rig = Rig(config(runner))
    for prompt in ([1] * 40, [2] * 40):
        rig.add(turn(prompt, 3))
        play(rig)
    told = [output.prefill_stats for output in rig.outputs("s1") if output.prefill_stats is not None]
    assert [stats.num_prompt_tokens for stats in told] == [40]


@everywhere
def test_what_waits_is_told_to_be_queued_with_the_end_of_the_turn_before(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1, 2], 5), turn([3], 5))
    play(rig)
    rig.add(turn([4], 5))
    play(rig)
    ends = [index for index, output in enumerate(rig.outputs("s1")) if output.finish_reason is not None]
    events = [[event.type for event in output.events] for output in rig.outputs("s1")]
    assert [events[0], events[ends[0]], events[ends[0] + 1], events[ends[1] + 1]] == [
        *([QUEUED, SCHEDULED], [QUEUED]),
        *([SCHEDULED], [QUEUED, SCHEDULED]),
    ]
    assert sum(map(len, events)) == 6
    stamps = [event.timestamp for output in rig.outputs("s1") for event in output.events]
    assert stamps == sorted(stamps)


# How it ends.


@everywhere
def test_a_session_that_waits_ends_without_a_word(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1] * 40))
    play(rig)
    said = len(rig.outputs("s1"))
    rig.add(no_more())
    play(rig)
    assert len(rig.outputs("s1")) == said
    assert is_empty(rig)
    # The id is free.
    rig.add(request("s1", prompt=[5], max_tokens=3))
    play(rig)
    assert turns(rig)[-1] == (reply([5], 3), FinishReason.LENGTH)


@everywhere
@pytest.mark.parametrize("when", ["at once", "meanwhile"])
def test_a_session_whose_input_ends_early_ends_with_its_turn(runner: str, when: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1, 2], 6))
    if when == "meanwhile":
        rig.step()
    rig.add(no_more())
    play(rig)
    assert turns(rig) == [(reply([1, 2], 6), FinishReason.LENGTH)]
    assert is_empty(rig)


@everywhere
def test_an_aborted_session_says_nothing_more_whatever_is_heard_of_it(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1] * 40, 50))
    rig.step()
    rig.add(turn([2]))
    rig.abort("s1")
    rig.add(request("other", prompt=[9], max_tokens=3))
    play(rig)
    assert turns(rig) == []
    assert rig.tokens("other") == reply([9], 3)
    assert is_empty(rig)


@everywhere
def test_a_session_is_aborted_while_it_waits(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1] * 40))
    play(rig)
    rig.abort("s1")
    rig.abort("s1")
    play(rig)
    assert is_empty(rig)
    rig.add(turn([7], 3))
    play(rig)
    assert turns(rig)[-1] == (reply([7], 3), FinishReason.LENGTH)


@everywhere
def test_leaving_does_not_wait_for_input_and_tells_the_session(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1]))
    play(rig)
    assert rig.ranks.num_requests == 0
    rig.ranks.begin_shutdown()
    rig.add(turn([2]))
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert [reason for _, reason in turns(rig)] == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ABORT]
    assert rig.watcher.refused == [("s1", "Server shutting down")]


@everywhere
def test_input_that_ends_while_the_engine_leaves_cuts_nothing_short(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1], 6))
    rig.step()
    rig.ranks.begin_shutdown()
    rig.add(no_more())
    play(rig)
    assert turns(rig) == [(reply([1], 6), FinishReason.LENGTH)]


def test_a_frontend_that_counts_hears_of_the_end_of_a_session_once() -> None:
    rig = Rig(replace(CONFIG, data_parallel_size=2))
    rig.add(turn([1]), turn([2], request_id="s2"))
    play(rig)
    rig.add(turn([3]))
    play(rig)
    assert not [envelope for envelope in steps(rig) if envelope.finished_requests]
    rig.add(no_more())
    rig.abort("s2")
    play(rig)
    reported = [request_id for envelope in steps(rig) for request_id in envelope.finished_requests]
    assert sorted(reported) == ["s1", "s2"]


def test_a_session_that_waits_keeps_no_wave_going() -> None:
    rig = Rig(replace(CONFIG, data_parallel_size=2, has_coordinator=True, has_waves=True))
    rig.add(turn([1]))
    play(rig)
    assert not rig.ranks.engines[0].wave.running
    rig.add(turn([2]))
    assert [type(envelope) for envelope in rig.to_coordinator].count(StartWave) == 2
    play(rig)
    assert len(turns(rig)) == 2


# What cannot be served.


@everywhere
@pytest.mark.parametrize("early", [False, True])
def test_a_turn_that_cannot_be_served_ends_with_an_error_in_its_place(runner: str, *, early: bool) -> None:
    rig = Rig(config(runner))
    wrong = [
        (turn([]), "the prompt is empty"),
        (turn([5] * 600), "the prompt has"),
        (replace(turn([1]), sampling_params=None, pooling_params=EMBED), "no pooling task"),
        (replace(turn([]), prompt_token_ids=None, prompt_embeds=Tensor("float32", (1, 1), bytes(4))), "prompt_embeds"),
        (replace(turn([1]), sampling_params=SamplingParams(structured_outputs={"regex": "a"})), "tokenizer"),
    ]
    rig.add(turn([1, 2], 5))
    for each in [*(bad for bad, _ in wrong), turn([3], 2)]:
        if not early:
            play(rig)
        rig.add(each)
    play(rig)
    reasons = [FinishReason.LENGTH, *[FinishReason.ERROR] * 5, FinishReason.LENGTH]
    assert [reason for _, reason in turns(rig)] == reasons
    errors = [output.error.message for output in rig.outputs("s1") if output.error is not None]
    for message, (_, words) in zip(errors, wrong, strict=True):
        assert words in message
    assert [message for _, message in rig.watcher.refused] == errors
    assert rig.tokens("s1")[5:] == reply([1, 2, *reply([1, 2], 4), 3], 2)


@everywhere
def test_a_session_may_begin_with_what_cannot_be_served(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([]))
    play(rig)
    rig.add(turn([1, 2], 3), no_more())
    play(rig)
    assert turns(rig) == [([], FinishReason.ERROR), (reply([1, 2], 3), FinishReason.LENGTH)]
    told = [output.prefill_stats for output in rig.outputs("s1") if output.prefill_stats is not None]
    assert [stats.num_prompt_tokens for stats in told] == [2]
    assert is_empty(rig)


@everywhere
def test_a_session_ends_with_a_last_turn_that_cannot_be_served(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1, 2], 3), turn([]), no_more())
    play(rig)
    assert turns(rig) == [(reply([1, 2], 3), FinishReason.LENGTH), ([], FinishReason.ERROR)]
    assert is_empty(rig)


@everywhere
def test_a_turn_that_cannot_be_read_ends_in_its_place(runner: str) -> None:
    rig = Rig(config(runner))
    rig.add(turn([1], 5))
    rig.step()
    rig.receive(Unreadable("no such field", "ADD", (3,), request_id="s1"))
    rig.add(turn([2], 2))
    play(rig)
    assert [reason for _, reason in turns(rig)] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]


def test_an_id_in_flight_is_refused_unless_both_are_of_a_session() -> None:
    rig = Rig()
    rig.add(request("r1", max_tokens=5))
    rig.add(turn([1], request_id="r1"), request("r1", prompt=[7]))
    play(rig)
    assert rig.watcher.refused == [("r1", "a request of the same id is in flight")] * 2
    assert rig.tokens("r1") == reply([1, 2, 3], 5)


def test_a_session_that_has_filled_the_context_goes_on_with_nothing() -> None:
    rig = Rig(replace(CONFIG, max_model_len=16))
    rig.add(turn([1] * 10, 100))
    play(rig)
    rig.add(turn([2], 5))
    play(rig)
    assert [(len(said), reason) for said, reason in turns(rig)] == [(6, FinishReason.LENGTH), (0, FinishReason.LENGTH)]
    rig.add(turn([3], 5))
    play(rig)
    assert turns(rig)[-1] == ([], FinishReason.ERROR)


# What it holds.


@with_scheduler
def test_a_session_that_waits_holds_its_blocks_and_its_slot_and_wakes_nobody(runner: str) -> None:
    rig = Rig(config(runner, limits={"max_num_seqs": 1}))
    rig.add(turn([1] * 40))
    play(rig)
    waiting = load(rig)
    assert (waiting.num_running_reqs, waiting.num_waiting_reqs, waiting.num_skipped_waiting_reqs) == (0, 0, 1)
    assert waiting.kv_cache_usage == pytest.approx(3 / 199, abs=1 / 199)
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None
    assert (rig.ranks.engines[0].num_running, rig.ranks.engines[0].num_waiting) == (0, 0)
    rig.add(request("r1", prompt=[8], max_tokens=2))
    for _ in range(50):
        rig.step()
    assert rig.tokens("r1") == []
    rig.add(turn([2]))
    for _ in range(200):
        rig.step()
    assert (len(turns(rig)), rig.tokens("r1")) == (2, [])
    rig.add(no_more())
    play(rig)
    assert rig.tokens("r1") == reply([8], 2)
    assert is_empty(rig)


def test_a_turn_computes_what_is_new_and_looks_nothing_up() -> None:
    rig = Rig(config("vllm, synchronous", timing=TimingConfig(timing="step", step_ms_per_prefill_token=1.0)))
    rig.add(turn([1] * 100, 1))
    play(rig)
    began = rig.now
    rig.add(turn([2] * 30, 1))
    play(rig)
    (first, second), queries = (
        said_at(rig, "s1"),
        [envelope.scheduler_stats.prefix_cache_stats.queries for envelope in steps(rig) if envelope.scheduler_stats],
    )
    assert first == pytest.approx(100.1)
    assert second - began == pytest.approx(0.03)
    assert sum(queries) == 100


def test_the_first_token_of_a_turn_takes_as_long_as_what_is_new() -> None:
    timing = TimingConfig(timing="per_request", prefill_ms_per_token=1.0, itl_ms=5.0)
    rig = Rig(config("off", timing=timing))
    rig.add(turn([1] * 100, 3))
    play(rig)
    began = rig.now
    rig.add(turn([2] * 30, 1))
    play(rig)
    assert said_at(rig, "s1")[-1] - began == pytest.approx(0.030, abs=0.001)


def test_blocks_of_a_turn_follow_those_of_the_turns_before() -> None:
    heard: list[KVCacheEvent] = []
    rig = Rig()
    engine = EngineCore(0, config("vllm, synchronous"), rig.dialect, rig.watcher, heard.extend)
    rig.ranks = Ranks([engine])
    rig.add(turn([1] * 20, 6))
    play(rig)
    rig.add(turn([2] * 30, 2))
    play(rig)
    rig.add(no_more())
    play(rig)
    whole = [1] * 20 + reply([1] * 20, 5) + [2] * 30
    stored = [event for event in heard if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == whole[:48]
    hashes = [block for event in stored for block in event.block_hashes]
    parents = [event.parent_block_hash for event in stored]
    assert parents[0] is None
    assert all(parent in hashes for parent in parents[1:])
    # Whoever has the same prompt hits them.
    rig.add(request("r1", prompt=[*whole, 9], max_tokens=1))
    play(rig)
    stats = rig.outputs("r1")[0].prefill_stats
    assert stats is not None
    assert stats.num_cached_tokens == 48


@with_scheduler
def test_sessions_that_hold_all_blocks_let_others_wait_and_not_spin(runner: str) -> None:
    rig = Rig(config(runner, limits={"num_gpu_blocks": 33}))
    rig.add(turn([1] * 300, 4))
    play(rig)
    rig.add(request("r1", prompt=[2] * 200, max_tokens=100))
    play(rig)
    assert len(rig.tokens("r1")) < 100
    assert rig.ranks.num_requests == 1
    rig.add(no_more())
    play(rig)
    assert rig.tokens("r1") == reply([2] * 200, 100)
    assert is_empty(rig)


@everywhere
def test_a_client_that_does_not_read_holds_up_its_sessions_and_no_others(runner: str) -> None:
    rig = Rig(config(runner, clients=2))
    rig.add(turn([1]), turn([2], request_id="s2", client=1))
    play(rig)
    stalled = frozenset({1})
    rig.step(stalled)
    rig.add(turn([3]), turn([4], request_id="s2", client=1))
    for _ in range(200):
        rig.step(stalled)
    assert (len(turns(rig)), len(turns(rig, "s2"))) == (2, 1)
    play(rig)
    assert len(turns(rig, "s2")) == 2


# Anything else.


@with_scheduler
@settings(deadline=None, max_examples=25)
@given(
    actions=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["turn"] * 5 + ["end", "abort"]),
            st.integers(1, 60),
            st.integers(1, 30),
        ),
        max_size=30,
    ),
    pauses=st.lists(st.integers(0, 12), min_size=30, max_size=30),
)
def test_every_turn_is_said_whole_and_nothing_is_left(
    runner: str, actions: list[tuple[int, str, int, int]], pauses: list[int]
) -> None:
    rig = Rig(config(runner, limits={"num_gpu_blocks": 65, "max_num_seqs": 3, "max_num_batched_tokens": 64}))
    asked: dict[str, list[tuple[list[int], int]]] = {f"s{number}": [] for number in range(4)}
    ended, aborted = set[str](), set[str]()
    for place, (number, action, num_tokens, max_tokens) in enumerate(actions):
        name = f"s{number}"
        if name in ended:
            continue
        match action:
            case "turn":
                prompt = [place] * num_tokens
                asked[name].append((prompt, max_tokens))
                rig.add(turn(prompt, max_tokens, name))
            case "end" if asked[name]:
                ended.add(name)
                rig.add(no_more(name))
            case "abort":
                ended.add(name)
                aborted.add(name)
                rig.abort(name)
        for _ in range(pauses[place]):
            if rig.ranks.next_deadline(rig.now, frozenset()) is not None:
                rig.step()
    rig.add(*(no_more(name) for name in asked if asked[name] and name not in ended))
    play(rig)
    for name in set(asked) - aborted:
        assert turns(rig, name) == expected_turns(asked[name], max_model_len=512)
    assert (rig.ranks.num_requests, rig.ranks.engines[0]._runner.num_paused) == (0, 0)
    assert not steps(rig) or is_empty(rig)


def expected_turns(asked: list[tuple[list[int], int]], max_model_len: int) -> list[tuple[list[int], FinishReason]]:
    """Return what is said to turns of these prompts and numbers of tokens."""
    whole, expected = list[int](), []
    for prompt, max_tokens in asked:
        room = max_model_len - len(whole) - len(prompt)
        if room < 0:
            expected.append((list[int](), FinishReason.ERROR))
            continue
        whole += prompt
        said = reply(whole, min(max_tokens, room))
        expected.append((said, FinishReason.LENGTH))
        whole += said[:-1]
    return expected


def test_a_message_from_a_frontend_is_read_as_a_turn() -> None:
    rig = Rig()
    heard = rig.receive(Add(turn([1], 1)))
    assert heard == []
    (said,) = [each for each in rig.step() if isinstance(each, StepOutputs) and each.outputs]
    assert said.outputs[0].finish_reason is FinishReason.LENGTH
