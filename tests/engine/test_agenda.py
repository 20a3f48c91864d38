# SPDX-License-Identifier: Apache-2.0
"""Agendas: everybody's moment comes once, in order."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from mockengine.engine.agenda import Agenda


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["put", "forget", "take", "back"]), st.floats(0, 9))))
def test_an_agenda_keeps_one_moment_of_each(calls: list[tuple[int, str, float]]) -> None:
    agenda, moments, pending = Agenda[int](), dict[int, float](), dict[int, float]()
    for item, call, moment in calls:
        if call == "put":
            agenda.put(item, moment)
            moments[item] = pending[item] = moment
        elif call == "forget":
            assert agenda.forget(item) == moments.pop(item, None)
            pending.pop(item, None)
        elif call == "back" and item in moments:
            agenda.put_back(item)
            pending[item] = moments[item]
        elif call == "take":
            taken = agenda.take(moment)
            assert sorted(taken) == sorted(each for each, at in pending.items() if at <= moment)
            assert [pending.pop(each) for each in taken] == sorted(moments[each] for each in taken)
        assert agenda.earliest == min(pending.values(), default=None)
        assert len(agenda) == len(moments)


def test_an_agenda_forgets_far_moments_of_those_who_are_gone() -> None:
    agenda = Agenda[int]()
    for number in range(10_000):
        agenda.put(number, 1e9 + number)
        agenda.forget(number)
    assert len(agenda._heap) < 3_000
    agenda.put(1, inf)
    assert agenda.earliest is None
    assert 1 in agenda
