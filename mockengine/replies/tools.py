# SPDX-License-Identifier: Apache-2.0
"""Replies that call tools where clients leave it to the model, `tool_choice: auto`.

The engine sees nothing of a request's tools but what the chat template has made of them, so they are looked for in the
prompt: JSON of `{"type": "function", "function": {…}}`, or of the inner object alone.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mockengine.replies.asked import Asked
from mockengine.replies.hashing import draw, uniform
from mockengine.replies.structured.constraint import read_constraint
from mockengine.replies.structured.writer import MOST_TOKENS, StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.wish import ToolCall, Wish

_BEGINNING: Final = re.compile(r'\{\s*"(?:type|function|name|description|parameters|strict)"\s*:')
_MOST_TOOLS: Final = 256
# A definition is no longer; a prompt may have much that only begins like one.
_MOST_CHARACTERS: Final = 2**17
_MOST_READ: Final = 2**21
_MOST_ATTEMPTS: Final = 1_024
# What calls and arguments have between them, and the EOS, in tokens.
_AROUND_ARGUMENTS: Final = 48
# Chat templates write the result of a tool as one of these, and what a user says as one of those.
_RESULT: Final = re.compile(
    r"<tool_response>|</tool_response>|\[/TOOL_RESULTS\]|<\|im_start\|>tool\b|<\|start_header_id\|>(?:tool|ipython)\b"
)
_USER: Final = re.compile(
    r"<\|im_start\|>user\b(?!\s*<tool_response>)|<\|start_header_id\|>user\b|\[INST\]|<start_of_turn>user\b"
)
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

    def __init__(self, probability: float, writer: StructuredWriter, tokenizer: Tokenizer) -> None:
        """Call a tool with this probability, from 0 to 1."""
        self._probability = probability
        self._writer = writer
        self._tokenizer = tokenizer

    def wish_for(self, asked: Asked) -> Wish | None:
        """Return a wish for a call, unless the client constrains its reply, or waits for what a tool's result means."""
        if asked.params.structured_outputs or uniform(draw(asked.key, _WHETHER)) > self._probability:
            return None
        prompt = asked.prompt_text
        if prompt is None or ends_with_a_result(prompt):
            return None
        tools = tools_in(prompt)
        if not tools:
            return None
        tool = tools[draw(asked.key, _WHICH) % len(tools)]
        return Wish(tool_calls=(ToolCall(tool.name, self._arguments(tool, asked)),))

    def _arguments(self, tool: Tool, asked: Asked) -> Mapping[str, object]:
        """Return arguments that the tool takes, as short as the client wants its reply if they can be; {} if none."""
        most = min(asked.params.max_tokens or MOST_TOKENS, MOST_TOKENS)
        try:
            constraint = read_constraint({"json": tool.parameters})
            if constraint is None:
                return {}
            written = self._writer.write(constraint, asked.key, max(1, most - _AROUND_ARGUMENTS))
            if not written.complete:
                # It is cut then, as a model's is.
                written = self._writer.write(constraint, asked.key, MOST_TOKENS)
            found = json.loads(self._tokenizer.decode(written.tokens))
        except Exception:  # noqa: BLE001 - whatever a client's schema does to what reads it, its tool is called
            return {}
        return found if isinstance(found, dict) else {}


def ends_with_a_result(prompt: str) -> bool:
    """Return whether the last thing that was said to the model is the result of a tool."""
    last_result = max((match.start() for match in _RESULT.finditer(prompt)), default=-1)
    last_user = max((match.start() for match in _USER.finditer(prompt)), default=-1)
    return last_result > last_user


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
    if not isinstance(name, str) or not name:
        return None
    if definition is wrapped and parameters is None:
        return Tool(name, {"type": "object", "properties": {}})
    if not isinstance(parameters, dict):
        return None
    if parameters.get("type") == "object" or isinstance(parameters.get("properties"), dict):
        return Tool(name, parameters)
    return Tool(name, {"type": "object"}) if definition is wrapped else None
