# SPDX-License-Identifier: Apache-2.0
"""What every fault is: a name, what happens, and what a real cause of it looks like.

The docstring of a class is its text in docs/faults.md: the first sentence says what happens, the rest what does so in a
real engine.
"""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mockengine.faults.edits import Edit
from mockengine.replies.wish import Wish

LONGEST_S = 86_400.0
"""A day, as for settings."""

Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


class Fault(BaseModel):
    """Something that goes wrong.

    Attributes:
        fault: its name, by which it is told from others.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    fault: str

    @classmethod
    def name(cls) -> str:
        """Return the name of the kind."""
        return str(cls.model_fields["fault"].default)


class RequestFault(Fault, ABC):
    """Something that a request suffers as an engine may do it by itself: its messages are in order."""

    @abstractmethod
    def wish(self) -> Wish:
        """Return what is wanted of the reply instead of what it would be."""


class OutputFault(Fault, ABC):
    """Something that is wrong with the messages about a request."""

    @abstractmethod
    def edit(self, request_id: str) -> Edit:
        """Return what does that to the messages of a request."""


class CallFault(Fault, ABC):
    """Something that is wrong with the answer to a utility call."""

    @abstractmethod
    def edit(self, call_id: int) -> Edit:
        """Return what does that to the answer to a call."""


class EngineFault(Fault):
    """Something that happens to the engine as a whole, or to a rank of it."""


class JoinFault(Fault):
    """Something that goes wrong while the engine joins a frontend."""
