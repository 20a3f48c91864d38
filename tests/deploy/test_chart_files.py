# SPDX-License-Identifier: Apache-2.0
"""The chart's files fit each other and the engine's settings, as far as that can be seen without helm."""

import json
import re
from typing import Any, Literal, get_args, get_origin

import jsonschema
import pytest
from annotated_types import Ge, Le
from pydantic import ValidationError

import mockengine
from deploy.helm import write_schema
from deploy.helm.write_schema import LARGEST_EXACT, SCHEMA, SET_BY_THE_CHART, text
from mockengine.settings import Settings
from mockengine.settings_types import BLOCK_SIZES
from tests.support.manifests import CHART, parse

Values = list[Any]

# Where neither type nor bounds say what a setting allows: some values that it takes, and some that it refuses.
_ENDPOINTS: tuple[Values, Values] = (
    ["tcp://*:5557", "tcp://*:0", "tcp://router:1", "tcp://router.ns.svc:65535", "ipc:///run/kv"],
    ["", "tcp://*", "tcp://*:65536", "tcp://router:0", "tcp://:5557", "udp://router:1", "router:5557", 7],
)
SAMPLES: dict[str, tuple[Values, Values]] = {
    "kv_events_endpoint": _ENDPOINTS,
    "kv_events_replay_endpoint": _ENDPOINTS,
    "kv_events_topic": (["kv-events", "a b", "é"], ["x" * 1_025]),
    "acceptance_rate": (
        [0.5, 1, "0.5", "0.8,0.6,0.4", "[0.8, 0.6]", "1, 0"],
        ["", "x", 1.5, "1.5", "-0.5", "0.5,", "0.8;0.6", True],
    ),
    "kv_engine_id": (["prefill", "a b", "é"], ["", "x" * 257]),
    "nixl_side_channel_host": (["localhost", "prefill-0.prefill.svc", "10.0.0.7"], ["", "10.0.0.256", "a:1", "[::1]"]),
    "output_length": (
        ["max_tokens", "128", 128, "uniform:10:200", "normal:128:32.5", "lognormal:128:0", "histogram:/lengths.txt"],
        ["", "some", 0, "normal:5", "normal:-5:1", "histogram:", True],
    ),
    "reasoning_length": (["none", "128", 128, 0, "uniform:10:200"], ["", "some", "max_tokens", "normal:5", True]),
    "reasoning_form": (["qwen3", "/etc/mockengine/form.toml"], ["", "folder/"]),
    "tool_call_form": (["hermes", "/etc/mockengine/form.toml"], ["", "folder/"]),
    "supported_tasks": (
        ["generate", "embed,token_embed", "embed, classify", '["embed", "token_classify"]'],
        ["", "plugin", "embed,", "embed;classify", "[embed]", 7, True],
    ),
    "admin_token": (["secret-enough"], ["", "short", "x" * 1_025]),
    "faults": (['[{"what": "hang"}]', "[]", "/etc/mockengine/faults.yaml"], ["", "folder/"]),
    "reply_script": (["/etc/mockengine/replies.yaml", "rules.jsonl"], ["", "folder/"]),
    "reply_dataset": (["/data/ShareGPT_V3.json", "replies"], ["", "folder/"]),
    "timing_profile": (["/etc/mockengine/profile.yaml", "profile"], ["", "folder/"]),
    "tokenizer": (["/models/mock", "/models/mock/", "tokenizer.json"], ["", "/"]),
    "parallel_config_hash": (["0123456789abcdef" * 4], ["", "0" * 63, "A" * 64, 7]),
    "vllm_version": (["auto", "0.19", "0.33", "0.33.0"], ["", "0.18", "1.0", "0.33.0.1", "v0.33.0"]),
    "block_size": (list(BLOCK_SIZES), [0, 2, 24, 257, -1, "other"]),
}
OFFERED = [name for name in Settings.model_fields if name not in SET_BY_THE_CHART]


def test_versions_are_the_project_s() -> None:
    (chart,) = parse((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == mockengine.__version__
    assert "dependencies" not in chart


def test_schema_is_written_from_the_settings() -> None:
    # If this fails: make docs
    assert SCHEMA.read_text() == text()


def test_every_value_is_in_the_schema_and_every_part_of_it_has_values() -> None:
    def paths(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> None:
        for name, value in values.items():
            assert name in schema["properties"], f"{path}{name} is not in values.schema.json"
            inner = schema["properties"][name]
            if isinstance(value, dict) and "properties" in inner:
                paths(value, inner, f"{path}{name}.")

    (values,) = parse((CHART / "values.yaml").read_text())
    schema = json.loads(SCHEMA.read_text())
    paths(values, schema)
    assert set(values) == set(schema["properties"]) - {"global"}


def samples(name: str) -> tuple[Values, Values]:
    """Return values that a setting takes, and values that it refuses."""
    field = Settings.model_fields[name]
    if name in SAMPLES:
        return SAMPLES[name]
    if field.annotation is bool:
        return [True, False], ["other", 7]
    if get_origin(field.annotation) is Literal:
        return list(get_args(field.annotation)), ["other", "", 7]
    bounds = {type(fact): fact for fact in field.metadata}
    low, high = bounds[Ge].ge, bounds[Le].le
    if field.annotation is float:
        taken = ["0.5", f"{0.925 * high:.3f}", f"{high - 0.001:.3f}", f"{high:.1f}"]
        texts = taken, [f"{high + 0.5:.1f}", f"{high + 1:.1f}", f"{10 * high:.1f}", "-1.5"]
        return [low, 0.25, high, *texts[0]], [low - 1, high + 0.5, "other", *texts[1]]
    return [helm_s(low), helm_s(low + 1), helm_s(high)], [low - 1, helm_s(high + 1), "other", 0.5]


def helm_s(number: int) -> int | str:
    """Write a number as helm must be given it."""
    return number if number <= LARGEST_EXACT else str(number)


def is_in_the_schema(name: str, value: Any) -> bool:
    described = write_schema.settings_schema()["properties"][name]
    return bool(jsonschema.Draft202012Validator(described).is_valid(value))


def is_a_setting(name: str, value: Any) -> bool:
    """Whether the engine takes the value by itself; what it cannot work together with is not asked here."""
    try:
        # As the chart writes it into the ConfigMap.
        Settings.model_validate({name: str(value)})
    except ValidationError as error:
        return all(problem["loc"] != (name,) for problem in error.errors())
    return True


@pytest.mark.parametrize("name", OFFERED)
def test_schema_takes_what_the_engine_takes_and_refuses_what_it_refuses(name: str) -> None:
    valid, invalid = samples(name)
    assert [(value, is_in_the_schema(name, value), is_a_setting(name, value)) for value in [*valid, *invalid]] == [
        *((value, True, True) for value in valid),
        *((value, False, False) for value in invalid),
    ]
    assert is_in_the_schema(name, None)


def test_a_setting_that_code_checks_needs_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(write_schema._CHECKED_BY_CODE, "block_size")
    with pytest.raises(ValueError, match="block_size is checked by code"):
        write_schema.settings_schema()


@pytest.mark.parametrize("limit", [10, 86, 100, 901])
def test_pattern_of_the_numbers_below_a_limit(limit: int) -> None:
    pattern = f"({write_schema._whole_numbers_below(limit)})"
    assert [number for number in range(10_000) if re.fullmatch(pattern, str(number))] == list(range(limit))
