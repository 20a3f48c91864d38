# SPDX-License-Identifier: Apache-2.0
"""How lengths of replies are written in settings: `output_length` and `reasoning_length`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FORMS: Final = (
    "max_tokens, a number of tokens, uniform:LEAST:MOST, normal:MEAN:STDDEV, lognormal:MEAN:STDDEV or histogram:FILE"
)
REASONING_FORMS: Final = FORMS.replace("max_tokens", "none")
MOST: Final = 2**31 - 1
"""The longest reply, in tokens."""

_NUMBER: Final = r"([0-9]{1,10}(?:\.[0-9]{1,6})?)"
_DISTRIBUTIONS: Final = ("uniform", "normal", "lognormal")


class LengthError(ValueError):
    """A form of lengths that cannot be; the text says why."""


@dataclass(frozen=True, slots=True)
class OutputLength:
    """A form of lengths.

    Attributes:
        name: fixed, uniform, normal, lognormal or histogram.
        first: the length, the least or the mean, in tokens.
        second: the most or the standard deviation.
        file: of the histogram.

    """

    name: str
    first: float = 0.0
    second: float = 0.0
    file: str = ""


def read_output_length(text: str) -> OutputLength | None:
    """Read the setting's value; None is for `max_tokens`: as long as the client allows.

    Raises:
        LengthError: none of `FORMS`, or figures that make no sense.

    """
    if text == "max_tokens":
        return None
    if re.fullmatch("[0-9]{1,10}", text):
        return OutputLength("fixed", within(float(text)))
    name, _, rest = text.partition(":")
    if name == "histogram" and rest:
        return OutputLength(name, file=rest)
    match = re.fullmatch(f"{_NUMBER}:{_NUMBER}", rest)
    if match is None or name not in _DISTRIBUTIONS:
        raise LengthError(f"it is none of {FORMS}")
    first, second = float(match[1]), float(match[2])
    within(first)
    if name == "uniform" and within(second) < first:
        raise LengthError(f"the least length, {first:g}, is above the most, {second:g}")
    return OutputLength(name, first, second)


def read_reasoning_length(text: str) -> OutputLength | None:
    """Read how many tokens reasoning has; None is for `none` and 0.

    Raises:
        LengthError: none of `REASONING_FORMS`, or figures that make no sense.

    """
    if text in ("none", "0"):
        return None
    if text == "max_tokens":
        raise LengthError(f"it is none of {REASONING_FORMS}")
    return read_output_length(text)


def read_histogram(path: Path) -> tuple[list[int], list[float]]:
    """Read lengths, one on each line, and their weights, which are 1 where a line has none; # begins a comment.

    Raises:
        LengthError: the file cannot be read, or a line is something else, or nothing has a weight.

    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise LengthError(f"{path}: {reason} (give a file with a length and perhaps a weight on each line)") from error
    lengths: list[int] = []
    weights: list[float] = []
    for number, line in enumerate(lines, 1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = re.fullmatch(rf"([0-9]{{1,10}})(?:[\s,;]+{_NUMBER})?", said)
        if match is None:
            raise LengthError(f"{path}, line {number}: {said[:40]!r} is neither a length nor a length and a weight")
        lengths.append(within(float(match[1])))
        weights.append(float(match[2] or 1))
    if not sum(weights):
        raise LengthError(f"{path} has no length with a weight above 0")
    return lengths, weights


def within(length: float) -> int:
    """Return a length as a number of tokens; raises `LengthError` unless it is one of 1 … `MOST`."""
    if not 1 <= length <= MOST:
        raise LengthError(f"a length of {length:g} is not within 1 and {MOST} tokens")
    return round(length)
