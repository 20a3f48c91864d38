# SPDX-License-Identifier: Apache-2.0
"""The scheduler does, step by step, what vLLM's own did: 270 recorded workloads (docs/fidelity.md)."""

import json
from pathlib import Path
from typing import Any

import pytest

from mockengine.testing.scheduler_replay import main, read, replay

FIXTURES = Path(__file__).parent.parent / "fixtures"
SCENARIOS = read(FIXTURES / "scheduler_traces.json.gz")
SPECULATIVE = read(FIXTURES / "speculative_traces.json.gz")
SESSIONS = read(FIXTURES / "session_traces.json.gz")


def test_all_of_vllm_is_there_that_was_recorded() -> None:
    rows = [row for scenario in SCENARIOS for row in scenario["trace"]]
    assert (len(SCENARIOS), len(rows)) == (120, 20_669)
    assert sum(scenario["config"]["async_sched"] for scenario in SCENARIOS) > 30
    assert sum(bool(row["preempted"]) for row in rows) > 50


def test_drafts_were_recorded_with_all_that_can_become_of_them() -> None:
    rows = [(scenario["config"], row) for scenario in SPECULATIVE for row in scenario["trace"]]
    assert (len(SPECULATIVE), len(rows)) == (80, 4_819)
    assert {config["spec"] for config, _ in rows} == {1, 2, 3, 5, 7}
    preempting = [config["async_sched"] for config, row in rows if row["preempted"]]
    assert min(preempting.count(True), preempting.count(False)) > 50
    padded = [kind for _, row in rows for name, kind, *_ in row["sched"] if kind != "run" and name in row["drafts"]]
    assert padded.count("new") > 20
    assert padded.count("resumed") > 3
    assert any(drafts < config["spec"] for config, row in rows for drafts in row["drafts"].values())


def test_sessions_were_recorded_with_all_that_can_become_of_them() -> None:
    rows = [row for scenario in SESSIONS for row in scenario["trace"]]
    assert (len(SESSIONS), len(rows)) == (70, 7_172)
    assert sum(scenario["config"]["async_sched"] for scenario in SESSIONS) > 20
    assert sum(bool(row["preempted"]) for row in rows) >= 20
    goes_on = [
        kind == "new" and computed > 0 for row in rows for name, kind, _, computed, _ in row["sched"] if "s" in name
    ]
    assert sum(goes_on) > 600
    # Turns that waited for the end of another one, and sessions that waited for input.
    assert (
        sum("Q" in events and finish is not None for row in rows for _, _, events, finish, *_ in row["outputs"]) > 500
    )
    assert sum(bool(row["stats"] and row["stats"][2]) for row in rows) > 500


@pytest.mark.parametrize("scenario", [*SCENARIOS, *SPECULATIVE, *SESSIONS], ids=lambda scenario: str(scenario["name"]))
def test_every_step_is_that_of_vllm(scenario: dict[str, Any]) -> None:
    trace = replay(scenario)
    for step, (ours, recorded) in enumerate(zip(trace, scenario["trace"], strict=False)):
        assert ours == recorded, f"row {step}"
    assert len(trace) == len(scenario["trace"])


SCENARIO = {
    "name": "one",
    "config": {
        "blocks": 10,
        "block_size": 4,
        "seqs": 2,
        "batched": 16,
        "model_len": 32,
        "policy": "fcfs",
        "prefix": True,
        "async_sched": False,
        "kv_events": True,
    },
    "events": [[1, "add", {"id": "q", "prompt": [1, 2, 3, 4, 5], "max_tokens": 9, "stop": [10_001]}]],
}


def test_a_scenario_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios, out = tmp_path / "scenarios.json", tmp_path / "traces.json.gz"
    scenarios.write_text(json.dumps([SCENARIO]))
    assert main([str(scenarios), str(out)]) == 0
    assert capsys.readouterr().out == "1 replayed, 0 compared, 0 differ\n"
    (played,) = read(out)
    first, second, last = played["trace"]
    assert first["sched"] == [["q", "new", 5, 0, 2]]
    assert first["outputs"] == [["q", [10_000], "QS", None, None, [5, 5, 0, 4]]]
    assert first["kv"] == [["stored", [0], None, [1, 2, 3, 4], [None], None, None, 0, "full_attention"]]
    assert second["outputs"] == [["q", [10_001], "", 0, 10_001, None]]
    assert (last["sched"], last["stats"]) == ([], [0, 0, 0])


def test_a_difference_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios, out = tmp_path / "scenarios.json", tmp_path / "traces.json"
    trace = replay(SCENARIO)
    scenarios.write_text(json.dumps([SCENARIO | {"trace": trace}, SCENARIO | {"name": "two", "trace": trace[:-1]}]))
    assert main([str(scenarios), str(out)]) == 1
    assert capsys.readouterr().out == "2 replayed, 2 compared, 1 differ\ntwo\n"
