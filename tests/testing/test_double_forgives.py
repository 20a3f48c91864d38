# SPDX-License-Identifier: Apache-2.0
"""The double does not blame a serving engine for what a correct one may do, or what it cannot know to be wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from mockengine.testing.double import FrontendDouble
from mockengine.wire.lines import line_of_release
from mockengine.wire.messages import RequestType, write_message
from mockengine.wire.outputs import StartWave, UtilityReply, WaveComplete
from mockengine.wire.requests import request_items
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT
from mockengine.wire.stats import PrefillStats
from tests.support.bare_engine import COORDINATOR, BareEngine
from tests.support.conversation import (
    ABORT,
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
    event,
    first,
    joined,
    listen,
    more,
    scores,
    step,
)

Script = Callable[[FrontendDouble, BareEngine], None]
FORGIVEN: Final[list[Script]] = []


def forgiven(script: Script) -> Script:
    FORGIVEN.append(script)
    return script


@forgiven
def token_and_statistics_after_an_abort(frontend: FrontendDouble, engine: BareEngine) -> None:
    """As a real engine does: one token more, then two or three envelopes of statistics alone."""
    frontend.add("r1")
    frontend.abort("r1")
    engine.say(
        step(1, first(), scheduler_stats=BUSY),
        step(2, scheduler_stats=IDLE, finished_requests=["r1"]),
        step(3, scheduler_stats=IDLE),
        step(4, scheduler_stats=IDLE),
    )


@forgiven
def end_of_an_aborted_request(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    frontend.abort("r1")
    engine.say(step(1, first(finish_reason=LENGTH), finished_requests=["r1"]))


@forgiven
def request_that_is_to_be_aborted_at_once(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", abort_immediately=True)
    engine.say(step(1, scheduler_stats=IDLE, finished_requests=["r1"]))


@forgiven
def refusal_before_anything_ran(frontend: FrontendDouble, engine: BareEngine) -> None:
    for name in ("r1", "r2", "r3"):
        frontend.add(name, sampling={"logprobs": 1})
    engine.say(
        step(1, more("r1", (), finish_reason=ERROR), finished_requests=["r1"]),
        step(2, more("r2", (), finish_reason=ABORT), finished_requests=["r2"]),
        step(3, more("r3", (), finish_reason=ERROR, events=(event(QUEUED, 0.5),)), scheduler_stats=IDLE),
    )


@forgiven
def preemption(frontend: FrontendDouble, engine: BareEngine) -> None:
    """As a real engine tells it, which schedules ahead or not."""
    frontend.add("r1")
    frontend.add("r2")
    together = (event(PREEMPTED, 1.1), event(SCHEDULED, 1.2), event(PREEMPTED, 1.3), event(SCHEDULED, 1.4))
    engine.say(
        step(1, first("r1"), first("r2", events=(event(QUEUED, 0.5), event(SCHEDULED, 0.6), event(PREEMPTED, 0.7)))),
        step(2, more("r1", events=together), more("r2", events=(event(SCHEDULED, 1.5),))),
        step(3, more("r1", finish_reason=LENGTH), more("r2", finish_reason=STOP)),
    )


@forgiven
def scores_of_all_kinds(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", sampling={"logprobs": 1, "prompt_logprobs": 1})
    frontend.add("r2", prompt=[1], sampling={"prompt_logprobs": 0})
    engine.say(
        step(1, first(new_logprobs=scores(1), new_prompt_logprobs=scores(2, as_tensors=True))),
        step(2, more(tokens=(7, 8), new_logprobs=scores(2))),
        step(3, more(tokens=(), finish_reason=ABORT)),
        step(4, first("r2", prefill_stats=PrefillStats(1, 1))),
    )


@forgiven
def pooling(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", **POOLING)
    frontend.add("r2", **POOLING)
    engine.say(
        step(1, first(tokens=(), pooling_output=EMBEDDING, finish_reason=STOP, prefill_stats=None)),
        step(2, more("r2", (), pooling_output=EMPTY_POOLING_OUTPUT, finish_reason=ERROR)),
    )


@forgiven
def finished_beside_after_and_empty(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    frontend.add("r2")
    engine.say(
        step(1, first("r1", finish_reason=LENGTH), finished_requests=["r1"]),
        step(1, first("r2", finish_reason=LENGTH)),
        step(1, scheduler_stats=IDLE, finished_requests=["r2"]),
    )
    engine.say_items([0, [], None, 1.0, None, []])


@forgiven
def load_of_a_step_beside_its_last_token(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    frontend.add("r2", client=1)
    both = replace(BUSY, num_waiting_reqs=1, kv_cache_usage=1.0)
    engine.say(
        step(1, first("r1"), scheduler_stats=both), step(2, more("r1", finish_reason=STOP), scheduler_stats=BUSY)
    )
    engine.say(step(3, first("r2", finish_reason=STOP), scheduler_stats=IDLE), to=1)


@forgiven
def envelope_that_does_not_tell_its_time(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    engine.say(step(5, first()), step(0, more(events=(event(PREEMPTED, 7),))), step(6, more()))


@forgiven
def announcement_of_health(_frontend: FrontendDouble, engine: BareEngine) -> None:
    for at in (1, 2):
        engine.say(UtilityReply(0, at, -2, {"id": 0, "status": "healthy"}))


@forgiven
def counts_and_waves(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    waiting = replace(IDLE, num_waiting_reqs=1)
    engine.say(
        StartWave(0, 1, 0),
        step(1, scheduler_stats=waiting),
        step(2, scheduler_stats=BUSY),
        WaveComplete(0, 3, 0),
        to=COORDINATOR,
    )


@forgiven
def requests_that_were_sent_raw(frontend: FrontendDouble, engine: BareEngine) -> None:
    values = {"request_id": "raw", "prompt_token_ids": [1], "sampling_params": {}}
    frontend.add("known")
    frontend.send(write_message(RequestType.ADD, request_items(values, 22)))
    frontend.send(write_message(RequestType.ADD, [b"\xff"]))
    frontend.send(write_message(RequestType.UTILITY, [0, 5, "is_sleeping", []]))
    frontend.send(write_message(RequestType.ABORT, ["known"]))
    many = replace(BUSY, num_waiting_reqs=9)
    engine.say(
        step(1, more("raw"), more("salvaged"), scheduler_stats=many, finished_requests=["raw", "raw", "known"]),
        UtilityReply(0, 1, 5),
        UtilityReply(0, 1, 5),
    )


@forgiven
def id_that_is_used_twice(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1")
    frontend.add("r1")
    engine.say(
        step(1, more(tokens=(), finish_reason=ERROR), finished_requests=["r1"]), step(2, first(), scheduler_stats=BUSY)
    )


@forgiven
def session_of_several_requests(frontend: FrontendDouble, engine: BareEngine) -> None:
    frontend.add("r1", resumable=True)
    engine.say(step(1, first(finish_reason=STOP)))
    frontend.add("r1", resumable=True)
    engine.say(step(2, more(finish_reason=STOP, events=(event(QUEUED, 1.5),))))


@pytest.mark.parametrize("script", FORGIVEN, ids=lambda script: script.__name__)
def test_what_a_correct_engine_may_do_is_not_blamed(script: Script) -> None:
    with joined() as (frontend, (engine, _)):
        script(frontend, engine)
        listen(frontend, engine.said)


def test_line_whose_requests_do_not_tell_where_prefill_stats_belong_does_not_want_them() -> None:
    with joined(line=line_of_release("0.27.1")) as (frontend, (engine, _)):
        frontend.add("r1")
        engine.say(step(1, first(prefill_stats=None)))
        listen(frontend, engine.said)


def test_reply_to_an_id_that_is_used_again_is_that_of_the_second_request() -> None:
    with joined() as (frontend, (engine, _)):
        for at, reason in ((1, LENGTH), (2, STOP)):
            frontend.add("r1")
            engine.say(step(at, first(finish_reason=reason)))
            assert frontend.reply("r1").finish_reason is reason
            assert frontend.reply("r1").tokens == [7]
        frontend.send(write_message(RequestType.ADD, request_items({"request_id": "r1"}, 22)))
        engine.say(step(3, more(tokens=(), finish_reason=ERROR)))
        assert frontend.reply("r1").finish_reason is ERROR
