# SPDX-License-Identifier: Apache-2.0
"""How a utility call is answered that cannot be answered at once.

Its answer is a generator: it yields what has to happen next, is sent the time when that has happened, and returns the
result. So what a call does can be read from top to bottom, although the engine does other things meanwhile.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mockengine.engine.outgoing import Outbound


class UtilityError(Exception):
    """A call fails; the text goes to the frontend, which shows it."""


@dataclass(frozen=True, slots=True)
class UntilIdle:
    """Go on when nothing is left that may be stepped; until then the engine does what else there is to do."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Go on after so many seconds, in which the engine does nothing else: it neither steps nor takes anything in."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Say:
    """Send these first."""

    messages: Sequence[Outbound]


Await: TypeAlias = UntilIdle | Busy | Say
Answering: TypeAlias = Generator[Await, float, Any]
"""Yields what it waits for, is sent the time in engine seconds, returns the result and raises `UtilityError`."""
