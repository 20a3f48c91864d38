# SPDX-License-Identifier: Apache-2.0
"""What a client or a script may have go wrong with one reply: some things by name, and whatever rules of faults say."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from mockengine.replies.steered import MAX_INT32, expected
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.wire.outputs import FinishReason

RULE_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""How rules of faults may be called."""

_RULE: Final = re.compile(RULE_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """Something that goes wrong with a reply.

    Attributes:
        name: what it is called, `name:N` if it takes a number.
        meaning: what happens, for the docs.
        wish: for it; a number that is left out is 1.
        takes_number: whether N may be given.
        ends_at_once: whether nothing is said of a reply of which it is not known what it says, nor how much.

    """

    name: str
    meaning: str
    wish: Callable[[int], Wish]
    takes_number: bool = False
    ends_at_once: bool = False


MISHAPS: Final = (
    Mishap(
        name="hang",
        meaning="nothing is ever said, until the client goes away; goes with no other key",
        wish=lambda _: Wish(timing=OwnTiming(ttft_s=inf)),
    ),
    Mishap(
        name="stall",
        meaning="nothing more is said after N outputs, or after the first one, until the client goes away",
        wish=lambda number: Wish(timing=OwnTiming(stalls_after=number)),
        takes_number=True,
    ),
    Mishap(
        name="error",
        meaning="it fails, at once or after the text or the tokens that are asked for",
        wish=lambda _: Wish(finish_reason=FinishReason.ERROR),
        ends_at_once=True,
    ),
    Mishap(
        name="abort",
        meaning="it is aborted, at once or after the text or the tokens that are asked for",
        wish=lambda _: Wish(finish_reason=FinishReason.ABORT),
        ends_at_once=True,
    ),
)
BY_NAME: Final = {mishap.name: mishap for mishap in MISHAPS}
HANG: Final = BY_NAME["hang"]
ALLOWED: Final = ", ".join(
    [
        *(f"{each.name}, {each.name}:N" if each.takes_number else each.name for each in MISHAPS),
        "name of a rule of `faults`",
    ]
)


def read_mishap(value: object) -> tuple[Mishap, int]:
    """Read the name of a mishap, and perhaps its number; any other name is that of a rule, which may exist or not.

    Raises:
        ValueError: it is no name, or has a number that it does not take.

    """
    name, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    mishap = BY_NAME.get(name)
    is_number = number.isascii() and number.isdecimal() and len(number) < len(str(MAX_INT32)) and int(number) > 0
    if mishap is None and not colon and _RULE.fullmatch(name):
        return Mishap(name=name, meaning="", wish=lambda _: Wish(rule=name)), 1
    if mishap is None or (colon and not (mishap.takes_number and is_number)):
        raise expected(value, f"one of {ALLOWED}")
    return mishap, int(number or 1)
