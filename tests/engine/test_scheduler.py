# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: each rule by itself, and what holds whatever happens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.kv_cache import KVCache
from mockengine.engine.scheduler import PauseState, Scheduler, SchedulerConfig
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import Pipeline, Progress, Step
from mockengine.engine.timing import StepLoad
from mockengine.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from mockengine.wire.outputs import EngineCoreEvent, EventType
from mockengine.wire.requests import LoraRequest, MultiModalFeature
from mockengine.wire.stats import PrefillStats

LETTERS = {EventType.QUEUED: "Q", EventType.SCHEDULED: "S", EventType.PREEMPTED: "P"}


class Lab:
    """A scheduler and a cache, stepped by hand."""

    def __init__(self, blocks: int = 100, *, depth: int = 1, prefix: bool = True, **limits: Any) -> None:
        fields = {"max_num_seqs": 8, "max_num_batched_tokens": 1_000, "max_model_len": 160} | limits
        self.cache = KVCache(blocks, 16, enable_prefix_caching=prefix, enable_kv_cache_events=True)
        self.scheduler = Scheduler(SchedulerConfig(**fields), self.cache)
        self.pipeline = Pipeline(self.scheduler, depth)
        self.steps: list[Step] = []
        self.got: Counter[str] = Counter()
        self.heard: dict[str, str] = {}
        self.finished: list[str] = []
        self.prefills: dict[str, PrefillStats] = {}

    def add(self, request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **fields: Any) -> TokenSequence:
        """Add a request; a number is the length of a prompt that nobody else has."""
        unlike = 1_000 * (1 + len(self.heard))
        self.heard[request_id] = ""
        self.prefills.pop(request_id, None)
        ids = [*range(unlike, unlike + prompt)] if isinstance(prompt, int) else [*prompt]
        num_prompt_tokens = len(ids)
        ids += range(500_000 + unlike, 500_000 + unlike + max_tokens)
        fields = {"stops_after": max_tokens, "arrival_time": float(len(self.heard))} | fields
        made = TokenSequence(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            tokens=lambda start, count: ids[start : start + count],
            **fields,
        )
        self.scheduler.add(made)
        return made

    def step(self) -> list[tuple[str, int]]:
        """Start a step, and finish one if it is due; return who got how many tokens."""
        step, is_due = self.pipeline.start()
        if step is not None:
            self.steps.append(step)
        return [self._hear(progress) for progress in self.pipeline.finish()] if is_due else []

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.pipeline.is_busy:
                return
            self.step()

    def _hear(self, progress: Progress) -> tuple[str, int]:
        sequence, count, news = progress
        request_id = sequence.request_id
        self.got[request_id] += count
        if news is not None:
            self.heard[request_id] += "".join(LETTERS[event.type] for event in news.events)
            if news.prefill_stats is not None:
                assert request_id not in self.prefills
                self.prefills[request_id] = news.prefill_stats
            if news.is_finished:
                self.finished.append(request_id)
        return request_id, count

    @property
    def scheduled(self) -> dict[str, int]:
        """What the last step computes."""
        return self.steps[-1].num_scheduled_tokens

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


def ids(sequences: Sequence[TokenSequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


# One request.


def test_a_request_is_computed_and_then_decodes() -> None:
    lab = Lab()
    made = lab.add("a", 20, 3)
    assert [lab.step() for _ in range(3)] == [[("a", 1)]] * 3
    assert [step.num_scheduled_tokens for step in lab.steps] == [{"a": 20}, {"a": 1}, {"a": 1}]
    assert lab.prefills == {"a": PrefillStats(20, 20, num_cache_creation_tokens=16)}
    assert (lab.heard, lab.finished, made.status) == ({"a": "QS"}, ["a"], Status.FINISHED)
    # One more step, with nothing in it, tells that nothing is left.
    assert lab.pipeline.is_busy
    assert lab.step() == []
    assert not lab.pipeline.is_busy


def test_an_asynchronous_engine_schedules_a_step_ahead() -> None:
    lab = Lab(depth=2)
    lab.add("a", 20, 3)
    assert [lab.step() for _ in range(5)] == [[], [("a", 1)], [("a", 1)], [("a", 1)], []]
    assert [step.num_scheduled_tokens for step in lab.steps] == [{"a": 20}, {"a": 1}, {"a": 1}, {}, {}]


def test_an_end_that_nobody_foresees_costs_an_asynchronous_engine_a_step() -> None:
    lab = Lab(depth=2)
    lab.add("a", 20, 10, stops_after=2)
    lab.run()
    assert (lab.got["a"], sum(step.total_num_scheduled_tokens for step in lab.steps)) == (2, 22)
    assert lab.cache.num_used_blocks == 0


def test_events_have_the_time_that_is_given() -> None:
    lab = Lab()
    made = lab.add("a", 20)
    step = lab.scheduler.schedule(2.5)
    (progress,) = lab.scheduler.update(step)
    assert progress.news is not None
    assert progress.news.events == (EngineCoreEvent(EventType.QUEUED, 0.0), EngineCoreEvent(EventType.SCHEDULED, 2.5))
    assert made.events == []


def test_an_id_can_be_used_again_when_it_is_free() -> None:
    lab = Lab()
    lab.add("a", 20)
    with pytest.raises(ValueError, match="a is here already"):
        lab.add("a", 20)
    lab.run()
    lab.add("a", 20)
    lab.run()
    assert lab.finished == ["a", "a"]


def test_results_arrive_in_order() -> None:
    lab = Lab()
    lab.add("a", 20)
    lab.scheduler.schedule()
    late = lab.scheduler.schedule()
    with pytest.raises(ValueError, match="step 2 does not arrive in order"):
        lab.scheduler.update(late)


# Limits of a step.


def test_so_many_run_at_once() -> None:
    lab = Lab(max_num_seqs=2)
    for name in "abc":
        lab.add(name, 20)
    lab.step()
    assert (lab.running, lab.waiting) == (["a", "b"], ["c"])
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting, lab.scheduler.num_skipped) == (2, 1, 0)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    lab = Lab(max_num_batched_tokens=32)
    lab.add("a", 20, 9)
    lab.step()
    lab.add("b", 60)
    assert [(lab.step(), lab.scheduled)[1] for _ in range(3)] == [
        {"a": 1, "b": 31},
        {"a": 1, "b": 29},
        {"a": 1, "b": 1},
    ]
    assert lab.heard == {"a": "QS", "b": "QS"}


def test_what_runs_shares_the_budget_with_what_is_admitted() -> None:
    lab = Lab(max_num_batched_tokens=32)
    for name in "ab":
        lab.add(name, 50)
    lab.step()
    assert (lab.scheduled, lab.waiting) == ({"a": 32}, ["b"])
    lab.step()
    assert lab.scheduled == {"a": 18, "b": 14}


def test_without_chunks_a_prompt_waits_for_the_whole_of_its_budget() -> None:
    lab = Lab(max_num_batched_tokens=160, enable_chunked_prefill=False)
    lab.add("a", 100)
    lab.add("b", 100)
    lab.step()
    assert (lab.scheduled, lab.waiting) == ({"a": 100}, ["b"])
    lab.step()
    assert lab.scheduled == {"a": 1, "b": 100}


def test_the_threshold_holds_only_in_company() -> None:
    lab = Lab(long_prefill_token_threshold=24)
    lab.add("a", 100)
    lab.step()
    assert lab.scheduled == {"a": 100}
    lab.add("b", 60)
    lab.step()
    assert lab.scheduled == {"a": 1, "b": 24}


def test_the_load_of_a_step_is_told() -> None:
    lab = Lab(max_num_batched_tokens=32)
    lab.add("a", 20, 9)
    lab.step()
    lab.add("b", 50)
    lab.step()
    lab.step()
    assert [step.load() for step in lab.steps] == [StepLoad(20, 0, 0), StepLoad(31, 1, 20), StepLoad(19, 1, 21)]


# Order.


def test_first_come_first_served() -> None:
    lab = Lab(max_num_seqs=1)
    for name in "cab":
        lab.add(name, 20, 1, priority=ord(name))
    lab.run()
    assert lab.finished == ["c", "a", "b"]


def test_the_smallest_priority_goes_first_and_then_the_earliest() -> None:
    lab = Lab(max_num_seqs=1, policy="priority")
    for name, priority in zip("abcd", (2, 1, 2, 1), strict=True):
        lab.add(name, 20, 1, priority=priority)
    lab.run()
    assert lab.finished == ["b", "d", "a", "c"]


def test_nobody_overtakes_one_that_finds_no_room() -> None:
    lab = Lab(11)
    lab.add("a", 100, 20)
    lab.add("b", 100)
    lab.add("c", 10)
    lab.step()
    assert (lab.running, lab.waiting) == (["a"], ["b", "c"])


# Room.


def test_a_request_is_admitted_only_if_its_whole_prompt_fits() -> None:
    # Both want 0.6 of the cache. The first chunk of the second would fit: it waits all the same.
    lab = Lab(101, max_model_len=1_600, max_num_batched_tokens=512)
    lab.add("a", 960, 30)
    lab.add("b", 960, 30)
    lab.step()
    while lab.got["a"] < 30:
        lab.step()
        assert lab.waiting == ["b"]
    lab.run()
    assert lab.finished == ["a", "b"]
    assert lab.heard == {"a": "QS", "b": "QS"}
    assert not any(step.preempted for step in lab.steps)


def test_the_last_to_run_is_preempted_and_begins_anew() -> None:
    lab = Lab(11)
    for name in "abc":
        lab.add(name, 46, 24)
    preempting = next(step for _ in range(10) if (lab.step(), step := lab.steps[-1])[1].preempted)
    assert (ids(preempting.preempted), lab.running, lab.waiting) == (["c"], ["a", "b"], ["c"])
    assert lab.got["c"] == 3
    lab.add("d", 5)
    resuming = next(step for _ in range(40) if (lab.step(), step := lab.steps[-1])[1].resumed)
    # Prompt and outputs are computed again, from the first of its blocks that is still cached on.
    assert (ids(resuming.resumed), ids(resuming.new)) == (["c"], ["d"])
    cached = resuming.num_computed[resuming.sequences.index(resuming.resumed[0])]
    assert resuming.num_scheduled_tokens["c"] == 49 - cached
    lab.run()
    assert lab.heard == {"a": "QS", "b": "QS", "c": "QSPS", "d": "QS"}
    assert lab.got == {"a": 24, "b": 24, "c": 24, "d": 4}
    assert lab.prefills["c"] == PrefillStats(46, 46, num_cache_creation_tokens=32)


def test_a_preemption_admits_nobody() -> None:
    lab = Lab(11, max_num_seqs=3)
    for name in "abc":
        lab.add(name, 46, 24)
    lab.add("d", 2)
    while not lab.steps or not lab.steps[-1].preempted:
        lab.step()
    assert lab.waiting == ["c", "d"]
    assert lab.steps[-1].new == []


def test_by_priority_the_least_urgent_is_preempted_wherever_it_runs() -> None:
    lab = Lab(11, policy="priority")
    for name, priority in zip("abc", (5, 1, 3), strict=True):
        lab.add(name, 46, 24, priority=priority)
    lab.step()
    assert lab.running == ["b", "c", "a"]
    while not lab.steps[-1].preempted:
        lab.step()
    assert (ids(lab.steps[-1].preempted), lab.running) == (["a"], ["b", "c"])


def test_one_that_is_scheduled_already_is_withdrawn() -> None:
    lab = Lab(8, policy="priority", max_model_len=112)
    lab.add("a", 31, 40, priority=9)
    lab.step()
    lab.add("b", 63, 40, priority=1)
    for _ in range(3):
        lab.step()
    # "a" runs first, takes the last block, and loses it to "b" in the same step.
    while not lab.steps[-1].preempted:
        lab.step()
    assert (ids(lab.steps[-1].preempted), lab.scheduled) == (["a"], {"b": 1})
    lab.run()
    assert lab.got == {"a": 40, "b": 40}


def test_tokens_on_their_way_to_a_preempted_request_arrive() -> None:
    lab = Lab(11, depth=2)
    for name in "abc":
        lab.add(name, 46, 24)
    while not lab.steps or not lab.steps[-1].preempted:
        got = lab.step()
    assert ("c", 1) in got
    assert lab.heard["c"] == "QSP"
    lab.run()
    assert lab.heard["c"] == "QSPS"
    assert lab.got == {"a": 24, "b": 24, "c": 24}


def test_a_sequence_that_never_fits_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="cannot hold max_model_len = 161 tokens"):
        Lab(11, max_model_len=161)
    with pytest.raises(ValueError, match="takes enable_chunked_prefill"):
        Lab(enable_chunked_prefill=False, max_num_batched_tokens=159)


# The prefix cache.


def test_a_prompt_is_hit_in_the_step_that_admits_it() -> None:
    lab = Lab()
    shared = list(range(64))
    for name in "abc":
        lab.add(name, [*shared, *[ord(name)] * 10])
    lab.step()
    assert lab.scheduled == {"a": 74, "b": 10, "c": 10}
    assert lab.cache.num_used_blocks == 7
    assert lab.prefills["b"] == PrefillStats(74, 10, 64, 64)
    lab.add("d", shared)
    lab.step()
    assert lab.scheduled["d"] == 16


@pytest.mark.parametrize(
    ("fields", "computed"),
    [
        ({}, 16),
        ({"cache_salt": "s"}, 64),
        ({"lora_request": LoraRequest("l", 1, "/l")}, 64),
        ({"mm_features": (MultiModalFeature("image", "i", 40, 8, None, has_data=True),)}, 32),
        ({"skip_reading_prefix_cache": True}, 64),
    ],
)
def test_what_shares_a_prefix(fields: dict[str, Any], computed: int) -> None:
    lab = Lab()
    lab.add("a", range(64))
    lab.run()
    lab.add("b", range(64), **fields)
    lab.step()
    assert lab.scheduled == {"b": computed}


def test_a_reset_waits_for_nobody_or_preempts_all() -> None:
    lab = Lab()
    for name in "ab":
        lab.add(name, 40, 9)
    lab.step()
    assert not lab.scheduler.reset_prefix_cache()
    assert lab.running == ["a", "b"]
    assert lab.scheduler.reset_prefix_cache(reset_running=True)
    assert (lab.running, lab.waiting) == ([], ["a", "b"])
    lab.step()
    assert (ids(lab.steps[-1].preempted), ids(lab.steps[-1].resumed)) == (["b", "a"], ["a", "b"])
    assert lab.scheduled == {"a": 41, "b": 41}
    lab.run()
    assert lab.heard == {"a": "QSPS", "b": "QSPS"}
    assert lab.scheduler.reset_prefix_cache()
    stats = lab.cache.take_stats()
    assert (stats.reset, stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (True, 2, 82, 0)


def test_a_reset_drops_what_is_on_its_way() -> None:
    lab = Lab(depth=2)
    lab.add("a", 40, 9)
    for _ in range(3):
        lab.step()
    assert lab.got["a"] == 2
    assert lab.scheduler.reset_prefix_cache(reset_running=True)
    # The result of the step before does not count, and the request runs again in the same step.
    assert lab.step() == []
    assert lab.scheduled == {"a": 42}
    lab.run()
    assert (lab.got["a"], lab.heard["a"]) == (9, "QSPS")


# Waiting for something else.


def test_one_that_is_blocked_is_passed_over() -> None:
    lab = Lab()
    blocked = lab.add("a", 20, is_blocked=True)
    assert (lab.scheduler.num_waiting, lab.scheduler.num_skipped) == (0, 1)
    lab.add("b", 20)
    lab.step()
    assert (lab.running, lab.waiting, lab.scheduler.num_skipped) == (["b"], ["a"], 1)
    blocked.is_blocked = False
    lab.step()
    assert (lab.running, lab.scheduler.num_skipped) == (["b", "a"], 0)


def test_one_that_is_blocked_while_it_runs_stays_where_it_is() -> None:
    lab = Lab()
    blocked = lab.add("a", 20, 9)
    lab.add("b", 20, 9)
    lab.step()
    blocked.is_blocked = True
    lab.step()
    assert (lab.scheduled, lab.running) == ({"b": 1}, ["a", "b"])
    blocked.is_blocked = False
    lab.run()
    assert lab.got == {"a": 9, "b": 9}


def test_so_many_adapters_are_in_a_step() -> None:
    lab = Lab(max_loras=1)
    for name, lora in zip("abcd", (1, 2, 1, None), strict=True):
        lab.add(name, 20, 3, lora_request=LoraRequest(f"l{lora}", lora, "/l") if lora else None)
    lab.step()
    assert (lab.running, lab.waiting, lab.scheduler.num_skipped) == (["a", "c", "d"], ["b"], 1)
    lab.run()
    assert lab.finished == ["a", "c", "d", "b"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_those_passed_over_keep_their_place(policy: str) -> None:
    lab = Lab(policy=policy)
    made = [lab.add(name, 20, is_blocked=True) for name in "abc"]
    lab.step()
    assert lab.waiting == ["a", "b", "c"]
    made[1].is_blocked = False
    lab.step()
    assert (lab.running, lab.waiting) == (["b"], ["a", "c"])


# Pauses.


def test_a_pause_of_new_requests_lets_others_end() -> None:
    lab = Lab()
    lab.add("a", 20)
    lab.step()
    lab.scheduler.pause_state = PauseState.PAUSED_NEW
    lab.add("b", 20)
    lab.run()
    assert (lab.finished, lab.waiting, lab.pipeline.is_busy) == (["a"], ["b"], False)
    lab.scheduler.pause_state = PauseState.UNPAUSED
    lab.run()
    assert lab.finished == ["a", "b"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_of_everything_freezes_it(depth: int) -> None:
    lab = Lab(depth=depth)
    lab.add("a", 20)
    lab.step()
    lab.add("b", 20)
    lab.scheduler.pause_state = PauseState.PAUSED_ALL
    lab.run()
    assert (lab.got, lab.running, lab.waiting) == ({"a": 1}, ["a"], ["b"])
    assert lab.scheduler.schedule().is_empty
    lab.scheduler.update(lab.scheduler._under_way[0])
    lab.scheduler.pause_state = PauseState.UNPAUSED
    lab.run()
    assert lab.got == {"a": 4, "b": 4}


# Aborts.


def test_an_abort_of_nobody_is_ignored() -> None:
    assert Lab().scheduler.abort("a") is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_ends_a_request_wherever_it_is(depth: int, steps: int) -> None:
    lab = Lab(depth=depth, max_num_batched_tokens=32)
    made = lab.add("a", 50)
    for _ in range(steps):
        lab.step()
    assert lab.scheduler.abort("a") is made
    assert made.is_finished
    assert lab.scheduler.abort("a") is None
    assert (lab.running, lab.waiting, lab.cache.num_used_blocks) == ([], [], 0)
    assert lab.scheduler.has_requests
    before = lab.got["a"]
    lab.run()
    assert (lab.got["a"], lab.finished) == (before, [])


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_ends_a_preempted_request(depth: int) -> None:
    lab = Lab(11, depth=depth)
    for name in "abc":
        lab.add(name, 46, 24)
    while not lab.steps or not lab.steps[-1].preempted:
        lab.step()
    assert lab.waiting == ["c"]
    lab.scheduler.abort("c")
    lab.run()
    assert lab.finished == ["a", "b"]
    assert lab.scheduler.num_skipped == 0


def test_an_id_used_again_gets_nothing_of_the_one_before() -> None:
    lab = Lab(depth=2)
    lab.add("a", 20, 9)
    for _ in range(2):
        lab.step()
    lab.scheduler.abort("a")
    lab.got.clear()
    lab.add("a", 20, 2)
    lab.run()
    assert (lab.got["a"], lab.finished) == (2, ["a"])


# Several tokens in a step.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("per_step", [1, 4, 8])
@pytest.mark.parametrize("output", [1, 3, 4, 17])
def test_all_is_computed_once_but_the_tokens_said_last(depth: int, per_step: int, output: int) -> None:
    lab = Lab(depth=depth, tokens_per_step=per_step)
    lab.add("a", [*range(40)], output)
    lab.run()
    lab.add("b", [*range(32), 5], output)
    lab.run()
    computed = Counter[str]()
    for step in lab.steps:
        computed.update(step.num_scheduled_tokens)
    # The tokens of the last output are said and never computed.
    last = output % per_step or per_step
    assert computed == {"a": 40 + output - last, "b": 1 + output - last}
    assert lab.got == {"a": output, "b": output}


def test_a_step_brings_full_chunks_and_then_the_rest() -> None:
    lab = Lab(tokens_per_step=4)
    lab.add("a", 20, 10)
    assert [lab.step() for _ in range(3)] == [[("a", 4)], [("a", 4)], [("a", 2)]]
    assert [step.num_scheduled_tokens for step in lab.steps] == [{"a": 20}, {"a": 4}, {"a": 4}]


def test_a_stop_within_a_chunk_cuts_it() -> None:
    lab = Lab(tokens_per_step=4, depth=2)
    lab.add("a", 20, 100, stops_after=6)
    lab.run()
    assert (lab.got["a"], lab.finished, lab.cache.num_used_blocks) == (6, ["a"], 0)


# Whatever happens.


@dataclass(frozen=True)
class Arrival:
    """A request comes in, with a prompt that begins like others."""

    head: int
    length: int
    tail: int
    max_tokens: int
    priority: int


@dataclass(frozen=True)
class Departure:
    """A request is aborted, if it is there."""

    nth: int


@dataclass(frozen=True)
class Steps:
    """Some steps are made."""

    count: int


@dataclass(frozen=True)
class Reset:
    """The cache is reset."""

    reset_running: bool


EVENTS = st.lists(
    st.one_of(
        st.builds(
            Arrival,
            st.integers(0, 2),
            st.integers(1, 100),
            st.integers(0, 2),
            st.integers(1, 40),
            st.integers(0, 2),
        ),
        st.builds(Departure, st.integers(0, 20)),
        st.builds(Steps, st.integers(1, 12)),
        st.builds(Reset, st.booleans()),
        st.sampled_from(PauseState),
    ),
    max_size=40,
)
BUDGETS = (24, 64, 500)
LABS = st.builds(
    Lab,
    st.just(11),
    depth=st.sampled_from([1, 2]),
    prefix=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.just(4),
    max_num_batched_tokens=st.sampled_from(BUDGETS),
    tokens_per_step=st.sampled_from([1, 1, 3, 8]),
)


def check(lab: Lab) -> None:
    """Assert what holds after every step."""
    scheduler, cache = lab.scheduler, lab.cache
    named = {block for sequence in scheduler.running for block in sequence.named_blocks}
    nameless = sum(sequence.num_blocks - len(sequence.named_blocks) for sequence in scheduler.running)
    assert cache.num_used_blocks == len(named) + nameless
    holders = Counter(block for sequence in scheduler.running for block in sequence.named_blocks)
    assert all(block.num_holders == count for block, count in holders.items())
    for sequence in scheduler.running:
        assert sequence.num_blocks == cache.blocks_for(sequence.num_computed_tokens)
    assert all(not sequence.num_blocks for sequence in scheduler.waiting)
    assert scheduler.num_running <= 4
    assert scheduler.num_waiting >= 0
    if lab.steps:
        assert lab.steps[-1].total_num_scheduled_tokens <= scheduler._config.max_num_batched_tokens


@settings(max_examples=200, deadline=None)
@given(lab=LABS, events=EVENTS)
def test_blocks_never_leak_and_everybody_gets_what_is_due(
    lab: Lab, events: list[Arrival | Departure | Steps | Reset | PauseState]
) -> None:
    due: dict[str, int] = {}
    for event in events:
        match event:
            case Arrival():
                name = f"r{len(due)}"
                due[name] = event.max_tokens
                lab.add(name, [event.head] * event.length + [event.tail], event.max_tokens, priority=event.priority)
            case Departure(nth):
                if lab.scheduler.abort(f"r{nth}") is not None:
                    due[f"r{nth}"] = lab.got[f"r{nth}"]
            case Steps(count):
                for _ in range(count):
                    lab.step()
                    check(lab)
            case Reset(reset_running):
                lab.scheduler.reset_prefix_cache(reset_running)
            case PauseState():
                lab.scheduler.pause_state = event
    lab.scheduler.pause_state = PauseState.UNPAUSED
    lab.run()
    assert not lab.pipeline.is_busy
    assert {name: lab.got[name] for name in due} == due
    assert lab.cache.num_used_blocks == 0
    assert lab.scheduler.reset_prefix_cache()


def test_events_rebuild_the_index_while_requests_come_and_go() -> None:
    lab = Lab(16, depth=2, max_num_seqs=6, max_num_batched_tokens=64)
    index: Counter[object] = Counter()
    evicted = number = steps = 0
    while steps < 10_000:
        if lab.scheduler.num_waiting < 3:
            number += 1
            lab.add(f"r{number}", [number % 7] * (number * 37 % 90 + 1) + [number], number * 13 % 50 + 1)
        lab.step()
        steps += 1
        for event in lab.cache.take_events():
            match event:
                case BlockStored():
                    index.update(event.block_hashes)
                case BlockRemoved():
                    index.subtract(event.block_hashes)
                    evicted += 1
                case AllBlocksCleared():
                    index.clear()
        assert +index == lab.cache.block_hashes()
    assert evicted > 1_000
    assert any(step.preempted for step in lab.steps)


def test_a_decode_costs_little() -> None:
    lab = Lab(20_000, max_num_seqs=256, max_num_batched_tokens=65_536, max_model_len=4_096)
    for number in range(256):
        lab.add(f"r{number}", 20, 2_000)
    lab.step()
    best = 1.0
    for _ in range(10):
        start = process_time()
        for _ in range(16):
            lab.scheduler.update(lab.scheduler.schedule())
        best = min(best, (process_time() - start) / 16 / 256)
    # 0.8 µs for a request and step here; the bar is 1 µs, and a busy machine must not turn this red.
    assert best < 5e-6
