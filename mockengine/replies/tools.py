# SPDX-License-Identifier: Apache-2.0
"""Replies that call tools where clients leave it to the model, `tool_choice: auto`.

The engine sees nothing of a request's tools but what the chat template has made of them, so they are looked for in the
prompt: JSON of `{"type": "function", "function": {…}}`, or of the inner object alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from mockengine.replies.asked import Asked
from mockengine.replies.forms import ToolCallForm
from mockengine.replies.hashing import draw, uniform
from mockengine.replies.reasoning import Reasoning
from mockengine.replies.structured.constraint import read_constraint
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.wish import ToolCall, Wish

_BEGINNING: Final = re.compile(r'\{\s*"(?:type|function|name|description|parameters|strict)"\s*:')
_MOST_TOOLS: Final = 256
# A definition is no longer; a prompt may have much that only begins like one.
_MOST_CHARACTERS: Final = 2**17
_MOST_READ: Final = 2**21
_MOST_ATTEMPTS: Final = 1_024
_MOST_NAME: Final = 256
# Larger schemas and tokens of longer arguments would keep others waiting.
_MOST_VALUES: Final = 1_000
_MOST_ARGUMENTS: Final = 1_024
_ATTEMPTS_TO_FIT: Final = 4
# Places of draws from a reply's key, far from those of its tokens.
_WHETHER: Final = 2**61
_WHICH: Final = 2**61 + 1


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called.

    Attributes:
        name: of it.
        parameters: the JSON schema of its arguments.

    """

    name: str
    parameters: Mapping[str, Any]


class ToolCalling:
    """Wants a call of one of the tools that the prompt names, now and then; the reply's key decides."""

    def __init__(
        self, probability: float, writer: StructuredWriter, form: ToolCallForm, reasoning: Reasoning | None = None
    ) -> None:
        """Call a tool now and then.

        Args:
            probability: how often, from 0 to 1.
            writer: of arguments.
            form: in which calls are written.
            reasoning: what comes before.

        """
        self._probability = probability
        self._writer = writer
        self._tokenizer = writer.tokenizer
        self._form = form
        self._reasoning = reasoning

    def wish_for(self, asked: Asked) -> Wish | None:
        """Return a wish for a call, unless the client constrains its reply, or waits for what a tool's result means."""
        if asked.params.structured_outputs or uniform(draw(asked.key, _WHETHER)) > self._probability:
            return None
        if not self._has_an_object(asked.request.prompt_token_ids or ()):
            return None
        tools = tools_in(asked.prompt_text or "")
        if not tools or (asked.last_message is not None and asked.last_message.tool_rounds):
            return None
        tool = tools[draw(asked.key, _WHICH) % len(tools)]
        return Wish(tool_calls=(self._call(tool, asked),), reasons=True)

    def _has_an_object(self, prompt: Sequence[int]) -> bool:
        """Return whether an object of JSON may begin somewhere: to read a long prompt takes a while."""
        begins, found = self._begins_object, np.asarray(prompt, np.uint32)
        return bool(begins[found[found < len(begins)]].any())

    @cached_property
    def _begins_object(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([b"{" in spelled for spelled in self._tokenizer.token_bytes], np.bool_)

    def _call(self, tool: Tool, asked: Asked) -> ToolCall:
        """Return a call with arguments that the tool takes, and that fits what the client allows if it can; {} if none.

        What does not fit is cut, as a model's is.
        """
        call = ToolCall(tool.name, {})
        around = self._num_tokens(call)
        reasoning = 0 if self._reasoning is None else self._reasoning.most_tokens(asked)
        room = _MOST_ARGUMENTS + around
        if asked.params.max_tokens is not None:
            room = min(room, max(0, asked.params.max_tokens - reasoning))
        most = room - around
        for _ in range(_ATTEMPTS_TO_FIT):
            call = ToolCall(tool.name, self._arguments(tool, asked, most))
            # Names of parameters may be written anew, and JSON otherwise than it was.
            excess = self._num_tokens(call) - room
            if excess <= 0 or most <= 1:
                break
            most = max(1, min(most, len(self._tokenizer.encode(json.dumps(call.arguments)))) - excess)
        return call

    def _num_tokens(self, call: ToolCall) -> int:
        """Return what a call takes, with the EOS."""
        return len(self._tokenizer.encode(self._form.said("", [call]))) + 1

    def _arguments(self, tool: Tool, asked: Asked, most: int) -> Mapping[str, object]:
        """Return arguments of at most so many tokens, else longer ones; none that the tool takes are {}."""
        try:
            constraint = read_constraint({"json": tool.parameters})
            if constraint is None or _is_large(tool.parameters):
                return {}
            written = self._writer.write(constraint, asked.key, max(1, most))
            if not written.complete and most < _MOST_ARGUMENTS:
                written = self._writer.write(constraint, asked.key, _MOST_ARGUMENTS)
            found = json.loads(self._tokenizer.decode(written.tokens))
        except Exception:  # noqa: BLE001 - whatever a client's schema does to what reads it, its tool is called
            return {}
        return found if isinstance(found, dict) else {}


def tools_in(prompt: str) -> list[Tool]:
    """Return the tools that a prompt names, in their order; how much is read is bounded, whatever the prompt."""
    tools: dict[str, Tool] = {}
    decoder = json.JSONDecoder()
    position, left = 0, _MOST_READ
    for _ in range(_MOST_ATTEMPTS):
        match = _BEGINNING.search(prompt, position)
        if match is None or left <= 0 or len(tools) == _MOST_TOOLS:
            break
        part = prompt[match.start() : match.start() + min(_MOST_CHARACTERS, left)]
        try:
            found, length = decoder.raw_decode(part)
            tool = _tool(found)
        except json.JSONDecodeError as error:
            # Of a text without an end only the beginning is told.
            length, tool = len(part) if error.msg.startswith("Unterminated") else error.pos, None
        except (ValueError, RecursionError):
            length, tool = len(part), None
        left -= length
        position = match.end() if tool is None else match.start() + length
        if tool is not None:
            tools.setdefault(tool.name, tool)
    return list(tools.values())


def _tool(found: Any) -> Tool | None:
    """Return the tool that JSON defines, or None; a call has a name too, and parameters that are no schema."""
    wrapped = found.get("function")
    definition = wrapped if isinstance(wrapped, dict) else found
    name, parameters = definition.get("name"), definition.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        return None
    if definition is wrapped and parameters is None:
        return Tool(name, {"type": "object", "properties": {}})
    if not isinstance(parameters, dict):
        return None
    if parameters.get("type") == "object" or isinstance(parameters.get("properties"), dict):
        return Tool(name, parameters)
    return Tool(name, {"type": "object"}) if definition is wrapped else None


def _is_large(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema has more values than are compiled in no time."""
    waiting: list[Any] = [schema]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return False
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return bool(waiting)
