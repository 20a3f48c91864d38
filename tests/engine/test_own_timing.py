# SPDX-License-Identifier: Apache-2.0
"""Requests with a timing of their own: when they say what, whoever runs them and whatever runs beside them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.batching import BatchRunner
from mockengine.engine.config import BatchingConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.timing import TimingConfig
from mockengine.replies.asked import Asked
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.wire.outputs import EventType, FinishReason, StepOutputs
from tests.engine.test_batching import expected_tokens, play, steps, steps_of
from tests.support.rig import CONFIG, Rig, request

TTFT_S, ITL_S = 0.5, 0.02
TICK_S = 0.000_5
PER_REQUEST = TimingConfig(timing="per_request", ttft_ms=70.0, itl_ms=3.0)
DRAFTS = SpeculationConfig(acceptance_rates=(1.0, 0.0))
LIMITS = BatchingConfig(num_gpu_blocks=200, async_scheduling=False)
ENGINES: Mapping[str, dict[str, Any]] = {
    "free": {},
    "pace": {"itl_s": 0.003},
    "drafted": {"speculation": DRAFTS},
    "moments": {"timing": PER_REQUEST},
    "moments, limited": {"timing": PER_REQUEST, "batching": LIMITS},
    "moments, drafted": {"timing": PER_REQUEST, "batching": LIMITS, "speculation": DRAFTS},
    "steps": {"batching": LIMITS},
    "steps, async": {"batching": replace(LIMITS, async_scheduling=True)},
    "steps, drafted": {"batching": LIMITS, "speculation": DRAFTS},
    "steps, drafted, async": {"batching": replace(LIMITS, async_scheduling=True), "speculation": DRAFTS},
}
# With drafts of which the first is always accepted, every output after the first has two tokens.
TOKENS = {name: 1 + 9 * (1 + ("speculation" in engine)) for name, engine in ENGINES.items()}
SCHEDULED = [name for name, engine in ENGINES.items() if "batching" in engine]
STEPPED = [name for name in ENGINES if name.startswith("steps")]


class _Wanting:
    """Wants something of some requests."""

    def __init__(self, wishes: Mapping[str, Wish]) -> None:
        self._wishes = wishes

    def wish_for(self, asked: Asked) -> Wish | None:
        return self._wishes.get(asked.request.request_id)


def rig_of(engine: str, wishes: Mapping[str, Wish | OwnTiming], **changes: Any) -> Rig:
    """Make an engine that gives requests of these ids a timing of their own, or whatever else is wished."""
    wanted = {name: wish if isinstance(wish, Wish) else Wish(timing=wish) for name, wish in wishes.items()}
    config = replace(CONFIG, max_model_len=512, **ENGINES[engine])
    limits = {name: changes.pop(name) for name in list(changes) if name in BatchingConfig.__dataclass_fields__}
    if limits:
        assert config.batching is not None
        config = replace(config, batching=replace(config.batching, **limits))
    config = replace(config, replies=replace(config.replies, wishes=[_Wanting(wanted)]), **changes)
    return Rig(config)


def said_at(rig: Rig, name: str) -> list[float]:
    """Return when each output of a request left, whoever its client is."""
    heard = [envelope for _, envelope in rig.heard if isinstance(envelope, StepOutputs)]
    return [each.timestamp for each in heard for output in each.outputs if output.request_id == name]


def scheduled_at(rig: Rig, name: str) -> float:
    """Return when a request was scheduled for the first time."""
    events = [event for output in rig.outputs(name) for event in output.events]
    return next(event.timestamp for event in events if event.type is EventType.SCHEDULED)


def gaps(rig: Rig, name: str, began: float) -> list[float]:
    """Return what the first output took from then, and each of the others from the one before it."""
    return [later - earlier for earlier, later in pairwise([began, *said_at(rig, name)])]


# When.


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_leave_at_their_own_moments(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)})
    began = rig.now
    rig.add(request("own", max_tokens=TOKENS[engine]))
    play(rig)
    due = [began + TTFT_S + position * ITL_S for position in range(10)]
    assert said_at(rig, "own") == pytest.approx(due, abs=1e-9)
    assert rig.tokens("own") == expected_tokens([1, 2, 3], TOKENS[engine])
    assert rig.finish_reason("own") is FinishReason.LENGTH
    assert rig.ranks.num_requests == 0
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_they_do_so_beside_others_whose_timing_stays_what_it_is(engine: str) -> None:
    alone = rig_of(engine, {})
    alone.add(request("other", prompt=[9] * 20, max_tokens=300))
    play(alone)
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=0.002, itl_s=0.0015)})
    began = rig.now
    rig.add(request("other", prompt=[9] * 20, max_tokens=300), request("own", max_tokens=TOKENS[engine]))
    play(rig)
    # A tick of requests with moments, an idle step of those without room.
    late_s = 2e-3 if engine in STEPPED else TICK_S if "moments" in engine else 1e-9
    due = [began + 0.002 + position * 0.0015 for position in range(10)]
    assert all(moment - 1e-9 <= at <= moment + late_s for moment, at in zip(due, said_at(rig, "own"), strict=True))
    assert rig.tokens("own") == expected_tokens([1, 2, 3], TOKENS[engine])
    assert rig.tokens("other") == alone.tokens("other")
    assert said_at(rig, "other")[-1] == pytest.approx(said_at(alone, "other")[-1], abs=TICK_S)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_first_output_may_have_a_time_of_its_own(engine: str) -> None:
    usual = rig_of(engine, {})
    usual.add(request("own", max_tokens=100))
    play(usual)
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S)})
    began = rig.now
    rig.add(request("own", max_tokens=100))
    play(rig)
    first, *others = gaps(rig, "own", began)
    assert first == pytest.approx(TTFT_S, abs=1e-9)
    assert others == pytest.approx(gaps(usual, "own", began)[1:], abs=1e-9)
    assert rig.tokens("own") == usual.tokens("own")


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_others_may(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(itl_s=ITL_S)})
    began = rig.now
    rig.add(request("own", max_tokens=TOKENS[engine]))
    play(rig)
    first, *others = gaps(rig, "own", began)
    assert first == pytest.approx(0.07 if "moments" in engine else 0.0, abs=TICK_S)
    assert others == pytest.approx([ITL_S] * 9, abs=1e-9)


@pytest.mark.parametrize("engine", [name for name in ENGINES if "moments" not in name])
def test_one_alone_may_be_faster_than_idle_steps(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=0.000_1, itl_s=0.000_1)})
    began = rig.now
    rig.add(request("own", max_tokens=TOKENS[engine]))
    play(rig)
    assert gaps(rig, "own", began) == pytest.approx([0.000_1] * 10, abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_being_late_does_not_add_up(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)})
    began = rig.now
    rig.add(request("own", max_tokens=TOKENS[engine]))
    while (due := rig.ranks.next_deadline(rig.now, frozenset())) is not None:
        rig.now = max(rig.now, due + 0.000_3)
        rig._hear(rig.ranks.step(rig.now, frozenset()))
    moments = [began + TTFT_S + position * ITL_S for position in range(10)]
    assert all(0 <= at - moment < 0.001 for moment, at in zip(moments, said_at(rig, "own"), strict=True))


@pytest.mark.parametrize("engine", ["steps", "steps, async"])
def test_a_step_ends_before_what_it_computes_is_said(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, itl_s=0.025)}, timing=steps_of(10.0))
    began = rig.now
    rig.add(request("own", max_tokens=41), request("other", prompt=[9] * 20, max_tokens=300))
    play(rig)
    stamps = said_at(rig, "own")
    late = [at - (began + TTFT_S + position * 0.025) for position, at in enumerate(stamps)]
    assert len(stamps) == 41
    # The rest of the step under way, one that is scheduled already, and its own.
    assert all(-1e-9 <= each <= (0.030 if "async" in engine else 0.020) + 1e-9 for each in late)
    every = [at - began for at in said_at(rig, "other")]
    assert every == pytest.approx([0.010 * (1 + number) for number in range(300)]), "the others step as ever"


@pytest.mark.parametrize("engine", ["steps", "steps, async"])
def test_one_that_is_faster_than_the_steps_speaks_with_each(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=0.0, itl_s=0.001)}, timing=steps_of(10.0))
    rig.add(request("own", max_tokens=30))
    play(rig)
    assert gaps(rig, "own", rig.now)[1:] == pytest.approx([0.010] * 29)


@pytest.mark.parametrize("engine", STEPPED)
@pytest.mark.parametrize("budget", [16, 17, 33])
def test_a_prompt_in_chunks_is_computed_before_its_moment(engine: str, budget: int) -> None:
    """Long before it is due the prompt is there, but for its last token, whose step is all that is late."""
    own = OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)
    timing = TimingConfig(timing="step", step_ms_per_prefill_token=1.0)
    rig = rig_of(engine, {"own": own}, timing=timing, max_num_batched_tokens=budget, enable_prefix_caching=False)
    began = rig.now
    prompt = list(range(100))
    rig.add(request("own", prompt=prompt, max_tokens=TOKENS[engine]))
    play(rig, until=began + TTFT_S - 0.001)
    assert rig.outputs("own") == []
    play(rig)
    stamps = said_at(rig, "own")
    assert stamps[0] == pytest.approx(began + TTFT_S + 0.001, abs=1e-9)
    assert stamps[1:] == pytest.approx([began + TTFT_S + position * ITL_S for position in range(1, 10)], abs=1e-9)
    assert rig.tokens("own") == expected_tokens(prompt, TOKENS[engine])


# Never.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("said", [0, 1, 4])
def test_who_says_no_more_costs_nothing_until_it_is_aborted(engine: str, said: int) -> None:
    timing = OwnTiming(stalls_after=said) if said else OwnTiming(ttft_s=inf)
    rig = rig_of(engine, {"stuck": timing})
    rig.add(request("stuck", max_tokens=TOKENS[engine]))
    play(rig, until=rig.now + 1)
    assert len(rig.outputs("stuck")) == said
    assert rig.finish_reason("stuck") is None
    assert rig.ranks.num_requests == 1
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None, "nothing is due"
    rig.now += 1_000
    rig.abort("stuck")
    play(rig)
    assert len(rig.outputs("stuck")) == said, "whoever aborts hears nothing of it"
    assert [(served.output_tokens, reason) for served, reason, _ in rig.watcher.finished] == [
        (len(rig.tokens("stuck")), "abort")
    ]
    loads = [envelope.scheduler_stats for envelope in steps(rig) if envelope.scheduler_stats is not None]
    # Without a scheduler nobody has heard of a request that said nothing.
    assert loads or (said == 0 and engine not in SCHEDULED)
    for load in loads[-1:]:
        assert (load.num_running_reqs, load.num_waiting_reqs, load.kv_cache_usage) == (0, 0, 0)
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_who_says_no_more_leaves_others_alone(engine: str) -> None:
    rig = rig_of(engine, {"stuck": OwnTiming(ttft_s=inf), "slow": OwnTiming(ttft_s=1.0, itl_s=1.0)})
    began = rig.now
    rig.add(request("stuck", max_tokens=1), request("slow", max_tokens=1), request("other", max_tokens=50))
    play(rig)
    assert rig.tokens("other") == expected_tokens([1, 2, 3], 50)
    assert said_at(rig, "other")[-1] < began + 0.3
    assert said_at(rig, "slow") == pytest.approx([began + 1.0], abs=2e-3)
    rig._hear(rig.ranks.abort_everything(rig.now))
    play(rig)
    assert rig.finish_reason("stuck") is FinishReason.ABORT
    assert rig.ranks.num_requests == 0
    rig.add(request("stuck", prompt=[4], max_tokens=3), request("next", max_tokens=3))
    play(rig)
    assert rig.tokens("next") == expected_tokens([1, 2, 3], 3), "an id and a place may be had again"


@pytest.mark.parametrize("engine", ["free", "drafted"])
def test_bursts_go_on_beside_one_that_is_stuck(engine: str) -> None:
    rig = rig_of(engine, {"stuck": OwnTiming(ttft_s=inf), "own": OwnTiming(ttft_s=TTFT_S)})
    most = 64 if engine == "free" else 1
    for name in ("other", "own"):
        rig.add(request("stuck"), request(name, max_tokens=200))
        rig.now += TTFT_S
        bursts = [rig.burst(frozenset(), 64) for _ in range(20)]
        assert max(bursts) == most, "one that has nothing of its own left is no exception"
        rig.run()
        rig.abort("stuck")
        rig.run()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_of_one_that_is_aborted(engine: str) -> None:
    rig = rig_of(engine, {"own": OwnTiming(ttft_s=TTFT_S, itl_s=ITL_S)})
    began = rig.now
    for outputs, prompt in ((0, [4]), (4, [5, 6]), (10, [7])):
        began = rig.now
        rig.add(request("own", prompt=prompt, max_tokens=TOKENS[engine]))
        heard = len(rig.outputs("own"))
        play(rig, until=began + TTFT_S + (outputs - 0.5) * ITL_S)
        assert len(rig.outputs("own")) - heard == outputs
        rig.abort("own")
        while (due := rig.ranks.next_deadline(rig.now, frozenset())) is not None:
            assert due < rig.now + 0.003, "nothing is left that is due"
            rig.step()
        assert rig.ranks.num_requests == 0
    assert rig.tokens("own")[-TOKENS[engine] :] == expected_tokens([7], TOKENS[engine])


# Whatever is asked for.


@settings(deadline=None, max_examples=60)
@given(
    engine=st.sampled_from(list(ENGINES)),
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 0.05),
            st.integers(1, 90),
            st.integers(1, 40),
            st.sampled_from([None, 0.0, 0.01, 0.3]),
            st.sampled_from([None, 0.0, 0.0007, 0.011]),
        ),
        min_size=1,
        max_size=12,
    ),
    blocks=st.sampled_from([33, 40]),
    budget=st.sampled_from([16, 64]),
    chunk=st.sampled_from([1, 3]),
    step_ms=st.sampled_from([0.0, 4.0]),
)
def test_every_reply_is_whole_whatever_runs_beside_it(
    engine: str, arrivals: list[tuple[Any, ...]], blocks: int, budget: int, chunk: int, step_ms: float
) -> None:
    changes: dict[str, Any] = {}
    if engine in SCHEDULED:
        changes |= {"num_gpu_blocks": blocks, "max_num_seqs": 5, "max_num_batched_tokens": budget}
    if engine in STEPPED and step_ms:
        changes["timing"] = steps_of(step_ms)
    if "speculation" not in ENGINES[engine]:
        changes["output_token_chunk_size"] = chunk
    timings = {f"r{index}": OwnTiming(ttft_s=each[3], itl_s=each[4]) for index, each in enumerate(arrivals)}
    rig = rig_of(engine, timings, **changes)
    for number, (pause_s, prompt_tokens, max_tokens, _, _) in enumerate(arrivals):
        rig.add(request(f"r{number}", prompt=[number % 3] * prompt_tokens, max_tokens=max_tokens))
        play(rig, until=rig.now + pause_s)
    play(rig)
    for number, (_, prompt_tokens, max_tokens, ttft_s, itl_s) in enumerate(arrivals):
        name = f"r{number}"
        assert rig.tokens(name) == expected_tokens([number % 3] * prompt_tokens, max_tokens)
        stamps = said_at(rig, name)
        begin = stamps[0] - TICK_S if ttft_s is None else scheduled_at(rig, name) + ttft_s
        assert all(at >= begin + index * (itl_s or 0.0) - 1e-9 for index, at in enumerate(stamps)), "never early"
    assert rig.ranks.num_requests == 0
    assert rig.ranks.next_deadline(rig.now, frozenset()) is None


# Clients that do not read.


@pytest.mark.parametrize("engine", ENGINES)
def test_who_does_not_read_holds_up_only_itself_and_costs_no_core(engine: str) -> None:
    own = OwnTiming(ttft_s=0.1, itl_s=ITL_S)
    rig = rig_of(engine, {"r0": own, "r1": own}, clients=2)
    began = rig.now
    rig.add(*(request(f"r{client}", client=client, max_tokens=TOKENS[engine]) for client in range(2)))
    play(rig, until=began + 0.01)
    blocked, turns = frozenset({1}), 0
    while (due := rig.ranks.next_deadline(rig.now, blocked)) is not None:
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, blocked))
        turns += 1
    assert turns < 80
    assert said_at(rig, "r0") == pytest.approx([began + 0.1 + position * ITL_S for position in range(10)], abs=1e-9)
    assert rig.tokens("r1") == []
    read_again_at = rig.now = began + 1
    play(rig)
    assert rig.tokens("r1") == rig.tokens("r0")
    # What it has missed it hears at once.
    assert said_at(rig, "r1")[-1] == pytest.approx(read_again_at, abs=0.01)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("outputs", [0, 3])
def test_a_client_that_reads_again_before_it_is_due_has_missed_nothing(engine: str, outputs: int) -> None:
    timings = {"own": OwnTiming(ttft_s=TTFT_S, itl_s=TTFT_S), "stuck": OwnTiming(ttft_s=inf)}
    rig = rig_of(engine, timings, clients=2)
    began = rig.now
    rig.add(request("own", client=1, max_tokens=TOKENS[engine]), request("stuck", client=0))
    play(rig, until=began + 0.01 + outputs * TTFT_S)
    runner = rig.ranks.engines[0]._runner
    for blocked in (frozenset({1}), frozenset[int](), frozenset({0, 1}), frozenset({0})):
        rig.now += 0.02
        for _ in range(5):
            rig._hear(rig.ranks.step(rig.now, blocked))
    if isinstance(runner, BatchRunner):
        assert runner._requests.sequences["own"].num_computed_tokens == 2 + len(rig.tokens("own")), "but for the last"
    play(rig)
    assert said_at(rig, "own") == pytest.approx([began + (1 + position) * TTFT_S for position in range(10)], abs=1e-9)
    assert rig.tokens("own") == expected_tokens([1, 2, 3], TOKENS[engine])
