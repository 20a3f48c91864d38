# SPDX-License-Identifier: Apache-2.0
"""Deadlines follow from deadlines."""

from dataclasses import replace

import pytest

from mockengine.engine.pace import Pace
from mockengine.wire.outputs import StepOutputs
from tests.support.rig import CONFIG, Rig, request

ITL_S = 0.25
TIMED = replace(CONFIG, max_model_len=1_000, itl_s=ITL_S)


def test_without_an_interval_every_step_is_due_at_once() -> None:
    pace = Pace(0.0)
    for now in (1.0, 1.0, 2.5):
        assert pace.due(now) == now
        pace.stepped(now)


def test_lateness_does_not_add_up() -> None:
    pace = Pace(ITL_S)
    assert pace.due(10.0) == 10.0
    pace.stepped(10.0)
    for number in range(1, 1_001):
        due = 10.0 + number * ITL_S
        assert pace.due(due) == due
        # Each step is made almost an interval late.
        pace.stepped(due + 0.9 * ITL_S)


def test_moments_that_were_missed_are_left_out() -> None:
    pace = Pace(ITL_S)
    pace.stepped(10.0)
    pace.stepped(10.25 + 3.5 * ITL_S)
    assert pace.due(12.0) == 10.25 + 4 * ITL_S


def test_after_a_rest_the_next_step_is_due_at_once() -> None:
    pace = Pace(ITL_S)
    pace.stepped(10.0)
    pace.rest()
    assert pace.due(10.01) == 10.01


def test_tokens_come_at_their_pace() -> None:
    rig = Rig(TIMED)
    rig.add(request(max_tokens=5))
    _run_when_due(rig)
    stamps = [envelope.timestamp for envelope in rig.to(0) if isinstance(envelope, StepOutputs) and envelope.outputs]
    assert stamps == [100.0, 100.25, 100.5, 100.75, 101.0]


def test_a_request_that_arrives_between_steps_joins_the_next_one() -> None:
    rig = Rig(TIMED)
    rig.add(request("a", max_tokens=3))
    rig.ranks.step(rig.now, frozenset())
    rig.now += 0.1
    rig.add(request("b", max_tokens=2))
    assert rig.ranks.next_deadline(rig.now, frozenset()) == pytest.approx(100.25)
    _run_when_due(rig)
    stamps = {
        name: [
            envelope.timestamp
            for envelope in rig.to(0)
            if isinstance(envelope, StepOutputs) and any(output.request_id == name for output in envelope.outputs)
        ]
        for name in ("a", "b")
    }
    assert stamps == {"a": [100.25, 100.5], "b": [100.25, 100.5]}


def test_an_abort_disturbs_no_pace_and_is_reported_with_the_next_step() -> None:
    rig = Rig(replace(TIMED, data_parallel_size=2))
    rig.add(request("a", max_tokens=3), request("b", max_tokens=300))
    rig.step()
    due = rig.ranks.next_deadline(rig.now, frozenset())
    rig.abort("b")
    assert rig.ranks.next_deadline(rig.now, frozenset()) == due


def test_the_last_abort_is_reported_at_once() -> None:
    rig = Rig(replace(TIMED, data_parallel_size=2))
    rig.add(request("a", max_tokens=300))
    rig.step()
    rig.abort("a")
    assert rig.ranks.next_deadline(rig.now, frozenset()) == rig.now
    (envelope, *_) = rig.step()
    assert isinstance(envelope, StepOutputs)
    assert envelope.finished_requests == ("a",)


def _run_when_due(rig: Rig) -> None:
    """Step whenever a step is due, until nothing is."""
    while (due := rig.ranks.next_deadline(rig.now, frozenset())) is not None:
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, frozenset()))
