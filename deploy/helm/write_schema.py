# SPDX-License-Identifier: Apache-2.0
"""Writes the settings into the chart's `values.schema.json`: `python -m deploy.helm.write_schema`.

What helm then accepts under `engine.settings` is what the engine accepts, but for what only the engine knows, such as
which values cannot work together.
"""

import json
from pathlib import Path
from typing import Any, Final

from mockengine.settings import Settings

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

# Helm reads numbers as 64-bit floats: larger integers must be written as text.
_LARGEST_EXACT: Final = 2**53 - 1


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of `engine.settings`."""
    described = Settings.model_json_schema()["properties"]
    names = [name for name in described if name not in SET_BY_THE_CHART]
    return {
        "description": "Written by deploy/helm/write_schema.py.",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _or_null(_as_helm_reads_it(described[name])) for name in names},
    }


def text() -> str:
    """Return what the file should hold."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["engine"]["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def _as_helm_reads_it(described: dict[str, Any]) -> dict[str, Any]:
    """Allow text for numbers that helm would spoil: integers beyond a float's precision, and fractions in `--set`."""
    facts = {key: value for key, value in described.items() if key != "title"}
    bounds = {key: facts[key] for key in facts if key in {"minimum", "maximum"}}
    about = {key: facts[key] for key in facts if key in {"description", "default"}}
    if facts.get("type") == "number":
        as_text = {"type": "string", "pattern": r"^[0-9]+\.[0-9]+$"}
        return about | {"anyOf": [{"type": "number"} | bounds, as_text]}
    if facts.get("maximum", 0) > _LARGEST_EXACT:
        about["description"] += f" Quote one that is larger than {_LARGEST_EXACT}."
        as_text = {"type": "string", "pattern": "^[0-9]{1,20}$"}
        return about | {"anyOf": [{"type": "integer"} | bounds | {"maximum": _LARGEST_EXACT}, as_text]}
    return facts


def _or_null(described: dict[str, Any]) -> dict[str, Any]:
    """Let null stand for unset, as in the engine's own YAML file."""
    if "anyOf" in described:
        null = {"type": "null"}
        return described if null in described["anyOf"] else {**described, "anyOf": [*described["anyOf"], null]}
    values = {"enum": [*described["enum"], None]} if "enum" in described else {}
    return {**described, "type": [described["type"], "null"], **values}


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
