# SPDX-License-Identifier: Apache-2.0
"""Tools are found in prompts, and called with arguments that they take; hostile ones cost only their request."""

import json
import time
from array import array
from typing import Any

import jsonschema
import pytest

from mockengine.replies.asked import Asked
from mockengine.replies.forms import load_form, tool_call_forms
from mockengine.replies.length import fixed_length
from mockengine.replies.planner import Planner, RepliesConfig
from mockengine.replies.reasoning import Reasoning
from mockengine.replies.reasoning_form import load_reasoning_form
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.tools import ToolCalling, tools_in
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
# On a machine that has much else to do; without a bound it would be half a minute.
HELD_UP_S = 6.0


class Calls:
    """What is wished of replies to prompts."""

    def __init__(self, tokenizer: Tokenizer, writer: StructuredWriter) -> None:
        self._tokenizer, self._writer = tokenizer, writer

    def wished(
        self, prompt: str, key: int = 1, probability: float = 1.0, form: str = "hermes", **params: Any
    ) -> ToolCall | None:
        tokens = array("I", self._tokenizer.encode(prompt))
        asked_params = SamplingParams(**params)
        made = EngineCoreRequest(request_id="r", prompt_token_ids=tokens, sampling_params=asked_params)
        calling = ToolCalling(probability, self._writer, load_form(form))
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
        f'{{"name": "{"f" * 257}", "parameters": {{"type": "object"}}}}',
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


def _num_tokens(tokenizer: Tokenizer, form: str, call: ToolCall) -> int:
    return len(tokenizer.encode(load_form(form).said("", [call]))) + 1


@pytest.mark.parametrize("form", tool_call_forms())
def test_a_call_fits_if_it_can(calls: Calls, tokenizer: Tokenizer, form: str) -> None:
    """Names of parameters count as they are written, which may be much longer than in JSON."""
    most = _num_tokens(tokenizer, form, ToolCall("get_weather", {"city": "Paris", "days": 1})) + 12
    for key in range(10):
        call = calls.wished(json.dumps(WRAPPED), key, form=form, max_tokens=most)
        assert call is not None
        assert _num_tokens(tokenizer, form, call) <= most
    # So many parameters that their marks are most of it.
    names = [f"p{number}" for number in range(8)]
    texts = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    most = _num_tokens(tokenizer, form, ToolCall("f", dict.fromkeys(names, ""))) + 16
    if form == "pythonic":
        # Arguments are made in JSON, which is longer than these.
        most += 16
    for key in range(5):
        call = calls.wished(json.dumps({"name": "f", "parameters": texts}), key, form=form, max_tokens=most)
        assert call is not None
        assert _num_tokens(tokenizer, form, call) <= most
    # What is cut is a call that would have been in order.
    for most in (1, 5):
        cut = calls.wished(json.dumps(WRAPPED), form=form, max_tokens=most)
        assert cut is not None
        jsonschema.validate(cut.arguments, SCHEMA)


@pytest.mark.parametrize("name", ["f" * 256, 'f"\\>{$name}', "é 中", "\ud800", "</tool_call>"])
def test_odd_names_are_called(calls: Calls, name: str) -> None:
    call = calls.wished(json.dumps({"name": name, "parameters": {"type": "object"}}))
    assert call is not None
    assert call.name.encode("utf-8", "replace") == name.encode("utf-8", "replace")


def test_who_constrains_a_reply_or_has_no_tools_gets_no_call(calls: Calls) -> None:
    prompt = json.dumps(WRAPPED)
    assert calls.wished(prompt, structured_outputs={"json_object": True}) is None
    assert calls.wished("Hello") is None


CHATML = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
LLAMA_REPLY = "<|start_header_id|>assistant<|end_header_id|>"


@pytest.mark.parametrize(
    ("conversation", "is_answered"),
    [
        (CHATML, False),
        (f"{CHATML}<tool_call>…<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n", True),
        (f"{CHATML}…<|im_end|>\n<|im_start|>user\n<tool_response>\n22\n</tool_response><|im_end|>\n", False),
        (f"{CHATML}…<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n{CHATML}", False),
        ("[INST] Hello[/INST]", False),
        ("[INST] Hello[/INST][TOOL_CALLS] [{}]</s>[TOOL_RESULTS] {}[/TOOL_RESULTS]", True),
        (f"{LLAMA}{LLAMA_REPLY}", False),
        (
            f"{LLAMA}{LLAMA_REPLY}{{}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>22<|eot_id|>{LLAMA_REPLY}",
            True,
        ),
    ],
)
def test_the_result_of_a_tool_is_answered_in_words(calls: Calls, conversation: str, is_answered: bool) -> None:  # noqa: FBT001 - a test's
    assert (calls.wished(json.dumps(WRAPPED) + conversation) is None) is is_answered


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
    ],
)
def test_a_hostile_prompt_is_read_in_no_time(text: str) -> None:
    began = time.monotonic()
    tools_in(text)
    assert time.monotonic() - began < BUDGET_S


def _many(number: int, **schema: Any) -> str:
    names = [f"p{place}" for place in range(number)]
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}, **schema}
    return json.dumps({"name": "f", "parameters": parameters})


@pytest.mark.parametrize(
    "text",
    [
        _many(4_000),
        _many(2_000, required=[f"p{place}" for place in range(2_000)]),
        _many(10, enum=[{"p0": str(number)} for number in range(3_000)]),
        _many(150, required=[f"p{place}" for place in range(150)]),
        _many(10, enum=[{"p0": str(number)} for number in range(450)]),
        _many(10, minProperties=2_000),
    ],
)
def test_a_hostile_schema_holds_nobody_up(calls: Calls, text: str) -> None:
    for most in (None, 400):
        began = time.monotonic()
        call = calls.wished(text, max_tokens=most)
        assert call is not None
        assert time.monotonic() - began < HELD_UP_S


def test_a_prompt_without_an_object_is_not_even_read(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("it was read"))
    assert calls.wished("Hello, how are you?" * 1_000) is None


def test_a_call_comes_after_the_reasoning(tokenizer: Tokenizer, writer: StructuredWriter) -> None:
    """Parsers of reasoning may take all that comes before its end for reasoning."""
    reasoning = Reasoning(tokenizer, load_reasoning_form(), fixed_length(30))
    calling = ToolCalling(1.0, writer, load_form(), reasoning)
    config = RepliesConfig(
        vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, writer=writer, reasoning=reasoning, wishes=[calling]
    )

    def text(**params: Any) -> str:
        prompt = array("I", tokenizer.encode(json.dumps(WRAPPED) + CHATML))
        given = SamplingParams(**({"max_tokens": 200, "eos_token_id": tokenizer.eos_ids[0]} | params))
        plan = Planner(config, 4_096).plan(
            EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=given)
        )
        return tokenizer.decode(plan.source.tokens(plan.key, 0, plan.ending.output_tokens))

    for said in (text(), text(max_tokens=110), text(thinking_token_budget=0)):
        thought, call = said.split("</think>\n\n")
        assert thought.startswith("<think>")
        arguments = call.removeprefix('<tool_call>\n{"name": "get_weather", "arguments": ')
        jsonschema.validate(json.loads(arguments.removesuffix("}\n</tool_call><|im_end|>")), SCHEMA)
    assert text(max_tokens=20) == text()[: len(text(max_tokens=20))]
