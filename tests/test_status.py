# SPDX-License-Identifier: Apache-2.0
"""What is told of the engine from outside of its thread."""

import pytest

from mockengine.status import LATENESS_BUCKETS_S, Lateness, RankStatus, State, Status


def test_a_step_counts_in_the_first_bucket_that_holds_it() -> None:
    lateness = Lateness()
    for late in (0.0, 0.0001, 0.00011, 1.0, 1.1, 60.0):
        lateness.add(1, late)
    counted = dict(zip([*LATENESS_BUCKETS_S, None], lateness.buckets, strict=True))
    assert {bound: count for bound, count in counted.items() if count} == {0.0001: 2, 0.0002: 1, 1.0: 1, None: 2}
    assert lateness.sum_s == pytest.approx(62.10021)


@pytest.mark.parametrize(
    ("state", "connected", "is_ready"),
    [
        (State.SERVING, 2, True),
        (State.SERVING, 1, False),
        (State.JOINING, 2, False),
        (State.LEAVING, 2, False),
    ],
)
def test_ready_is_serving_every_api_server(state: State, connected: int, *, is_ready: bool) -> None:
    assert Status(state, 0.0, (RankStatus(0),), clients=2, connected_clients=connected).is_ready is is_ready


def test_steps_made_at_once_count_as_what_they_are() -> None:
    lateness = Lateness()
    lateness.add(64, 0.001)
    assert sum(lateness.buckets) == 64
    assert lateness.sum_s == pytest.approx(0.064)
