# SPDX-License-Identifier: Apache-2.0
"""What clients get of tool calls. For the stack of any frontend that has a tool parser."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema

from tests.support.stack import MODEL_NAME, Stack

QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": "boolean"},
                "at": {"type": "object", "properties": {"hours": {"type": "array", "items": {"type": "number"}}}},
            },
            "required": ["city", "days"],
        },
    },
}
CALLS: Sequence[dict[str, Any]] = (
    {
        "name": "get_weather",
        "arguments": {"city": 'São "Paulo"\n{[<x>]}', "days": 3, "exact": True, "at": {"hours": [1, 2.5]}},
    },
    {"name": "get_weather", "arguments": {"city": "Paris", "days": 1}},
)


def called(
    stack: Stack, asked: dict[str, Any] | None = None, *, stream: bool = False, **body: Any
) -> list[dict[str, Any]]:
    """Return the calls that a client gets, with their arguments read, and the content if it is more than space."""
    extra = {"vllm_xargs": asked} if asked else {}
    given: dict[str, Any] = {"messages": QUESTION, "tools": [WEATHER], "extra_body": extra, **body}
    given["model"] = MODEL_NAME
    with stack.client() as client:
        if not stream:
            choice = client.chat.completions.create(**given).choices[0]
            assert choice.finish_reason == "tool_calls", choice
            assert not (choice.message.content or "").strip(), choice
            return [_read(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        content = ""
        reasons = []
        for chunk in client.chat.completions.create(stream=True, **given):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
                for part in choice.delta.tool_calls or []:
                    names[part.index] = names.get(part.index, "") + (part.function.name or "")
                    arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    assert (reasons, content.strip()) == (["tool_calls"], "")
    return [_read(names[index], arguments[index]) for index in sorted(names)]


def calls_arrive(stack: Stack, calls: Sequence[dict[str, Any]], *, stream: bool, **besides: str) -> None:
    asked = {"mock": json.dumps({"tool_calls": calls, **besides})}
    assert called(stack, asked, stream=stream) == list(calls)


def tools_are_called_by_themselves(stack: Stack) -> None:
    """With probability 1: by all whose client leaves it to the model, but not when it gives a result."""
    for question in ("What is the weather?", "And tomorrow?"):
        messages = [{"role": "user", "content": question}]
        calls = called(stack, tool_choice="auto", messages=messages)
        assert [call["name"] for call in calls] == ["get_weather"]
        jsonschema.validate(calls[0]["arguments"], WEATHER["function"]["parameters"])
    answered: Any = [
        *QUESTION,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    with stack.client() as client:
        answer = client.chat.completions.create(model=MODEL_NAME, messages=answered, tools=[WEATHER], max_tokens=40)
        plain = client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=40)
    for reply in (answer, plain):
        assert not reply.choices[0].message.tool_calls
        assert reply.choices[0].message.content


def _read(name: str, arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": json.loads(arguments)}
