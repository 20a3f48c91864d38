# SPDX-License-Identifier: Apache-2.0
"""A client steers its request: keys of `vllm_xargs` that begin with `mock`, which frontends pass on as `extra_args`.

Each key is there by itself, as `mock_text`, and in one object that may be JSON, as `text` in `mock`: the Python
frontend passes nothing that is nested. All that is wrong is said at once. `docs/replies.md` has both tables.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.reply_keys import (
    CALLS_ARE_MADE,
    HOW_IT_IS_SAID,
    SAID_INSTEAD,
    WHERE_IT_ENDS,
    Key,
    Readers,
    common_readers,
    contradictions,
    wish_of,
)
from mockengine.replies.steered import (
    error_of,
    listed,
    read_bool,
    read_error,
    read_object,
    read_text,
    read_tool_calls,
)
from mockengine.replies.wish import Wish

CARRIER: Final = "mock"
PREFIX: Final = "mock_"

KEYS: Final = (
    Key("text", "a text", "is said; takes `tokenizer`, and added tokens are named in it"),
    Key("token_ids", "a list of token ids, or JSON of one", SAID_INSTEAD),
    Key("reasoning", "a text", "is said before the text, between the marks of reasoning"),
    Key("tool_calls", "a list of objects with `name` and `arguments`, or JSON of one", CALLS_ARE_MADE),
    *WHERE_IT_ENDS,
    Key(
        "error",
        "an object of `code`, `message` and `retryable`, or JSON of one",
        "it ends with error, at once unless anything else is asked for, and this is what the client is told",
    ),
    Key("error_code", "a text", "part of that: `validation_error` is status 400, others are 500"),
    Key("error_message", "a text", "part of that"),
    Key("error_retryable", "true or false", "part of that: true is status 503, whatever the code"),
    *HOW_IT_IS_SAID,
)
_NAMES: Final = tuple(key.name for key in KEYS)
_SAYING: Final = frozenset({"text", "token_ids", "reasoning", "tool_calls"})
_ERROR_PARTS: Final = {"error_code": "code", "error_message": "message", "error_retryable": "retryable"}
_ALLOWED: Final = ", ".join((CARRIER, *(PREFIX + name for name in _NAMES)))


class Steering:
    """Wants what clients ask for by `mock` keys."""

    def __init__(self, vocab_size: int, *, is_on: bool = True) -> None:
        """Take token ids below `vocab_size`; where it is not on, whoever asks for anything is refused."""
        self._is_on = is_on
        self._readers: Readers = {
            **common_readers(vocab_size),
            "tool_calls": read_tool_calls,
            "error": read_error,
            "error_code": read_text,
            "error_message": read_text,
            "error_retryable": read_bool,
        }

    def wish_for(self, asked: Asked) -> Wish | None:
        """Return what a request asks for, or None.

        Raises:
            ReplyError: what it asks for cannot be given, or nobody may ask.

        """
        extra_args = asked.params.extra_args
        ours = {key: value for key, value in extra_args.items() if key.startswith(CARRIER)} if extra_args else None
        if not ours:
            return None
        if not self._is_on:
            raise ReplyError(
                f"vllm_xargs: {listed(list(ours))}: clients do not steer this engine (steering is off; leave out "
                f"whatever begins with {CARRIER})"
            )
        problems: list[str] = []
        values = self._read(ours, problems)
        problems += _contradictions(values)
        if problems:
            raise ReplyError(f"vllm_xargs: {'; '.join(problems)}")
        return _wish_of(values)

    def _read(self, given: Mapping[str, object], problems: list[str]) -> dict[str, Any]:
        """Return the values that are in order, by name, and add to the problems what is wrong with others."""
        values: dict[str, Any] = {}
        unknown: list[str] = []
        for place, name, value in _places(given, problems):
            if name not in self._readers:
                unknown.append(place)
            elif value is None:
                continue
            elif name in values:
                problems.append(f"{place}: it is in {PREFIX}{name} already")
            else:
                try:
                    values[name] = self._readers[name](value)
                except ValueError as error:
                    problems.append(f"{place}: {error}")
        if unknown:
            problems.append(f"{listed(unknown)}: unknown (allowed are {_ALLOWED})")
        return values


def _places(given: Mapping[str, object], problems: list[str]) -> Iterator[tuple[str, str, object]]:
    """Yield what a client gives, those first that are keys by themselves: where, under which name, and the value."""
    for key, value in given.items():
        if key != CARRIER:
            yield key, key.removeprefix(PREFIX), value
    carried = given.get(CARRIER)
    if carried is None:
        return
    try:
        items = read_object(carried, "what may be asked for").items()
    except ValueError as error:
        problems.append(f"{CARRIER}: {error}")
        return
    for name, value in items:
        yield f"{CARRIER}.{name}", name, value


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what cannot be at once."""
    for names, problem in contradictions(values, values, PREFIX):
        yield f"{listed([PREFIX + name for name in names])}: {problem}"
    parts = [PREFIX + name for name in values if name in _ERROR_PARTS]
    if parts and "error" in values:
        yield f"{listed(parts)}: {PREFIX}error says it all"


def _wish_of(values: Mapping[str, Any]) -> Wish:
    """Return the wish for what a client asks for."""
    parts = {part: values[name] for name, part in _ERROR_PARTS.items() if name in values}
    whole = {**values, "error": error_of(**parts)} if parts else values
    return wish_of(whole, says_something=not whole.keys().isdisjoint(_SAYING))
