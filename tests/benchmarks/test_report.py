# SPDX-License-Identifier: Apache-2.0
"""What a run of the benchmarks says."""

import json

import pytest

from benchmarks.report import Bar, Table, as_json, bar_table, machine


def _table() -> Table:
    table = Table("Costs", ("running", "ns", "what"))
    table.add(1, 12_345.6, "first")
    table.add(16_384, 0.123456, "last")
    table.hold("the first", 2.0, 1.0)
    table.hold("the last", 1.0, 1.0)
    return table


@pytest.mark.parametrize(("measured", "is_held"), [(0.9, True), (1.0, True), (1.1, False)])
def test_a_bar_is_held_up_to_its_limit(measured: float, *, is_held: bool) -> None:
    assert Bar("cost", measured, 1.0).is_held is is_held


def test_a_table_is_shown_with_aligned_columns_and_three_digits() -> None:
    assert str(_table()) == "\nCosts\nrunning      ns   what\n      1  12,346  first\n  16384   0.123   last"


def test_a_row_has_a_value_for_every_column() -> None:
    with pytest.raises(ValueError, match="2 values for 3 columns"):
        _table().add(1, 2.0)


def test_bars_of_all_tables_are_shown_as_held_or_missed() -> None:
    assert bar_table([_table(), Table("Nothing", ())]).rows == [
        ("the first", 2.0, 1.0, "MISSED"),
        ("the last", 1.0, 1.0, "held"),
    ]


def test_json_has_the_machine_every_figure_and_every_bar() -> None:
    assert json.loads(as_json({"cores": 2}, [_table()])) == {
        "machine": {"cores": 2},
        "tables": {
            "Costs": [
                {"running": 1, "ns": 12_345.6, "what": "first"},
                {"running": 16_384, "ns": 0.123456, "what": "last"},
            ]
        },
        "bars": [
            {"name": "the first", "measured": 2.0, "limit": 1.0, "held": False},
            {"name": "the last", "measured": 1.0, "limit": 1.0, "held": True},
        ],
    }


def test_the_machine_is_described() -> None:
    assert list(machine()) == ["cpu", "cores", "load", "python", "system"]
