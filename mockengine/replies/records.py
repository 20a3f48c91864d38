# SPDX-License-Identifier: Apache-2.0
"""Records of data sets, as people have them: which prompts they hold, and what was replied.

A record is a conversation (`conversations` as of ShareGPT, `messages` as of OpenAI's chats) or a `prompt` with or
without a completion. What it has besides is not looked at. A conversation gives a reply for everything that the model
says after a user has spoken; one in which that never happens gives none, as there are in such sets.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mockengine.replies.chat_forms import UserMessage
from mockengine.replies.steered import MAX_INT32, MOST_TEXT_BYTES, MOST_TOOL_CALLS, expected, read_whole
from mockengine.replies.wish import ToolCall, Wish

_USERS: Final = frozenset({"user", "human"})
_MODELS: Final = frozenset({"assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"})
_ROLES: Final = ("role", "from")
_CONTENTS: Final = ("content", "value")
_CONVERSATIONS: Final = ("messages", "conversations", "conversation")
_COMPLETIONS: Final = ("completion", "response", "output")
_REASONINGS: Final = ("reasoning_content", "reasoning")
_LENGTH: Final = "output_tokens"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A reply of a data set.

    Attributes:
        asked: what it replies to.
        wish: the reply.

    """

    asked: UserMessage
    wish: Wish


def recorded(record: object) -> Iterator[Recorded]:
    """Yield the replies of a record.

    Raises:
        ValueError: it is none that is known, or a part of it is something else than it should be.

    """
    if not isinstance(record, dict):
        raise expected(record, "a record, which is an object,")
    length = None if record.get(_LENGTH) is None else _read_length(record[_LENGTH])
    for name in _CONVERSATIONS:
        if name in record:
            yield from _conversation(_list(record[name], name), length)
            return
    if "prompt" not in record:
        known = ", ".join((*_CONVERSATIONS[:2], "prompt"))
        raise ValueError(f"a record with none of {known}")
    prompt, reply = record["prompt"], _first(record, _COMPLETIONS)
    if isinstance(prompt, list):
        yield from _conversation([*prompt, *_list(reply or [], "completion")], length)
        return
    text = None if reply is None else _said(reply)
    if text is not None or length is not None:
        yield Recorded(UserMessage(_text(prompt)), Wish(text=text, output_tokens=length))


def _conversation(messages: Sequence[object], length: int | None) -> Iterator[Recorded]:
    """Yield the replies of a conversation, all of one length where the record has one."""
    user: str | None = None
    turns = 0
    for message in messages:
        if not isinstance(message, dict):
            raise expected(message, "a message, which is an object,")
        role = _first(message, _ROLES)
        if not isinstance(role, str):
            raise expected(role, "a role, which is a text,")
        if role in _USERS:
            user, turns = _text(_first(message, _CONTENTS)), 0
        elif role in _MODELS:
            wish = _reply(message, length)
            if user is not None and wish.says_something:
                yield Recorded(UserMessage(user, turns), wish)
            turns += 1


def _reply(message: Mapping[str, object], length: int | None) -> Wish:
    content, reasoning = _first(message, _CONTENTS), _first(message, _REASONINGS)
    calls = [_tool_call(call) for call in _list(message.get("tool_calls") or [], "tool_calls")]
    if len(calls) > MOST_TOOL_CALLS:
        raise ValueError(f"{len(calls)} tool calls where at most {MOST_TOOL_CALLS} are allowed")
    return Wish(
        text=None if content is None else _said(content),
        reasoning=None if not reasoning else _said(reasoning),
        tool_calls=calls or None,
        output_tokens=length,
    )


def _tool_call(call: object) -> ToolCall:
    function: Any = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise expected(call, "a tool call, which is an object with a function that has a name,")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return ToolCall(_checked(name), _checked(arguments))
    if not isinstance(arguments, dict | None):
        raise expected(arguments, "arguments of a tool call, which are a text or an object,")
    _checked(json.dumps(arguments))
    return ToolCall(_checked(name), arguments or {})


def _text(content: object) -> str:
    """Return a text that may be in parts, of which others than texts do not count."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise expected(content, "a text, or a list of its parts,")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise expected(part, "a part of the content, which is an object or a text,")
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "\n".join(texts)


def _said(content: object) -> str:
    return _checked(_text(content))


def _checked(text: str) -> str:
    """Return a text that can be said: half of a character that takes two has become a question mark."""
    data = text.encode("utf-8", "replace")
    if len(data) > MOST_TEXT_BYTES:
        raise ValueError(f"a text of {len(data)} bytes where at most {MOST_TEXT_BYTES} are allowed")
    return data.decode()


def _read_length(value: object) -> int:
    try:
        return read_whole(1, MAX_INT32)(value)
    except ValueError as error:
        raise ValueError(f"{_LENGTH}: {error}") from None


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise expected(value, f"{name}, a list,")
    return value


def _first(found: Mapping[str, object], names: Sequence[str]) -> object:
    """Return the first of these values that is there."""
    return next((found[name] for name in names if found.get(name) is not None), None)
