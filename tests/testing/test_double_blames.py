# SPDX-License-Identifier: Apache-2.0
"""The double blames a serving engine for every rule of `mockengine.testing.rules` that it breaks.

Each function lets an engine break one rule with the last envelope that it says.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from mockengine.testing.double import EngineMistakeError, FrontendDouble, Rule
from mockengine.wire.outputs import StartWave, UtilityReply
from mockengine.wire.stats import PrefillStats, PrefixCacheStats
from mockengine.wire.tensors import Tensor
from tests.support.bare_engine import COORDINATOR, BareEngine
from tests.support.conversation import (
    BUSY,
    EMBEDDING,
    ERROR,
    IDLE,
    LENGTH,
    POOLING,
    PREEMPTED,
    QUEUED,
    SCHEDULED,
    STOP,
    call,
    event,
    first,
    joined,
    listen,
    more,
    scores,
    step,
)

Script = Callable[[FrontendDouble, BareEngine], None]
BREAKS: Final[list[tuple[Rule, Script]]] = []


def breaks(rule: Rule) -> Callable[[Script], Script]:
    def register(script: Script) -> Script:
        BREAKS.append((rule, script))
        return script

    return register


@breaks(Rule.UNMANAGED_RANK)
def rank_that_is_not_there(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, scheduler_stats=IDLE, rank=2))


@breaks(Rule.WAVE_TO_CLIENT)
def wave_to_a_client(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(StartWave(0, 1, 0))


@breaks(Rule.WRONG_FOR_COORDINATOR)
def output_to_the_coordinator(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first()), to=COORDINATOR)


@breaks(Rule.WRONG_FOR_COORDINATOR)
def answer_to_the_coordinator(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(UtilityReply(0, 1, 1), to=COORDINATOR)


@breaks(Rule.TIME_REVERSED)
def time_goes_back(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(2, first()), step(1, more()))


@breaks(Rule.IMPOSSIBLE_STATS)
def busy_without_requests(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, scheduler_stats=BUSY))


@breaks(Rule.IMPOSSIBLE_STATS)
def busy_after_the_last_request(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(finish_reason=LENGTH), scheduler_stats=BUSY), step(2, scheduler_stats=BUSY))


@breaks(Rule.IMPOSSIBLE_STATS)
def busy_to_the_coordinator(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, scheduler_stats=BUSY), to=COORDINATOR)


@breaks(Rule.IMPOSSIBLE_STATS)
def cache_more_than_full(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, scheduler_stats=replace(IDLE, kv_cache_usage=1.5)))


@breaks(Rule.IMPOSSIBLE_STATS)
def more_hits_than_queries(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, scheduler_stats=replace(IDLE, prefix_cache_stats=PrefixCacheStats(queries=1, hits=2))))


@breaks(Rule.ANSWER_REPEATED)
def answer_twice(frontend: FrontendDouble, engine: BareEngine) -> None:
    call(frontend)
    engine.answer_next_call()
    reply = frontend.listen()
    assert isinstance(reply, UtilityReply)
    engine.say(reply)
    engine.said = [0]


@breaks(Rule.ANSWER_UNKNOWN)
def answer_to_nobody(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(UtilityReply(0, 1, 1))


@breaks(Rule.ANSWER_UNKNOWN)
def announcement_of_other_ranks(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.send([b"what", b"ever"])
    engine.say(UtilityReply(0, 1, -1, ["RECONFIGURE_FINISHED", 0]))


@breaks(Rule.ANSWER_TO_ANOTHER_CLIENT)
def answer_elsewhere(frontend: FrontendDouble, engine: BareEngine) -> None:
    call(frontend)
    engine.answer_next_call(to=1)


@breaks(Rule.ANSWER_OF_ANOTHER_RANK)
def answer_in_another_name(frontend: FrontendDouble, engine: BareEngine) -> None:
    call(frontend)
    engine.answer_next_call(engine_index=1)


@breaks(Rule.OUTPUT_UNKNOWN)
def output_for_nobody(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, first()))


@breaks(Rule.OUTPUT_TO_ANOTHER_CLIENT)
def output_elsewhere(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first()), to=1)


@breaks(Rule.OUTPUT_OF_ANOTHER_RANK)
def output_in_another_name(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(), rank=1))


@breaks(Rule.SECOND_FINAL)
def end_twice(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(finish_reason=LENGTH)), step(2, more(finish_reason=LENGTH)))


@breaks(Rule.OUTPUT_AFTER_FINAL)
def token_after_the_end(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(finish_reason=LENGTH)), step(2, more()))


@breaks(Rule.EVENTS_MISSING)
def no_events(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(events=())))


@breaks(Rule.EVENTS_MISSING)
def end_without_having_been_scheduled(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(tokens=(), events=(event(QUEUED, 0.5),), finish_reason=STOP)))


@breaks(Rule.EVENTS_OUT_OF_ORDER)
def scheduled_before_queued(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(events=(event(SCHEDULED, 0.5), event(QUEUED, 0.6)))))


@breaks(Rule.EVENTS_OUT_OF_ORDER)
def event_before_the_last(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first()), step(2, more(events=(event(PREEMPTED, 0.4),))))


@breaks(Rule.EVENTS_OUT_OF_ORDER)
def event_after_its_envelope(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(events=(event(QUEUED, 0.5), event(SCHEDULED, 1_700_000_000.0)))))


@breaks(Rule.PREFILL_STATS_MISSING)
def no_prefill_stats(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(prefill_stats=None)))


@breaks(Rule.PREFILL_STATS_WRONG)
def cached_and_computed_is_not_all(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(prefill_stats=PrefillStats(3, 3, 2, 2))))


@breaks(Rule.PREFILL_STATS_WRONG)
def local_and_external_is_not_all(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(prefill_stats=PrefillStats(3, 1, 2, 1))))


@breaks(Rule.PREFILL_STATS_WRONG)
def another_prompt_length(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(prefill_stats=PrefillStats(4, 4))))


@breaks(Rule.PREFILL_STATS_REPEATED)
def prefill_stats_twice(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first()), step(2, more(prefill_stats=PrefillStats(3, 3))))


@breaks(Rule.LOGPROBS_NOT_ASKED)
def scores_for_nobody(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(new_logprobs=scores(1))))


@breaks(Rule.LOGPROBS_NOT_ASKED)
def scores_of_the_prompt_twice(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"prompt_logprobs": 1})
    prompt = scores(2, as_tensors=True)
    engine.say(step(1, first(new_prompt_logprobs=prompt)), step(2, more(new_prompt_logprobs=prompt)))


@breaks(Rule.LOGPROBS_MISSING)
def no_scores(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprobs": 0})
    engine.say(step(1, first()))


@breaks(Rule.LOGPROBS_MISSING)
def no_scores_of_chosen_tokens(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprob_token_ids": [7]})
    engine.say(step(1, first(new_logprobs=scores(1))), step(2, more()))


@breaks(Rule.LOGPROBS_MISSING)
def no_scores_of_the_prompt(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"prompt_logprobs": 1})
    engine.say(step(1, first()))


def say_scores(engine: BareEngine, items: list[object]) -> None:
    """Say a first token of r1 with anything for its scores, which `write_envelope` would refuse."""
    events = [{"type": QUEUED, "timestamp": 0.5}, {"type": SCHEDULED, "timestamp": 0.6}]
    nils = [None] * 4
    engine.say_items([0, [["r1", [7], items, *nils, events, *nils[1:], PrefillStats(3, 3).to_wire()]], None, 1.0])


@breaks(Rule.LOGPROBS_MALFORMED)
def five_items(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprobs": 1})
    say_scores(engine, [*scores(1).to_wire(as_tensors=False), None])


@breaks(Rule.LOGPROBS_MALFORMED)
def more_rows_than_tokens(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprobs": 1})
    say_scores(engine, scores(2).to_wire(as_tensors=False))


@breaks(Rule.LOGPROBS_MALFORMED)
def tensors_where_arrays_are_due(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprobs": 1})
    say_scores(engine, scores(1, as_tensors=True).to_wire(as_tensors=True))


@breaks(Rule.LOGPROBS_MALFORMED)
def shapes_that_contradict_each_other(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprobs": 1})
    ids, logprobs, _ranks, _ = scores(1).to_wire(as_tensors=False)
    say_scores(engine, [ids, logprobs, ids])


@breaks(Rule.LOGPROBS_MALFORMED)
def prompt_scored_to_its_last_token(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"prompt_logprobs": 1})
    engine.say(step(1, first(new_prompt_logprobs=scores(3, as_tensors=True))))


@breaks(Rule.POOLING_WITHOUT_TENSOR)
def no_tensor(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", **POOLING)
    engine.say(step(1, first(tokens=(), finish_reason=STOP)))


@breaks(Rule.POOLING_WITHOUT_TENSOR)
def no_tensor_beside_an_error(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", **POOLING)
    engine.say(step(1, more(tokens=(), finish_reason=ERROR)))


@breaks(Rule.POOLING_WITHOUT_TENSOR)
def array_where_a_tensor_is_due(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", **POOLING)
    array = Tensor("<f4", (1,), b"\0" * 4)
    engine.say_items([0, [["r1", [], None, None, array.to_wire(), ERROR]], None, 1.0])


@breaks(Rule.POOLING_NOT_ASKED)
def tensor_for_nobody(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(pooling_output=EMBEDDING)))


@breaks(Rule.FINISHED_BEFORE_FINAL)
def finished_before_the_end(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(), finished_requests=["r1"]))


@breaks(Rule.FINISHED_REPEATED)
def finished_twice(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(finish_reason=LENGTH), finished_requests=["r1"]), step(2, finished_requests=["r1"]))


@breaks(Rule.FINISHED_UNKNOWN)
def finished_nobody(_frontend: FrontendDouble, engine: BareEngine) -> None:
    engine.say(step(1, finished_requests=["r1"]))


@breaks(Rule.FINISHED_TO_ANOTHER_CLIENT)
def finished_elsewhere(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(1, first(finish_reason=LENGTH)))
    engine.say(step(1, finished_requests=["r1"]), to=1)


@pytest.mark.parametrize(("rule", "script"), BREAKS, ids=[script.__name__ for _, script in BREAKS])
def test_envelope_that_breaks_a_rule_is_blamed_for_it(rule: Rule, script: Script) -> None:
    with joined() as (frontend, (engine, _)):
        script(frontend, engine)
        *right, wrong = engine.said
        listen(frontend, right)
        with pytest.raises(EngineMistakeError) as caught:
            listen(frontend, [wrong])
        assert caught.value.rule is rule
