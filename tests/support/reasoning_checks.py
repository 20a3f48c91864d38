# SPDX-License-Identifier: Apache-2.0
"""What clients get of reasoning. For the stack of any frontend that parses it, and calls in the form hermes besides.

The engine of the stack reasons in `WORDS` words, answers in `ANSWER` tokens, and calls a tool whenever it may.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from tests.support.stack import MODEL, MODEL_NAME, Stack
from tests.support.tool_checks import QUESTION, WEATHER

WORDS = 12
ANSWER = 20
# <think>, a newline on both sides of the words, </think>, and two newlines, a token each.
MARKS = 6
ENGINE_FLAGS = (
    f"--tokenizer={MODEL}",
    "--reply-source=words",
    f"--reasoning-length={WORDS}",
    f"--output-length={ANSWER}",
    "--tool-call-probability=1",
)
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@dataclass
class Heard:
    """What a client has heard of a reply."""

    reasoning: str = ""
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    completion_tokens: int = 0


def ask(stack: Stack, *, stream: bool, **body: Any) -> Heard:
    """Ask for a chat completion, and return what there is to hear."""
    given: dict[str, Any] = {"model": MODEL_NAME, "messages": QUESTION, **body}
    heard = Heard()
    with stack.client() as client:
        if not stream:
            reply = client.chat.completions.create(**given)
            message: Any = reply.choices[0].message
            heard.reasoning, heard.content = message.reasoning or "", message.content or ""
            for call in message.tool_calls or []:
                heard.names.append(call.function.name)
                heard.arguments.append(call.function.arguments)
            heard.completion_tokens = reply.usage.completion_tokens
            return heard
        for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given):
            heard.completion_tokens = chunk.usage.completion_tokens if chunk.usage else heard.completion_tokens
            for choice in chunk.choices:
                _add(heard, choice.delta)
    return heard


def _add(heard: Heard, delta: Any) -> None:
    heard.reasoning += getattr(delta, "reasoning", None) or ""
    heard.content += delta.content or ""
    for part in delta.tool_calls or []:
        if part.index == len(heard.names):
            heard.names.append("")
            heard.arguments.append("")
        heard.names[part.index] += part.function.name or ""
        heard.arguments[part.index] += part.function.arguments or ""


def an_answer_is_told_from_the_reasoning(stack: Stack) -> None:
    whole, streamed = ask(stack, stream=False), ask(stack, stream=True)
    for heard in (whole, streamed):
        assert len(heard.reasoning.split()) == WORDS
        assert len(heard.content.split()) == ANSWER - 1
        assert "think>" not in heard.reasoning + heard.content
        assert heard.completion_tokens == WORDS + MARKS + ANSWER
    assert whole.content.strip() == streamed.content.strip()
    assert whole.reasoning.strip() == streamed.reasoning.strip()


def a_budget_is_kept_to(stack: Stack) -> None:
    for budget in (0, 5, 500):
        heard = ask(stack, stream=False, extra_body={"thinking_token_budget": budget})
        # A newline begins the reasoning, one ends it.
        inside = min(budget, WORDS + 2)
        assert len(heard.reasoning.split()) == min(max(0, budget - 1), WORDS)
        assert len(heard.content.split()) == ANSWER - 1
        assert heard.completion_tokens == inside + MARKS - 2 + ANSWER


def max_tokens_cut_it(stack: Stack) -> None:
    heard = ask(stack, stream=False, max_tokens=8)
    assert (len(heard.reasoning.split()), heard.content.strip(), heard.completion_tokens) == (6, "", 8)


def a_tool_is_called_after_it(stack: Stack) -> None:
    """Whether the client leaves it to the model, wants any or names one."""
    for choice in ("auto", "required", NAMED):
        for stream in (False, True):
            heard = ask(stack, stream=stream, tools=[WEATHER], tool_choice=choice)
            assert len(heard.reasoning.split()) == WORDS, (choice, stream, heard)
            assert (set(heard.names), heard.content.strip()) == ({"get_weather"}, ""), (choice, stream, heard)
            for arguments in heard.arguments:
                found = json.loads(arguments)
                assert isinstance(found, dict)
                if choice == "auto":
                    # Of tools that have to be called the engine is not told the parameters.
                    jsonschema.validate(found, WEATHER["function"]["parameters"])


def a_schema_is_kept_to_after_it(stack: Stack) -> None:
    for stream in (False, True):
        heard = ask(stack, stream=stream, response_format=FORMAT, max_tokens=200)
        assert len(heard.reasoning.split()) == WORDS, heard
        jsonschema.validate(json.loads(heard.content), SCHEMA)
    heard = ask(stack, stream=False, response_format=FORMAT, extra_body={"thinking_token_budget": 0})
    assert heard.reasoning.strip() == ""
    jsonschema.validate(json.loads(heard.content), SCHEMA)


def what_a_client_wants_is_reasoned(stack: Stack) -> None:
    asked = {"mock_reasoning": "Well, well.", "mock_text": "Yes."}
    for stream in (False, True):
        heard = ask(stack, stream=stream, extra_body={"vllm_xargs": asked})
        assert (heard.reasoning.strip(), heard.content.strip()) == ("Well, well.", "Yes.")


CHECKS = (
    an_answer_is_told_from_the_reasoning,
    a_budget_is_kept_to,
    max_tokens_cut_it,
    a_tool_is_called_after_it,
    a_schema_is_kept_to_after_it,
    what_a_client_wants_is_reasoned,
)
