# SPDX-License-Identifier: Apache-2.0
"""How lateness is told from the times that steps bear."""

import pytest

from benchmarks.lateness import Grid, drift, quantile


def test_a_step_is_late_from_its_own_moment_on_whatever_the_one_before_was() -> None:
    grid = Grid(10.0, 0.5)

    assert [grid.lateness_s(moment) for moment in (10.0, 10.625, 11.0, 11.75)] == [0.0, 0.125, 0.0, 0.25]
    assert grid.intervals == 4


def test_a_step_that_is_late_by_more_than_an_interval_is_not_taken_for_a_later_one() -> None:
    grid = Grid(10.0, 0.5)

    # The moments 10.5, 11.0 and 11.5 have passed when the second step is made, so the next one is due at 12.0.
    assert [grid.lateness_s(moment) for moment in (10.0, 11.625, 12.125)] == [0.0, 1.125, 0.125]
    assert grid.intervals == 5


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_quantile_is_one_of_the_values(share: float, value: float) -> None:
    assert quantile([*range(100, 0, -1)], share) == value


def test_drift_is_the_median_of_the_last_tenth_against_that_of_the_first() -> None:
    steady, outlier = [1.0] * 30, [50.0]

    assert drift([*outlier, *steady]) == 0.0
    assert drift([1.0 + place / 100 for place in range(100)]) == pytest.approx(0.9)
