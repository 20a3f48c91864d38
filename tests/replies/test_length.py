# SPDX-License-Identifier: Apache-2.0
"""Lengths of replies are those of the distribution that is asked for, and follow from the key."""

from collections import Counter
from statistics import fmean, pstdev

import pytest

from mockengine.replies.length import (
    LengthDraw,
    fixed_length,
    lognormal_length,
    normal_length,
    uniform_length,
    weighted_length,
)

KEYS = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(4_000)]
MOST = 2**31 - 1


def _lengths(draw: LengthDraw) -> list[int]:
    return [draw(key) for key in KEYS]


def test_a_number_is_every_length() -> None:
    assert set(_lengths(fixed_length(17))) == {17}


def test_uniform_lengths_are_all_those_between() -> None:
    counts = Counter(_lengths(uniform_length(10, 13)))
    assert sorted(counts) == [10, 11, 12, 13]
    assert max(counts.values()) / min(counts.values()) < 1.2


@pytest.mark.parametrize("draw", [normal_length(200, 50), lognormal_length(200, 50)])
def test_mean_and_standard_deviation_are_those_asked_for(draw: LengthDraw) -> None:
    lengths = _lengths(draw)
    assert fmean(lengths) == pytest.approx(200, rel=0.02)
    assert pstdev(lengths) == pytest.approx(50, rel=0.06)


def test_lognormal_lengths_have_a_tail() -> None:
    lengths = _lengths(lognormal_length(100, 200))
    assert min(lengths) >= 1
    assert max(lengths) > 1_000
    assert sorted(lengths)[len(lengths) // 2] < 60


@pytest.mark.parametrize("draw", [normal_length(3, 100), lognormal_length(MOST, MOST), lognormal_length(1, 10 * MOST)])
def test_no_length_is_below_1_or_beyond_what_can_be(draw: LengthDraw) -> None:
    assert all(1 <= length <= MOST for length in _lengths(draw))


def test_a_standard_deviation_of_0_is_no_spread() -> None:
    assert set(_lengths(normal_length(9, 0)) + _lengths(lognormal_length(9, 0))) == {9}


def test_the_same_key_has_the_same_length() -> None:
    assert _lengths(normal_length(200, 50)) == _lengths(normal_length(200, 50))


def test_weights_say_how_often_a_length_is_drawn() -> None:
    counts = Counter(_lengths(weighted_length([10, 20, 30, 40], [1, 2.5, 1, 0])))
    assert sorted(counts) == [10, 20, 30]
    expected = [1 / 4.5, 2.5 / 4.5, 1 / 4.5]
    assert [counts[length] / len(KEYS) for length in (10, 20, 30)] == pytest.approx(expected, abs=0.03)
