# SPDX-License-Identifier: Apache-2.0
"""Keys that a client and a script have alike for a reply: what each takes, what goes with what, and the wish for it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias

from mockengine.replies.mishaps import ALLOWED, BY_NAME, HANG, read_mishap
from mockengine.replies.steered import (
    FINISH_REASONS,
    LONGEST_MS,
    MAX_INT32,
    listed,
    read_finish_reason,
    read_ms,
    read_text,
    read_token_ids,
    read_whole,
)
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.wire.outputs import FinishReason

Readers: TypeAlias = Mapping[str, Callable[[object], object]]
"""What reads a value, by its name."""

_MS: Final = 1e-3
_INSTEAD_OF_TOKENS: Final = ("text", "template", "reasoning", "tool_calls")
# How often a reply is taken among others says nothing of it.
_BESIDE_HANG: Final = frozenset({"fault", "weight"})
_WISHED: Final = frozenset(field.name for field in fields(Wish))


@dataclass(frozen=True, slots=True)
class Key:
    """Something that may be asked for.

    Attributes:
        name: of it.
        allowed: its values, in words.
        meaning: what is done, for the docs.

    """

    name: str
    allowed: str
    meaning: str


WHERE_IT_ENDS: Final = (
    Key(
        "output_tokens",
        f"a whole number from 1 to {MAX_INT32}",
        "length of the reply, its last token included; a shorter text goes on from its beginning",
    ),
    Key("finish_reason", ", ".join(FINISH_REASONS), "why it ends"),
)
HOW_IT_IS_SAID: Final = (
    Key("ttft_ms", f"a number from 0 to {LONGEST_MS}", "time from when it is scheduled to the first output"),
    Key("itl_ms", f"a number from 0 to {LONGEST_MS}", "time from one output to the next"),
    Key(
        "cached_tokens",
        f"a whole number from 0 to {MAX_INT32}",
        "tokens of the prompt that are said to have come out of the cache, all but one at most",
    ),
    Key("fault", ALLOWED, "what goes wrong"),
)
SAID_INSTEAD: Final = "are said instead of a text"
CALLS_ARE_MADE: Final = "are made after the text, in the form of the frontend's parser"


def common_readers(vocab_size: int) -> Readers:
    """Return what reads the values that look the same wherever they are asked for, with token ids below this number."""
    return {
        "text": read_text,
        "token_ids": read_token_ids(vocab_size),
        "reasoning": read_text,
        "output_tokens": read_whole(1),
        "finish_reason": read_finish_reason,
        "ttft_ms": read_ms,
        "itl_ms": read_ms,
        "cached_tokens": read_whole(0),
        "fault": read_mishap,
    }


def contradictions(
    given: Collection[str], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[list[str], str]]:
    """Yield what cannot be at once, since nothing that is asked for is ignored: the names of the keys, and why.

    Args:
        given: names of all that is asked for.
        values: those of them that are in order.
        prefix: what the names begin with where they are asked for.

    """
    mishap, _ = values.get("fault", (None, 0))
    others = [prefix + name for name in given if name not in _BESIDE_HANG]
    if mishap is HANG and others:
        yield ["fault"], f"hang says nothing, whatever {listed(others)} ask for"
        return
    instead = [prefix + name for name in _INSTEAD_OF_TOKENS if name in given]
    if "token_ids" in given and instead:
        yield ["token_ids"], f"they are said instead of {listed(instead)}"
    reason = values.get("finish_reason")
    forced = None if mishap is None else mishap.wish(1).finish_reason
    if reason is not None and forced not in (None, reason):
        yield ["fault"], f"{mishap.name} ends otherwise than {prefix}finish_reason: {reason.name.lower()}"
    errors = [name for name in given if name == "error" or name.startswith("error_")]
    if errors and not {forced, reason} <= {None, FinishReason.ERROR}:
        yield errors, "only a reply that ends with error has one"


def wish_of(values: Mapping[str, Any], *, says_something: bool) -> Wish:
    """Return the wish for what is asked for.

    Args:
        values: by the names of keys; those that have no part in a wish are left out.
        says_something: whether it is known what the reply says, and not only how.

    """
    error = values.get("error")
    mishap, number = values.get("fault", (None, 1))
    if mishap is None and error is not None and "finish_reason" not in values:
        mishap = BY_NAME["error"]
    wish = Wish() if mishap is None else mishap.wish(number)
    wish = replace(wish, **{name: value for name, value in values.items() if name in _WISHED})
    if error is not None:
        wish = replace(wish, finish_reason=FinishReason.ERROR)
    own = {f"{name}_s": _MS * values[f"{name}_ms"] for name in ("ttft", "itl") if f"{name}_ms" in values}
    if own:
        wish = replace(wish, timing=replace(wish.timing or OwnTiming(), **own))
    if mishap is not None and mishap.ends_at_once and not says_something and wish.output_tokens is None:
        wish = replace(wish, token_ids=())
    return wish
