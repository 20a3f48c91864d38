# SPDX-License-Identifier: Apache-2.0
"""With a connector the scheduler does, step by step, what vLLM's own does with its NixlConnector (docs/fidelity.md)."""

from pathlib import Path
from typing import Any

import pytest

from mockengine.testing.scheduler_replay import read
from tests.support.transfer_replay import TransferReplay

SCENARIOS = read(Path(__file__).parent.parent / "fixtures" / "transfer_traces.json.gz")


def test_all_of_vllm_is_there_that_was_recorded() -> None:
    rows = [row for scenario in SCENARIOS for row in scenario["trace"]]
    assert (len(SCENARIOS), len(rows)) == (60, 9_830)
    assert sum(len(row["params"]) for row in rows) > 250
    assert sum(external > 0 for row in rows for _, external in row["external"].values()) > 250
    assert sum(bool(row["preempted"]) for row in rows) > 30


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario["name"]))
def test_every_step_is_that_of_vllm(scenario: dict[str, Any]) -> None:
    trace = TransferReplay(scenario["config"]).play(scenario["events"])
    for step, (ours, recorded) in enumerate(zip(trace, scenario["trace"], strict=False)):
        assert ours == recorded, f"row {step}"
    assert len(trace) == len(scenario["trace"])
