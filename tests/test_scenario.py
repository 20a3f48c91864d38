# SPDX-License-Identifier: Apache-2.0
"""Scenarios: what is said of wrong files, what is asked of the engine, and that it is as before afterwards."""

from pathlib import Path
from typing import Any

import pytest

from mockengine.ctl import OrderError
from mockengine.scenario import Scenario, ScenarioError, load, run, timeline
from tests.support.stack import ROOT

SHIPPED = sorted((ROOT / "deploy" / "scenarios").glob("*.yaml"))


class Engine:
    """Settings and rules, a clock, and what was asked when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.settings: dict[str, Any] = {"itl_ms": 5.0, "ttft_ms": 0.0}
        self.rules: dict[str, Any] = {"before": {"name": "before", "what": {"fault": "hang"}}}
        self.asked: list[tuple[float, str, str]] = []
        self.fails_at: str | None = None

    def request(self, method: str, path: str, body: Any = None) -> Any:
        if method != "GET":
            self.asked.append((round(self.now - 100, 3), method, path))
        if path == self.fails_at:
            raise OrderError("it does not answer")
        name = path.split("/")[3] if path.startswith("/v1/faults/") else None
        if method == "PATCH":
            self.settings |= body
        elif method == "POST" and path == "/v1/faults":
            self.rules[body["name"]] = body
        elif method == "DELETE" and name is not None:
            del self.rules[name]
        return dict(self.settings) if path == "/v1/settings" else [{"rule": rule} for rule in self.rules.values()]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, scenario: Scenario, **options: Any) -> list[str]:
        said: list[str] = []
        run(scenario, self, say=said.append, sleep=self.sleep, clock=lambda: self.now, **options)
        return said


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_shipped_can_be_run_and_leaves_everything_as_it_was(path: Path) -> None:
    engine = Engine()
    before = dict(engine.settings), dict(engine.rules)
    said = engine.run(load(path))
    assert said
    assert (engine.settings, engine.rules) == before
    assert len(engine.asked) > 2


def test_steps_come_when_they_are_due() -> None:
    engine = Engine()
    steps = [
        {"at_s": 0, "settings": {"itl_ms": 50}},
        {"at_s": 10.5, "faults": [{"name": "a", "what": "hang"}], "fire": ["a"]},
        {"at_s": 20, "remove": ["a"], "drain": [0, 1], "settings": {"itl_ms": None}},
    ]
    said = engine.run(Scenario.model_validate({"about": "x", "steps": steps}))
    assert engine.asked[:7] == [
        (0.0, "PATCH", "/v1/settings"),
        (10.5, "POST", "/v1/faults"),
        (10.5, "POST", "/v1/faults/a/fire"),
        (20.0, "PATCH", "/v1/settings"),
        (20.0, "DELETE", "/v1/faults/a"),
        (20.0, "POST", "/v1/engines/0/drain"),
        (20.0, "POST", "/v1/engines/1/drain"),
    ]
    assert said[1] == "[2/3]    10.5 s  +a (hang), fire a"
    assert said[2] == "[3/3]    20.0 s  itl_ms=as before, -a, drain 0, drain 1"


def test_it_goes_faster_and_in_rounds() -> None:
    scenario = Scenario.model_validate({"about": "x", "rounds": 3, "round_s": 10, "steps": [{"at_s": 4, "drain": [0]}]})
    engine = Engine()
    engine.run(scenario, speed=2)
    assert [moment for moment, _, path in engine.asked if path.endswith("drain")] == [2.0, 7.0, 12.0]


def test_what_is_drawn_follows_from_the_seed() -> None:
    steps = [{"at_s": 0, "jitter_s": 5, "drain": [0]}, {"at_s": 1, "rejoin": [0]}]
    scenario = Scenario.model_validate({"about": "x", "rounds": 20, "round_s": 3, "steps": steps})

    def moments(seed: int) -> list[float]:
        return [due.at_s for due in timeline(scenario, seed)]

    assert moments(1) == moments(1) != moments(2)
    assert moments(1) == sorted(moments(1))


@pytest.mark.parametrize("end", [OrderError, KeyboardInterrupt])
def test_an_end_before_its_time_leaves_everything_as_it_was_too(end: type[BaseException]) -> None:
    engine = Engine()
    before = dict(engine.settings), dict(engine.rules)
    rule = {"name": "a", "what": "hang"}
    steps = [{"at_s": 0, "settings": {"itl_ms": 50}, "faults": [rule]}, {"at_s": 5, "fire": ["a"]}]
    scenario = Scenario.model_validate({"about": "x", "steps": steps})

    def stop(line: str) -> None:
        if line.startswith("[2/2]"):
            raise end("no more")

    with pytest.raises(end):
        run(scenario, engine, say=stop, sleep=engine.sleep, clock=lambda: engine.now)
    assert (engine.settings, engine.rules) == before


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", ":2: not YAML"),
        ("[]", ":1: Input should be a valid dictionary"),
        ("about: x\nsteps: []", ":2: steps: List should have at least 1 item"),
        ("about: x\nsteps:\n- {at_s: -1}", ":3: steps.0.at_s: Input should be greater than or equal to 0"),
        ("about: x\nsteps:\n- {at_s: 1, explode: 1}", ":3: steps.0.explode: Extra inputs"),
        ("about: x\nsteps:\n- at_s: 1\n  faults: [{what: explode}]", ":4: steps.0.faults.0.what"),
    ],
)
def test_a_file_that_is_wrong_is_told_with_its_lines(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        load(path)
    assert problem in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="No such file"):
        load(tmp_path / "absent")
