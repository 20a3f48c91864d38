# SPDX-License-Identifier: Apache-2.0
"""What a rule of a script may have: the names, what each of them takes, and how one value is read.

A value is read as that of a client which asks for the same is (`steered`), so its limits are the same. Every reader
raises `ValueError`, whose text says what is wrong with the value, for whatever else it gets.
"""

import re
import warnings
from array import array
from functools import partial
from typing import Final

from mockengine.replies.reply_keys import (
    CALLS_ARE_MADE,
    HOW_IT_IS_SAID,
    SAID_INSTEAD,
    WHERE_IT_ENDS,
    Key,
    Readers,
    common_readers,
)
from mockengine.replies.steered import (
    MAX_INT32,
    expected,
    printable,
    read_error,
    read_text,
    read_token_ids,
    read_whole,
)
from mockengine.wire.values import UINT32_MAX

OF_TEXT: Final = frozenset(
    {
        *("prompt_contains", "prompt_regex", "last_message", "last_message_regex", "tool_rounds"),
        *("text", "template", "reasoning", "tool_calls"),
    }
)
"""What takes a tokenizer."""

_MOST_WEIGHT: Final = 1_000_000
_MESSAGE: Final = "the script asked for this error"

CONDITIONS: Final = (
    Key("prompt_contains", "a text", "is part of the prompt's text"),
    Key("prompt_regex", "a regex", "is found in the prompt's text"),
    Key("last_message", "a text", "is part of what the user said last"),
    Key("last_message_regex", "a regex", "is found in what the user said last"),
    Key("tool_rounds", f"a whole number from 0 to {MAX_INT32}", "how often the model has called tools since"),
    Key("token_prefix", "a list of token ids", "the prompt begins with them"),
    Key("token_ids", "a list of token ids", "they follow each other somewhere in the prompt"),
    Key("lora", "a text", "name of the adapter that the request is for"),
    Key("probability", "a number from 0 to 1", "share of the requests of which all the above holds"),
    Key("nth", f"a whole number from 1 to {MAX_INT32}, or a list of them", "which of those requests are meant"),
    Key("every", f"a whole number from 1 to {MAX_INT32}", "every how manyth of them is meant"),
)
REPLY: Final = (
    Key("text", "a text", "is said as it is, and added tokens are named in it"),
    Key("template", "a text", "is said with what the regexes have captured"),
    Key("token_ids", "a list of token ids", SAID_INSTEAD),
    Key("reasoning", "a template", "is said before the text, between the marks of reasoning"),
    Key("tool_calls", "a list of objects with `name` and `arguments`, whose texts are templates", CALLS_ARE_MADE),
    *WHERE_IT_ENDS,
    Key(
        "error",
        "an object of `code`, `message` and `retryable`",
        "it ends with error, at once unless anything is said before, and this is what the client is told",
    ),
    *HOW_IT_IS_SAID,
    Key(
        "weight",
        f"a number above 0 and up to {_MOST_WEIGHT}",
        "how often it is taken among `replies`, 1 where it is left out",
    ),
)


def condition_readers() -> Readers:
    """Return what reads the conditions of a rule."""
    return {
        "prompt_contains": _read_some_text,
        "prompt_regex": _read_regex,
        "last_message": _read_some_text,
        "last_message_regex": _read_regex,
        "tool_rounds": read_whole(0),
        "token_prefix": _read_some_tokens,
        "token_ids": _read_some_tokens,
        "lora": _read_some_text,
        "probability": _read_probability,
        "nth": _read_numbers,
        "every": read_whole(1),
    }


def reply_readers(vocab_size: int) -> Readers:
    """Return what reads the parts of a reply of token ids below this number, but for tool calls, which have parts."""
    return {
        **common_readers(vocab_size),
        "template": read_text,
        "error": partial(read_error, message=_MESSAGE),
        "weight": _read_weight,
    }


def _read_some_text(value: object) -> str:
    if not read_text(value):
        raise expected(value, "a text that is not empty")
    return str(value)


def _read_regex(value: object) -> re.Pattern[str]:
    text = _read_some_text(value)
    try:
        with warnings.catch_warnings():
            # What Python warns of will mean something else one day, or does not mean what it seems to.
            warnings.simplefilter("error")
            return re.compile(text)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{printable(text)!r} is no regex of Python's: {reason}") from None


def _read_some_tokens(value: object) -> bytes:
    tokens = read_token_ids(UINT32_MAX + 1)(value)
    if not tokens:
        raise expected(value, "a list of token ids that is not empty")
    return array("I", tokens).tobytes()


def _read_numbers(value: object) -> frozenset[int]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise expected(value, "a number, or a list of them,")
    return frozenset(map(read_whole(1), items))


def _read_probability(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise expected(value, "a number from 0 to 1")


def _read_weight(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_WEIGHT:
        return float(value)
    raise expected(value, f"a number above 0 and up to {_MOST_WEIGHT}")
