# SPDX-License-Identifier: Apache-2.0
"""Writes the settings into the chart's `values.schema.json`: `python -m deploy.helm.write_schema`.

What helm then accepts under `engine.settings` is what the engine accepts, but for what only the engine knows, such as
which values cannot work together.
"""

import json
from pathlib import Path
from typing import Any, Final

from pydantic import AfterValidator, BeforeValidator

from mockengine.settings import Settings
from mockengine.settings_types import BLOCK_SIZES, TASKS

SCHEMA: Final = Path(__file__).parent / "mockengine" / "values.schema.json"
SET_BY_THE_CHART: Final = {
    "handshake_address",
    "engine_count",
    "start_rank",
    "data_parallel_size",
    "state_file",
    "admin_host",
    "admin_port",
}
"""Settings that follow from other values of the chart."""

LARGEST_EXACT: Final = 2**53 - 1
"""Helm reads numbers as 64-bit floats: larger integers must be written as text."""

# Durations of less than an hour, written with a unit.
_DURATION: Final = r"[0-9]{1,6}(\.[0-9]+)?(us|ms)|[0-9]{1,3}(\.[0-9]+)?s|[0-5]?[0-9](\.[0-9]+)?m"

# What the code of a setting's own check allows, which no schema can tell.
_PORT: Final = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
_HOST: Final = "[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE: Final = "[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5]"
_IPV4: Final = rf"({_BYTE})(\.({_BYTE})){{3}}"
_ENDPOINT: Final = rf"^(tcp://\*:({_PORT}|0)|tcp://{_HOST}(\.{_HOST}){{0,3}}:({_PORT})|ipc://[A-Za-z0-9/._-]{{1,107}})$"
_RATE: Final = r"(0(\.[0-9]+)?|1(\.0+)?)"
_RATES: Final = rf"^({_RATE}(, ?{_RATE})*|\[{_RATE}(, ?{_RATE})*\])$"
_LENGTH: Final = (
    r"^(max_tokens|[1-9][0-9]{0,8}|(uniform|normal|lognormal):[1-9][0-9]{0,8}:[0-9]{1,9}(\.[0-9]{1,6})?|histogram:.+)$"
)
_TASK: Final = f"({'|'.join(TASKS)})"
_TASK_LIST: Final = rf'^({_TASK}(, ?{_TASK})*|\["{_TASK}"(, ?"{_TASK}")*\])$'
_CHECKED_BY_CODE: Final[dict[str, dict[str, Any]]] = {
    "block_size": {"enum": list(BLOCK_SIZES)},
    "kv_events_endpoint": {"pattern": _ENDPOINT},
    "kv_events_replay_endpoint": {"pattern": _ENDPOINT},
    "acceptance_rate": {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "string", "pattern": _RATES}]
    },
    "nixl_side_channel_host": {"pattern": rf"^({_HOST}(\.{_HOST}){{0,3}}|{_IPV4})$"},
    "output_length": {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, {"type": "string", "pattern": _LENGTH}]
    },
    "reasoning_length": {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            {"type": "string", "pattern": _LENGTH.replace("max_tokens", "none|0")},
        ]
    },
    "reasoning_form": {"pattern": "^.{0,500}[^/]$"},
    "tool_call_form": {"pattern": "^.{0,500}[^/]$"},
    "supported_tasks": {"pattern": _TASK_LIST},
    "faults": {"pattern": r"^(\s*[\[{].*|.{0,500}[^/])$"},
    "reply_script": {"pattern": "^.{0,500}[^/]$"},
    "reply_dataset": {"pattern": "^.{0,500}[^/]$"},
    "timing_profile": {"pattern": "^.{0,500}[^/]$"},
    "tokenizer": {"pattern": "^.{0,500}[^/]/?$"},
}


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of `engine.settings`."""
    described = Settings.model_json_schema()["properties"]
    names = [name for name in described if name not in SET_BY_THE_CHART]
    return {
        "description": "Settings of the engine by their YAML keys: docs/settings.md. Written by `make docs`.",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _or_null(_in_helm(name, described[name])) for name in names},
    }


def text() -> str:
    """Return what the file should hold."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["engine"]["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def _in_helm(name: str, described: dict[str, Any]) -> dict[str, Any]:
    is_duration = any(isinstance(fact, BeforeValidator) for fact in Settings.model_fields[name].metadata)
    checked = _checked_by_code(name)
    if "anyOf" in checked:
        described = {key: value for key, value in described.items() if key != "type"}
    return _as_helm_reads_it(described | checked, is_duration=is_duration)


def _checked_by_code(name: str) -> dict[str, Any]:
    """Return what the schema must say besides; raises `ValueError` if nobody has said it."""
    has_code = any(isinstance(fact, AfterValidator) for fact in Settings.model_fields[name].metadata)
    if has_code and name not in _CHECKED_BY_CODE:
        raise ValueError(f"{name} is checked by code, so its schema would allow too much (add it to _CHECKED_BY_CODE)")
    return _CHECKED_BY_CODE.get(name, {})


def _as_helm_reads_it(described: dict[str, Any], *, is_duration: bool) -> dict[str, Any]:
    """Allow text for numbers that helm would spoil: integers beyond a float's precision, and fractions in `--set`.

    A duration may have a unit.
    """
    facts = {key: value for key, value in described.items() if key != "title"}
    bounds = {key: facts[key] for key in facts if key in {"minimum", "maximum"}}
    about = {key: facts[key] for key in facts if key in {"description", "default"}}
    if facts.get("type") == "number":
        largest = int(facts["maximum"])
        fractions = rf"({_whole_numbers_below(largest)})\.[0-9]+|{largest}\.0+"
        with_units = f"|{_DURATION}" if is_duration else ""
        as_text = {"type": "string", "pattern": f"^({fractions}{with_units})$"}
        return about | {"anyOf": [{"type": "number"} | bounds, as_text]}
    if facts.get("maximum", 0) > LARGEST_EXACT:
        about["description"] += f" Quote one that is larger than {LARGEST_EXACT}."
        as_text = {"type": "string", "pattern": f"^({_whole_numbers_below(facts['maximum'] + 1)})$"}
        return about | {"anyOf": [{"type": "integer"} | bounds | {"maximum": LARGEST_EXACT}, as_text]}
    return facts


def _whole_numbers_below(limit: int) -> str:
    """Return a pattern of the numbers from 0 to `limit` - 1, as alternatives."""
    digits = str(limit)
    if len(digits) == 1:
        return f"[0-{limit - 1}]"
    alternatives = [f"[0-9]{{1,{len(digits) - 1}}}"]
    for place, digit in enumerate(digits):
        lowest = 0 if place else 1
        if int(digit) > lowest:
            rest = len(digits) - place - 1
            alternatives.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(alternatives)


def _or_null(described: dict[str, Any]) -> dict[str, Any]:
    """Let null stand for unset, as in the engine's own YAML file."""
    if "anyOf" in described:
        null = {"type": "null"}
        return described if null in described["anyOf"] else {**described, "anyOf": [*described["anyOf"], null]}
    values = {"enum": [*described["enum"], None]} if "enum" in described else {}
    return {**described, "type": [described["type"], "null"], **values}


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
