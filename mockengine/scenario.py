# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario against a running engine: a timeline of settings that change and faults that come and go.

What it has changed is as before when it is over, or when somebody stops it.
"""

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mockengine.ctl import OrderError
from mockengine.faults.rules import Rule
from mockengine.replies.located import Located, Problem, text_of
from mockengine.replies.yaml_values import read_yaml

MOST_BYTES: Final = 2**20
_MOST_STEPS: Final = 10_000
_MOST_SPEED: Final = 1_000.0
_FAILED: Final = 1
_WRONG_USE: Final = 2

Moment = Annotated[float, Field(ge=0, le=86_400)]


class ScenarioError(Exception):
    """A scenario that cannot be run; the text has a line for each reason."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Step(_Part):
    """What happens at one moment, in this order."""

    at_s: Moment = Field(description="Seconds after the beginning, or after that of the round.")
    jitter_s: Moment = Field(default=0.0, description="Up to so much later, as the seed has it.")
    settings: dict[str, str | float | int | bool | None] = Field(
        default={}, description="Settings that get other values; null is the value from before the scenario."
    )
    faults: list[Rule] = Field(default=[], description="Rules that are added, or replaced.")
    remove: list[str] = Field(default=[], description="Names of rules that are removed.")
    fire: list[str] = Field(default=[], description="Names of rules that strike whatever their conditions.")
    drain: list[int] = Field(default=[], description="Ranks that refuse new requests.")
    rejoin: list[int] = Field(default=[], description="Ranks that take them again.")


class Scenario(_Part):
    """A timeline."""

    about: str = Field(description="What it plays, in a sentence.")
    rounds: Annotated[int, Field(ge=1, le=1_000)] = Field(default=1, description="How often the steps are repeated.")
    round_s: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        default=None, description="How long a round takes; left out it ends with its last step."
    )
    steps: Annotated[list[Step], Field(min_length=1, max_length=_MOST_STEPS)] = Field(description="What happens when.")


class Orders(Protocol):
    """Carries orders out on an engine."""

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send one request and return the answer; raises `OrderError`."""


@dataclass(frozen=True, slots=True)
class Due:
    """A step, and when it is due, in seconds after the beginning."""

    at_s: float
    step: Step


def load(path: Path) -> Scenario:
    """Read a scenario out of a file in YAML.

    Raises:
        ScenarioError: it cannot be read, or anything is wrong with it.

    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    problems: list[Problem] = []
    if len(data) > MOST_BYTES:
        problems.append(Problem(1, f"it has more than {MOST_BYTES} bytes"))
    text = None if problems else text_of(data, problems)
    located = None if text is None else read_yaml(text, problems)
    if located is not None and not problems:
        try:
            return Scenario.model_validate(located.value)
        except ValidationError as error:
            problems += _problems(error, located)
    raise ScenarioError("\n".join(f"{path}:{each.line}: {each.text}" for each in sorted(problems)))


def _problems(error: ValidationError, located: Located) -> list[Problem]:
    found = []
    for each in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(map(str, each["loc"]))
        text = each["msg"].removeprefix("Value error, ")
        found.append(Problem(located.line(tuple(each["loc"])), f"{where}: {text}" if where else text))
    return found


def timeline(scenario: Scenario, seed: int) -> list[Due]:
    """Return all steps of all rounds in order; the seed decides what is drawn."""
    draw = random.Random(seed)  # noqa: S311 - nothing is secret here
    round_s = scenario.round_s or max(step.at_s for step in scenario.steps)
    found = [
        Due(number * round_s + step.at_s + draw.uniform(0, step.jitter_s), step)
        for number in range(scenario.rounds)
        for step in scenario.steps
    ]
    return sorted(found, key=lambda due: due.at_s)


def run(
    scenario: Scenario,
    engine: Orders,
    *,
    seed: int = 0,
    speed: float = 1.0,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run a scenario to its end, and leave the engine as it was.

    Args:
        scenario: what happens when.
        engine: to which it happens.
        seed: decides what is drawn.
        speed: how many times as fast it goes.
        say: hears a line for every step.
        sleep: waits for so many seconds.
        clock: in seconds.

    Raises:
        OrderError: the engine refused or did not answer; what can be undone is.

    """
    before = engine.request("GET", "/v1/settings")
    rules_before = [state["rule"] for state in engine.request("GET", "/v1/faults")]
    steps = timeline(scenario, seed)
    began = clock()
    try:
        for number, due in enumerate(steps, 1):
            while (left := began + due.at_s / speed - clock()) > 0:
                sleep(min(left, 1.0))
            say(f"[{number}/{len(steps)}] {due.at_s:7.1f} s  {_told(due.step)}")
            _take(due.step, engine, before)
    finally:
        with suppress(OrderError):
            _restore(scenario, engine, before, rules_before)


def _take(step: Step, engine: Orders, before: Mapping[str, Any]) -> None:
    if step.settings:
        changes = {name: before.get(name) if value is None else value for name, value in step.settings.items()}
        engine.request("PATCH", "/v1/settings", changes)
    for rule in step.faults:
        engine.request("POST", "/v1/faults", rule.model_dump(mode="json", exclude_none=True))
    for name in step.remove:
        engine.request("DELETE", f"/v1/faults/{name}")
    for name in step.fire:
        engine.request("POST", f"/v1/faults/{name}/fire")
    for action, ranks in (("drain", step.drain), ("rejoin", step.rejoin)):
        for rank in ranks:
            engine.request("POST", f"/v1/engines/{rank}/{action}")


def _restore(
    scenario: Scenario, engine: Orders, before: Mapping[str, Any], rules_before: Sequence[Mapping[str, Any]]
) -> None:
    names = {name for step in scenario.steps for name in step.settings}
    if names:
        engine.request("PATCH", "/v1/settings", {name: before[name] for name in sorted(names) if name in before})
    here = {state["rule"]["name"] for state in engine.request("GET", "/v1/faults")}
    for name in sorted({rule.name for step in scenario.steps for rule in step.faults} & here):
        engine.request("DELETE", f"/v1/faults/{name}")
    for rule in rules_before:
        engine.request("POST", "/v1/faults", rule)
    for rank in sorted({rank for step in scenario.steps for rank in step.drain}):
        engine.request("POST", f"/v1/engines/{rank}/rejoin")


def _told(step: Step) -> str:
    """Return what a step does, for a person."""
    parts = [f"{name}={'as before' if value is None else value}" for name, value in step.settings.items()]
    parts += [f"+{rule.name} ({rule.what.fault})" for rule in step.faults]
    parts += [f"-{name}" for name in step.remove]
    parts += [f"fire {name}" for name in step.fire]
    parts += [f"drain {rank}" for rank in step.drain]
    parts += [f"rejoin {rank}" for rank in step.rejoin]
    return ", ".join(parts) or "nothing"


def main(words: Sequence[str], engine: Orders) -> int:
    """Run the scenario in the file that is the first of the words; return the exit code and say all else on stderr."""
    options = dict(zip(words[1::2], words[2::2], strict=False))
    try:
        seed, speed = int(options.pop("--seed", "0")), float(options.pop("--speed", "1"))
    except ValueError:
        seed, speed = 0, 0.0
    if len(words) % 2 == 0 or options or not 0 < speed <= _MOST_SPEED:
        _say("mockengine: scenario takes a file, and after it perhaps --seed and --speed with a number each")
        return _WRONG_USE
    try:
        run(load(Path(words[0])), engine, seed=seed, speed=speed, say=_say)
    except ScenarioError as error:
        _say(f"mockengine: {error}")
        return _WRONG_USE
    except OrderError as error:
        _say(f"mockengine: {error}")
        return _FAILED
    except KeyboardInterrupt:
        _say("mockengine: the scenario was stopped, and the engine is as before")
        return _FAILED
    return 0


def _say(line: str) -> None:
    """Say a line at once."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
