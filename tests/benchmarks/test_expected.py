# SPDX-License-Identifier: Apache-2.0
"""The short form compares ratios with those of a file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import short
from benchmarks.expected import FILE, Verdict, compare, complaints, hints, judge, read, write


def _measures(*ratios: float) -> Callable[[], float]:
    """What measures these ratios, one after another."""
    return iter(ratios).__next__


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (0.4, Verdict.BETTER),
        (0.7, Verdict.AS_EXPECTED),
        (1.0, Verdict.AS_EXPECTED),
        (1.5, Verdict.AS_EXPECTED),
        (1.6, Verdict.WORSE),
    ],
)
def test_a_ratio_may_be_off_by_half(ratio: float, verdict: Verdict) -> None:
    assert judge(ratio, 1.0) is verdict


def test_a_ratio_that_the_file_does_not_have_is_unknown() -> None:
    assert judge(1.0, None) is Verdict.UNKNOWN


def test_a_ratio_as_expected_is_measured_once() -> None:
    table = compare({"step": _measures(1.2)}, {"step": 1.0})

    assert table.rows == [("step", 1.2, 1.0, 1.2, 1, "as expected")]
    assert complaints(table) == []
    assert hints(table) == []


def test_a_worse_ratio_is_measured_again_and_the_best_counts() -> None:
    table = compare({"step": _measures(3.0, 1.8, 1.4)}, {"step": 1.0})

    assert table.rows == [("step", 1.4, 1.0, 1.4, 3, "as expected")]


def test_a_ratio_that_stays_worse_is_complained_about_by_name() -> None:
    table = compare({"step": _measures(1.9, 1.8, 2.0), "sink": _measures(1.0)}, {"step": 1.0, "sink": 1.0})

    assert complaints(table) == ["step: 1.8 is more than 1.5 times the expected 1"]


def test_a_ratio_that_the_file_does_not_have_is_complained_about() -> None:
    (complaint,) = complaints(compare({"step": _measures(1.0)}, {}))

    assert complaint.startswith("step: expected.json does not know it; python -m benchmarks --short --write-expected")


def test_a_better_ratio_is_a_hint_alone() -> None:
    table = compare({"step": _measures(0.5)}, {"step": 1.0})

    assert complaints(table) == []
    (hint,) = hints(table)
    assert hint.startswith("step: better than expected by more than 1.5; ")


def test_the_median_of_three_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"

    write(path, {"step": _measures(3.0, 1.0, 2.00004), "sink": _measures(0.1, 0.1, 0.1)})

    assert read(path) == {"step": 2.0, "sink": 0.1}


def test_without_a_file_nothing_is_expected(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") == {}


def test_the_file_has_what_the_short_form_measures() -> None:
    assert read(FILE).keys() == short.RATIOS.keys()
