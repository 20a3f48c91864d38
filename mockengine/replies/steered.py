# SPDX-License-Identifier: Apache-2.0
"""Values by which a client steers its request: what each of them may look like, and how it is read.

Frontends pass them on as they please: a bool may arrive as 0 or 1, a whole number as a float, and what is nested as a
text of JSON. Every reader raises `ValueError`, whose text says what is wrong with the value, for whatever else it gets.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from mockengine.replies.wish import ToolCall
from mockengine.wire.outputs import FinishReason, RequestError
from mockengine.wire.values import shown

MOST_TEXT_BYTES: Final = 2**18
"""Of a text in UTF-8: some tenths of a second of the tokenizer's work, in which nothing else goes on."""
MOST_JSON: Final = 2**20
"""Characters of anything nested."""
MOST_TOKENS: Final = 2**20
MOST_TOOL_CALLS: Final = 128
LONGEST_MS: Final = 3_600_000
"""As for durations that are settings."""
MAX_INT32: Final = 2**31 - 1
FINISH_REASONS: Final = {reason.name.lower(): reason for reason in FinishReason}

_DEPTH: Final = 64
_MOST_NAMES: Final = 20
_SHOWN_CHARACTERS: Final = 60


def expected(value: object, what: str) -> ValueError:
    """Return the error for a value where something else is expected."""
    return ValueError(f"{printable(shown(value))} where {what} is expected")


def printable(text: str) -> str:
    """Return a text of a client as it may stand in a message: short, and such as can be sent."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return short.encode("utf-8", "backslashreplace").decode()


def listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    some = ", ".join(printable(name) for name in names[:_MOST_NAMES])
    return some if len(names) <= _MOST_NAMES else f"{some} and {len(names) - _MOST_NAMES} more"


def read_text(value: object) -> str:
    """Read a text of at most `MOST_TEXT_BYTES`."""
    if not isinstance(value, str):
        raise expected(value, "a text")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError("a text with half a character (a lone surrogate) cannot be said") from None
    if num_bytes > MOST_TEXT_BYTES:
        raise ValueError(f"a text of {num_bytes} bytes where at most {MOST_TEXT_BYTES} are allowed")
    return value


def read_whole(least: int, most: int = MAX_INT32) -> Callable[[object], int]:
    """Return what reads a whole number within these."""

    def read(value: object) -> int:
        number = int(value) if type(value) is float and value.is_integer() else value
        if type(number) is not int or not least <= number <= most:
            raise expected(value, f"a whole number from {least} to {most}")
        return number

    return read


def read_ms(value: object) -> float:
    """Read a duration in milliseconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST_MS:
        return float(value)
    raise expected(value, f"a number from 0 to {LONGEST_MS}")


def read_bool(value: object) -> bool:
    """Read a bool, which may be 0 or 1."""
    if type(value) not in (bool, int, float) or value not in (0, 1):
        raise expected(value, "true or false")
    return bool(value)


def read_finish_reason(value: object) -> FinishReason:
    """Read the name of a finish reason."""
    reason = FINISH_REASONS.get(value) if isinstance(value, str) else None
    if reason is None:
        raise expected(value, f"one of {', '.join(FINISH_REASONS)}")
    return reason


def read_token_ids(vocab_size: int) -> Callable[[object], Sequence[int]]:
    """Return what reads a list of token ids below this number, or JSON of one."""
    read_id = read_whole(0, vocab_size - 1)

    def read(value: object) -> Sequence[int]:
        items = _list(value, "token ids", MOST_TOKENS)
        if set(map(type, items)) <= {int} and (not items or (min(items) >= 0 and max(items) < vocab_size)):
            return items
        return [read_id(item) for item in items]

    return read


def read_tool_calls(value: object) -> Sequence[ToolCall]:
    """Read a list of `{name, arguments}`, or JSON of one, that is no larger than a text."""
    calls = [_tool_call(item) for item in _list(value, "objects with name and arguments", MOST_TOOL_CALLS)]
    size = sum(len(call.name) + len(json.dumps(call.arguments)) for call in calls)
    if size > MOST_TEXT_BYTES:
        raise ValueError(f"tool calls of {size} bytes where at most {MOST_TEXT_BYTES} are allowed")
    return calls


def read_error(value: object, message: str | None = None) -> RequestError:
    """Read an error as an object of `code`, `message` and `retryable`, or JSON of one; each may be left out.

    Where the message is, it is `message`, or that the client asked for it.
    """
    found = read_object(value, "code, message and retryable")
    parts = {name: part for name, part in found.items() if part is not None}
    readers: Mapping[str, Callable[[object], Any]] = {"code": read_text, "message": read_text, "retryable": read_bool}
    for name in parts:
        if name not in readers:
            raise ValueError(f"{printable(name)} is unknown (allowed are {', '.join(readers)})")
    return error_of(**{"message": message} | {name: readers[name](part) for name, part in parts.items()})


def error_of(code: str | None = None, message: str | None = None, *, retryable: bool | None = None) -> RequestError:
    """Return an error, with what a client leaves out filled in."""
    return RequestError(code or "server_error", message or "the client asked for this error", retryable or False)


def read_object(value: object, of_what: str) -> Mapping[str, object]:
    """Read an object whose names are texts, or JSON of one."""
    found = _nested(value)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise expected(value, f"an object of {of_what}, or JSON of one,")
    return found


def _tool_call(item: object) -> ToolCall:
    fields: dict[object, object] = item if isinstance(item, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if fields.keys() - {"name", "arguments"} or not isinstance(name, str) or not name:
        raise expected(item, "an object with name, which is a text, and arguments, and nothing else,")
    if isinstance(arguments, str):
        return ToolCall(read_text(name), read_text(arguments))
    if not isinstance(arguments, dict):
        raise expected(arguments, "an object of arguments, or a text,")
    _check_json(arguments, _DEPTH)
    return ToolCall(read_text(name), arguments)


def _list(value: object, of_what: str, most: int) -> list[Any]:
    found = _nested(value)
    if not isinstance(found, list):
        raise expected(value, f"a list of {of_what}, or JSON of one,")
    if len(found) > most:
        raise ValueError(f"a list of {len(found)} where at most {most} are allowed")
    return found


def _nested(value: object) -> object:
    """Return what a text says in JSON, and other values as they are."""
    if not isinstance(value, str):
        return value
    if len(value) > MOST_JSON:
        raise ValueError(f"JSON of {len(value)} characters where at most {MOST_JSON} are allowed")
    try:
        found: object = json.loads(value, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{printable(shown(value))} is no JSON ({error})") from None
    return found


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _check_json(value: object, depth: int) -> None:
    """Refuse what JSON cannot say, and what is nested deeper than those who write it can go."""
    if not depth:
        raise ValueError(f"it is nested more than {_DEPTH} deep")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise expected(name, "a text for a name")
            _check_json(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, depth - 1)
    elif not isinstance(value, str | int | None) and not (isinstance(value, float) and isfinite(value)):
        raise expected(value, "what JSON can say")
