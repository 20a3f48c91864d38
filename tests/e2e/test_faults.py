# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md says what faults there are, and what real frontends make of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.support.fault_runs import (
    PAGE,
    PYTHON,
    SECTIONS,
    TRIALS,
    Trial,
    described,
    documented,
    keys_of_rules,
    observed,
)
from tests.support.written_page import Row

NEWEST_RUST = "Rust 0.33.0"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_says_what_the_classes_say(section: str) -> None:
    assert PAGE.part(f"faults {section}") == described(section)


def test_the_page_has_all_keys_of_rules() -> None:
    assert PAGE.part("rules") == keys_of_rules()


@dataclass(frozen=True)
class Seen:
    """What all faults have brought about, by label, beside frontends of one kind."""

    frontend: str
    rows: Mapping[str, Row]


# As a parameter of the fixture, so that one kind comes after the other.
@pytest.fixture(scope="module", params=[NEWEST_RUST, PYTHON])
def seen(request: pytest.FixtureRequest) -> Seen:
    return Seen(request.param, observed(request.param))


@pytest.mark.failure_modes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_it_goes_as_documented(seen: Seen, trial: Trial) -> None:
    assert seen.rows[trial.label] == documented(trial, seen.frontend)
