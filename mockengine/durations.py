# SPDX-License-Identifier: Apache-2.0
"""Durations as people write them: `20ms`, `1.5s`, or a bare number of milliseconds.

This module knows units and nothing of what a duration is for.
"""

import re
from typing import Final

ALLOWED_DURATIONS: Final = "a duration from 0 to 1h, such as 250us, 20ms, 1.5s or 2m; a bare number is milliseconds"
"""The words that tell a person what a duration may look like."""

_MS_PER_UNIT: Final = {
    "ns": 1e-6,
    "us": 1e-3,
    "\N{MICRO SIGN}s": 1e-3,
    "\N{GREEK SMALL LETTER MU}s": 1e-3,
    "ms": 1.0,
    "s": 1e3,
    "m": 60e3,
    "h": 3_600e3,
}
_FORM: Final = re.compile(
    r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\s*(?P<unit>[a-zA-Z\u00b5\u03bc]*)", re.ASCII
)
LONGEST_MS: Final = 3_600_000
"""The longest duration that a setting takes."""
_SHOWN_CHARACTERS: Final = 60


class DurationError(ValueError):
    """What was given is no duration; the text names it and the allowed forms."""


def duration_ms(value: object) -> float:
    """Return the milliseconds of a duration: a number of them, or text with a unit (ns, us, ms, s, m, h) or without.

    Raises `DurationError` for anything else, and for what is negative, longer than an hour or no number.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        milliseconds = float(value)
    else:
        match = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
        unit = match["unit"] or "ms" if match else ""
        if match is None or unit not in _MS_PER_UNIT:
            raise DurationError(f"{_shown(value)} is not a duration (use {ALLOWED_DURATIONS})")
        milliseconds = float(match["number"]) * _MS_PER_UNIT[unit]
    # As a condition that holds, so that NaN, which compares with nothing, is refused too.
    if not 0 <= milliseconds <= LONGEST_MS:
        raise DurationError(f"{_shown(value)} is out of range (use {ALLOWED_DURATIONS})")
    return milliseconds


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
