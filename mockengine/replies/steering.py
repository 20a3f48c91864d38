# SPDX-License-Identifier: Apache-2.0
"""A client steers its request: keys of `vllm_xargs` that begin with `mock`, which frontends pass on as `extra_args`.

Each key is there by itself, as `mock_text`, and in one object that may be JSON, as `text` in `mock`: the Python
frontend passes nothing that is nested. All that is wrong is said at once. `docs/replies.md` has both tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.mishaps import ALLOWED, BY_NAME, HANG, read_mishap
from mockengine.replies.steered import (
    FINISH_REASONS,
    LONGEST_MS,
    MAX_INT32,
    error_of,
    printable,
    read_bool,
    read_error,
    read_finish_reason,
    read_ms,
    read_object,
    read_text,
    read_token_ids,
    read_tool_calls,
    read_whole,
)
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.wire.outputs import FinishReason

CARRIER: Final = "mock"
PREFIX: Final = "mock_"
_MS: Final = 1e-3
_MOST_NAMES: Final = 20


@dataclass(frozen=True, slots=True)
class Key:
    """Something that a client may ask for.

    Attributes:
        name: without what it begins with.
        allowed: its values, in words.
        meaning: what is done, for the docs.

    """

    name: str
    allowed: str
    meaning: str


KEYS: Final = (
    Key("text", "a text", "is said; takes `tokenizer`, and added tokens are named in it"),
    Key("token_ids", "a list of token ids, or JSON of one", "are said instead of a text"),
    Key("reasoning", "a text", "is said before the text, between the marks of reasoning"),
    Key(
        "tool_calls",
        "a list of objects with `name` and `arguments`, or JSON of one",
        "are made after the text, in the form of the frontend's parser",
    ),
    Key(
        "output_tokens",
        f"a whole number from 1 to {MAX_INT32}",
        "length of the reply, its last token included; a shorter text goes on from its beginning",
    ),
    Key("finish_reason", ", ".join(FINISH_REASONS), "why it ends"),
    Key(
        "error",
        "an object of `code`, `message` and `retryable`, or JSON of one",
        "it ends with error, at once unless anything else is asked for, and this is what the client is told",
    ),
    Key("error_code", "a text", "part of that: `validation_error` is status 400, others are 500"),
    Key("error_message", "a text", "part of that"),
    Key("error_retryable", "true or false", "part of that: true is status 503, whatever the code"),
    Key("ttft_ms", f"a number from 0 to {LONGEST_MS}", "time from when it is scheduled to the first output"),
    Key("itl_ms", f"a number from 0 to {LONGEST_MS}", "time from one output to the next"),
    Key(
        "cached_tokens",
        f"a whole number from 0 to {MAX_INT32}",
        "tokens of the prompt that are said to have come out of the cache, all but one at most",
    ),
    Key(
        "fault",
        ALLOWED,
        "what goes wrong",
    ),
)
_NAMES: Final = tuple(key.name for key in KEYS)
_ALLOWED: Final = ", ".join((CARRIER, *(PREFIX + name for name in _NAMES)))


class Steering:
    """Wants what clients ask for by `mock` keys."""

    def __init__(self, vocab_size: int, *, is_on: bool = True) -> None:
        """Take token ids below `vocab_size`; where it is not on, whoever asks for anything is refused."""
        self._is_on = is_on
        self._readers: Mapping[str, Callable[[object], object]] = {
            "text": read_text,
            "token_ids": read_token_ids(vocab_size),
            "reasoning": read_text,
            "tool_calls": read_tool_calls,
            "output_tokens": read_whole(1),
            "finish_reason": read_finish_reason,
            "error": read_error,
            "error_code": read_text,
            "error_message": read_text,
            "error_retryable": read_bool,
            "ttft_ms": read_ms,
            "itl_ms": read_ms,
            "cached_tokens": read_whole(0),
            "fault": read_mishap,
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
                f"vllm_xargs: {_listed(list(ours))}: clients do not steer this engine (steering is off; leave out "
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
            problems.append(f"{_listed(unknown)}: unknown (allowed are {_ALLOWED})")
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
    """Yield what cannot be at once, since nothing that is asked for is ignored."""
    fault, _ = values.get("fault", (None, 0))
    others = [PREFIX + name for name in values if name != "fault"]
    if fault is HANG and others:
        yield f"{PREFIX}fault: hang says nothing, whatever {_listed(others)} ask for"
        return
    instead = [PREFIX + name for name in ("text", "reasoning", "tool_calls") if name in values]
    if "token_ids" in values and instead:
        yield f"{PREFIX}token_ids: they are said instead of {_listed(instead)}"
    reason = values.get("finish_reason")
    forced = None if fault is None else fault.wish(1).finish_reason
    if reason is not None and forced not in (None, reason):
        yield f"{PREFIX}fault: {fault.name} ends otherwise than {PREFIX}finish_reason: {reason.name.lower()}"
    parts = [PREFIX + name for name in values if name.startswith("error_")]
    if parts and "error" in values:
        yield f"{_listed(parts)}: {PREFIX}error says it all"
    ends = [each for each in (forced, reason) if each not in (None, FinishReason.ERROR)]
    if ends and (parts or "error" in values):
        yield f"{_listed(parts or [PREFIX + 'error'])}: only a reply that ends with error has one"


def _wish_of(values: Mapping[str, Any]) -> Wish:
    """Return the wish for what a client asks for."""
    parts = {name.removeprefix("error_"): value for name, value in values.items() if name.startswith("error_")}
    error = error_of(**parts) if parts else values.get("error")
    fault, number = values.get("fault", (None, 1))
    if fault is None and error is not None and "finish_reason" not in values:
        fault = BY_NAME["error"]
    wish = Wish() if fault is None else fault.wish(number)
    asked = {field.name for field in fields(Wish)} & values.keys()
    wish = replace(wish, **{name: values[name] for name in asked} | {"error": error})
    if error is not None:
        wish = replace(wish, finish_reason=FinishReason.ERROR)
    own = {f"{name}_s": _MS * values[f"{name}_ms"] for name in ("ttft", "itl") if f"{name}_ms" in values}
    if own:
        wish = replace(wish, timing=replace(wish.timing or OwnTiming(), **own))
    if fault is not None and fault.ends_at_once and not wish.says_something and wish.output_tokens is None:
        wish = replace(wish, token_ids=())
    return wish


def _listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    some = ", ".join(printable(name) for name in names[:_MOST_NAMES])
    return some if len(names) <= _MOST_NAMES else f"{some} and {len(names) - _MOST_NAMES} more"
