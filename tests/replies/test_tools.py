# SPDX-License-Identifier: Apache-2.0
"""Tools are found in prompts, and called with arguments that they take; hostile ones cost only their request."""

import json
import time
from array import array
from typing import Any

import jsonschema
import pytest

from mockengine.replies.asked import Asked
from mockengine.replies.forms import form_names, load_form
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.tools import ToolCalling, ends_with_a_result, tools_in
from mockengine.replies.wish import ToolCall
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
DEFINITION = {"name": "get_weather", "description": "Tell {it}.", "parameters": SCHEMA}
WRAPPED = {"type": "function", "function": DEFINITION}
BUDGET_S = 2.0


class Calls:
    """What is wished of replies to prompts."""

    def __init__(self, tokenizer: Tokenizer, writer: StructuredWriter) -> None:
        self._tokenizer, self._writer = tokenizer, writer

    def wished(self, prompt: str, key: int = 1, probability: float = 1.0, **params: Any) -> ToolCall | None:
        tokens = array("I", self._tokenizer.encode(prompt))
        asked_params = SamplingParams(**params)
        made = EngineCoreRequest(request_id="r", prompt_token_ids=tokens, sampling_params=asked_params)
        calling = ToolCalling(probability, self._writer, self._tokenizer)
        wish = calling.wish_for(Asked(made, asked_params, key, self._tokenizer))
        if wish is None:
            return None
        (call,) = wish.tool_calls or ()
        return call


@pytest.fixture(scope="module")
def calls(tokenizer: Tokenizer, writer: StructuredWriter) -> Calls:
    return Calls(tokenizer, writer)


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("definition", [DEFINITION, WRAPPED, {"function": DEFINITION, "type": "function"}])
def test_a_tool_is_found_however_it_is_written(definition: dict[str, Any], indent: int | None) -> None:
    other = {"type": "function", "function": {"name": "now"}}
    text = json.dumps([definition, other], indent=indent)
    found = tools_in(f"<tools>\n{text}\n</tools> {{'name': 5}} Hello {{")
    assert [tool.name for tool in found] == ["get_weather", "now"]
    assert found[0].parameters == SCHEMA


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        '{"name": 5, "parameters": {"type": "object"}}',
        '{"name": "", "parameters": {"type": "object"}}',
        '{"type": "function", "function": "f"}',
        "",
    ],
)
def test_what_is_no_definition_is_no_tool(text: str) -> None:
    assert tools_in(text) == []


@pytest.mark.parametrize(("places", "tools"), [(1_000, 1), (1_024, 0)])
def test_so_many_places_are_looked_at(places: int, tools: int) -> None:
    assert len(tools_in('{"name": 5, ' * places + json.dumps(WRAPPED))) == tools


def test_arguments_are_such_as_the_tool_takes(calls: Calls) -> None:
    said = [calls.wished(json.dumps(WRAPPED), key) for key in range(10)]
    for call in said:
        assert call is not None
        assert call.name == "get_weather"
        jsonschema.validate(call.arguments, SCHEMA)
    assert len({json.dumps(call.arguments) for call in said if call}) > 5


def test_which_tool_follows_from_the_key(calls: Calls) -> None:
    prompt = json.dumps([WRAPPED, {"type": "function", "function": {"name": "now"}}])
    said = [[call.name if (call := calls.wished(prompt, key)) else "" for key in range(20)] for _ in range(2)]
    assert said[0] == said[1]
    assert set(said[0]) == {"get_weather", "now"}


def test_some_replies_call_a_tool(calls: Calls) -> None:
    called = sum(calls.wished(json.dumps(WRAPPED), key, 0.3) is not None for key in range(400))
    assert 80 < called < 160


@pytest.mark.parametrize("form", form_names())
def test_a_call_fits_if_it_can(calls: Calls, tokenizer: Tokenizer, form: str) -> None:
    for key in range(10):
        call = calls.wished(json.dumps(WRAPPED), key, max_tokens=80)
        assert call is not None
        assert len(tokenizer.encode(load_form(form).said("", [call]))) < 80
    cut = calls.wished(json.dumps(WRAPPED), max_tokens=5)
    assert cut is not None
    jsonschema.validate(cut.arguments, SCHEMA)


def test_who_constrains_a_reply_or_gives_a_result_gets_no_call(calls: Calls) -> None:
    prompt = json.dumps(WRAPPED)
    assert calls.wished(prompt, structured_outputs={"json_object": True}) is None
    assert calls.wished(f"{prompt}<|im_start|>user\nHello<|im_end|>\n<|im_start|>tool\n22<|im_end|>\n") is None
    assert calls.wished("Hello") is None


@pytest.mark.parametrize(
    ("prompt", "is_answered"),
    [
        ("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n", True),
        ("<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n", True),
        ("[INST] hello[/INST][TOOL_CALLS] [][TOOL_RESULTS] {}[/TOOL_RESULTS]", True),
        ("<|start_header_id|>ipython<|end_header_id|>\n\nsunny<|eot_id|>", True),
        ("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n", False),
        ("<|im_start|>user\nHello<|im_end|>\n", False),
    ],
)
def test_the_last_message_is_told_from_the_prompt(prompt: str, is_answered: bool) -> None:  # noqa: FBT001 - a test's
    assert ends_with_a_result(prompt) is is_answered


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "foo"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "((((a{1,99}){1,99}){1,99}){1,99}"}}},
    ],
)
def test_a_schema_that_cannot_be_kept_to_costs_its_arguments(calls: Calls, parameters: dict[str, Any]) -> None:
    call = calls.wished(json.dumps({"name": "f", "parameters": parameters}))
    assert call is not None
    assert (call.name, isinstance(call.arguments, dict)) == ("f", True)


@pytest.mark.parametrize(
    "text",
    [
        '{"name":' * 60_000,
        '{"name": "' * 60_000,
        '{"name": ' * 500 + '"' + "a" * 500_000,
        '{"name": [' + "[" * 500_000,
        '{"type": ' + "1" * 500_000,
        ("{" + " " * 99) * 5_000,
        json.dumps([{"name": f"f{number}", "parameters": {"type": "object"}} for number in range(10_000)]),
        "<|im_start|>user" * 30_000,
    ],
)
def test_a_hostile_prompt_is_read_in_no_time(text: str) -> None:
    began = time.monotonic()
    tools_in(text)
    ends_with_a_result(text)
    assert time.monotonic() - began < BUDGET_S
