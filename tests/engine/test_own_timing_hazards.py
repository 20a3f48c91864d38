# SPDX-License-Identifier: Apache-2.0
"""Requests with a timing of their own keep their place, whatever else happens: nobody is lost or early."""

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import KvTransferConfig
from mockengine.replies.wish import OwnTiming
from mockengine.wire.outputs import EventType, UtilityReply
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.utility import UtilityCall
from tests.engine.test_batching import expected_tokens, play, steps_of
from tests.engine.test_own_timing import (
    ENGINES,
    ITL_S,
    SCHEDULED,
    STEPPED,
    TICK_S,
    TOKENS,
    TTFT_S,
    rig_of,
    said_at,
    scheduled_at,
)
from tests.engine.test_transfers import RECEIVE, SEND
from tests.support.rig import Rig, request


@pytest.mark.parametrize("engine", SCHEDULED)
def test_a_place_is_held_until_the_reply_has_been_said(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)}, max_num_seqs=1)
    began = rig.now
    rig.add(request("own", max_tokens=TOKENS[engine]), request("next", prompt=[8], max_tokens=2))
    play(rig, until=began + TTFT_S + 8.5 * ITL_S)
    load = rig.ranks.engines[0]
    assert (load.num_running, load.num_waiting) == (1, 1)
    play(rig)
    assert scheduled_at(rig, "next") == pytest.approx(began + TTFT_S + 9 * ITL_S, abs=TICK_S)


@pytest.mark.parametrize("engine", SCHEDULED)
def test_a_time_counts_from_when_a_request_is_scheduled(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S)}, max_num_seqs=1)
    rig.add(request("first", prompt=[8], max_tokens=40), request("own", max_tokens=2))
    play(rig)
    assert said_at(rig, "own")[0] == pytest.approx(scheduled_at(rig, "own") + TTFT_S, abs=TICK_S)


@pytest.mark.parametrize("engine", ["moments, limited", "steps", "steps, async"])
def test_blocks_of_other_instances_are_loaded_and_kept_as_ever(engine: str) -> None:
    own = OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)
    transfer = KvTransferConfig(engine_id="here", transfer_s=0.3, hold_s=1.0)
    rig = rig_of(engine, {"loads": own, "keeps": own}, kv_transfer=transfer)
    began = rig.now
    for name, asked in (("loads", RECEIVE), ("keeps", SEND)):
        params = SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": asked})
        rig.add(request(name, prompt=list(range(100)), sampling_params=params))
    play(rig, until=began + TTFT_S + ITL_S + 0.01)
    (_, last) = rig.outputs("keeps")
    assert last.kv_transfer_params is not None
    assert rig.ranks.engines[0]._runner.load().kv_cache_usage > 0, "its blocks are kept"
    play(rig)
    assert said_at(rig, "keeps") == pytest.approx([began + TTFT_S, began + TTFT_S + ITL_S], abs=TICK_S)
    loaded = began + 0.3 + TTFT_S
    assert said_at(rig, "loads") == pytest.approx([loaded, loaded + ITL_S], abs=2e-3)
    assert rig.ranks.engines[0]._runner.load().kv_cache_usage == 0


@pytest.mark.parametrize("engine", SCHEDULED)
@pytest.mark.parametrize("reset_at_s", [0.1, TTFT_S + 2.5 * ITL_S])
def test_a_reset_while_it_waits_changes_no_moment(engine: str, reset_at_s: float) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)})
    began = rig.now
    rig.add(request("own", prompt=list(range(40)), max_tokens=TOKENS[engine]))
    play(rig, until=began + reset_at_s)
    rig.receive(UtilityCall(0, 1, "reset_prefix_cache", (True,)))
    play(rig)
    assert [each.result for each in rig.to(0) if isinstance(each, UtilityReply)] == [True]
    due = [began + TTFT_S + position * ITL_S for position in range(10)]
    # Where there are drafts, the output after an admission has none, so that there is one output more.
    assert said_at(rig, "own")[:10] == pytest.approx(due, abs=TICK_S)
    assert rig.tokens("own") == expected_tokens(list(range(40)), TOKENS[engine])
    events = [event.type for output in rig.outputs("own") for event in output.events]
    assert events == [EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED, EventType.SCHEDULED]


@pytest.mark.parametrize("engine", ["steps", "steps, async"])
def test_what_a_reset_drops_is_said_all_the_same(engine: str) -> None:
    """The output is computed when the cache is forgotten, so it is computed once more before the reply stalls."""
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, stalls_after=1)}, timing=steps_of(10.0))
    began = rig.now
    rig.add(request("own", max_tokens=5))
    rig.add(request("other", prompt=[9] * 20, max_tokens=100))
    play(rig, until=began + TTFT_S + 0.008)
    for rank in rig.ranks.engines:
        assert rank._runner.reset_prefix_cache(rig.now, reset_running=True)
    play(rig)
    (said,) = said_at(rig, "own")
    assert began + TTFT_S + 0.010 <= said < began + TTFT_S + 0.060
    assert rig.tokens("other") == expected_tokens([9] * 20, 100)


@pytest.mark.parametrize("engine", STEPPED)
def test_a_reset_drops_the_only_output_that_is_computed(engine: str) -> None:
    """Nobody else is there, so nothing else would have the engine make another step."""
    rig = rig_of(engine, {"own": OwnTiming(itl_s=ITL_S)}, timing=steps_of(10.0))
    rig.add(request("own", max_tokens=2))
    play(rig, until=rig.now)
    assert rig.ranks.engines[0]._runner.reset_prefix_cache(rig.now, reset_running=True)
    play(rig)
    assert rig.tokens("own") == expected_tokens([1, 2, 3], 2)


# Everything at once.

ARRIVAL = st.tuples(
    st.just("add"),
    st.integers(0, 1),
    st.integers(1, 70),
    st.integers(1, 30),
    st.builds(
        OwnTiming,
        ttft_s=st.sampled_from([None, 0.0, 0.01, 0.2, inf]),
        itl_s=st.sampled_from([None, None, 0.0, 0.0007, 0.011]),
        stalls_after=st.sampled_from([None, None, None, 1, 3]),
    ),
)
EVENT = st.one_of(
    ARRIVAL,
    ARRIVAL,
    st.tuples(st.just("wait"), st.floats(0, 0.1)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("block"), st.sets(st.integers(0, 1))),
)


class _Life:
    """An engine to which things happen."""

    def __init__(self, engine: str, events: list[tuple[Any, ...]], **changes: Any) -> None:
        self.timings = {f"r{number}": event[4] for number, event in enumerate(events) if event[0] == "add"}
        self.rig: Rig = rig_of(engine, self.timings, clients=2, **changes)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self._blocked: frozenset[int] = frozenset()
        for number, event in enumerate(events):
            self._happen(number, event)

    def end(self) -> None:
        """Let everybody read, and abort whoever is stuck, for whom others may wait."""
        self._blocked = frozenset()
        play(self.rig)
        while left := [name for name in self.asked if name not in self.aborted and not self._has_ended(name)]:
            stuck = [name for name in left if self._is_stuck(name)]
            assert stuck, f"{left} wait for nobody"
            self.aborted.update(stuck)
            self.rig.abort(*stuck)
            play(self.rig)

    def _has_ended(self, name: str) -> bool:
        return self.rig.finish_reason(name) is not None

    def _is_stuck(self, name: str) -> bool:
        timing: OwnTiming = self.timings[name]
        return timing.ttft_s == inf or timing.stalls_after == len(self.rig.outputs(name))

    def _happen(self, number: int, event: tuple[Any, ...]) -> None:
        match event:
            case "add", client, prompt_tokens, max_tokens, _:
                prompt = [number % 3] * prompt_tokens
                self.asked[f"r{number}"] = prompt, max_tokens
                self.rig.add(request(f"r{number}", prompt=prompt, max_tokens=max_tokens, client=client))
            case "wait", wait_s:
                self._wait(wait_s)
            case "abort", place:
                name = [*self.asked, "nobody"][place % (len(self.asked) + 1)]
                if name in self.asked and not self._has_ended(name):
                    self.aborted.add(name)
                self.rig.abort(name)
            case ("reset",):
                self.rig.ranks.engines[0]._runner.reset_prefix_cache(self.rig.now, reset_running=True)
            case "block", clients:
                self._blocked = frozenset(clients)

    def _wait(self, wait_s: float) -> None:
        end, turns = self.rig.now + wait_s, 0
        while (due := self.rig.ranks.next_deadline(self.rig.now, self._blocked)) is not None and due <= end:
            self.rig.now = max(due, self.rig.now)
            self.rig._hear(self.rig.ranks.step(self.rig.now, self._blocked))
            turns += 1
            assert turns < 5_000, "it turns round and round"
        self.rig.now = end


@pytest.mark.parametrize("engine", ENGINES)
@settings(deadline=None, max_examples=25)
@given(
    events=st.lists(EVENT, min_size=1, max_size=20),
    blocks=st.sampled_from([33, 40]),
    budget=st.sampled_from([16, 64]),
    step_ms=st.sampled_from([0.0, 4.0]),
)
def test_nobody_is_lost_or_early(
    engine: str, events: list[tuple[Any, ...]], blocks: int, budget: int, step_ms: float
) -> None:
    changes: dict[str, Any] = {}
    if engine in SCHEDULED:
        changes |= {"num_gpu_blocks": blocks, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    if engine in STEPPED and step_ms:
        changes["timing"] = steps_of(step_ms)
    life = _Life(engine, events, **changes)
    life.end()
    rig = life.rig
    for name, (prompt, max_tokens) in life.asked.items():
        said = rig.tokens(name)
        assert said == expected_tokens(prompt, max_tokens)[: len(said)]
        assert len(said) == max_tokens or name in life.aborted
        stamps, timing = said_at(rig, name), life.timings[name]
        if stamps:
            begin = scheduled_at(rig, name) + (timing.ttft_s or 0.0)
            due = [begin + number * (timing.itl_s or 0.0) for number in range(len(stamps))]
            assert all(at >= moment - 1e-9 for at, moment in zip(stamps, due, strict=True)), "somebody is early"
            assert timing.stalls_after is None or len(stamps) <= timing.stalls_after
    assert rig.ranks.num_requests == 0
    assert rig.ranks.engines[0]._runner.load().kv_cache_usage == 0
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None
