# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the answer to a utility call (protocol section 6)."""

from typing import Any, Literal

from pydantic import Field

from mockengine.faults.edits import UTILITY, CallEdit, SaidEnvelope
from mockengine.faults.fault import CallFault
from mockengine.wire.codec import pack


class NoReply(CallFault):
    """The call is done and never answered.

    An engine that hangs in a collective operation, an answer that was lost.
    """

    fault: Literal["no_reply"] = "no_reply"

    def edit(self, call_id: int) -> CallEdit:
        """Return what takes the answer away."""
        return _Silence(call_id)


class _Silence(CallEdit):
    def answer(self, envelope: SaidEnvelope, reply: list[Any]) -> None:  # noqa: ARG002 - whatever it says
        envelope.items[UTILITY] = None


class RepeatedReply(CallFault):
    """The call is answered twice.

    A message that was sent again after a connection broke.
    """

    fault: Literal["repeated_reply"] = "repeated_reply"

    def edit(self, call_id: int) -> CallEdit:
        """Return what repeats the answer."""
        return _Echo(call_id)


class _Echo(CallEdit):
    def answer(self, envelope: SaidEnvelope, reply: list[Any]) -> None:  # noqa: ARG002 - whatever it says
        envelope.besides.append([pack(envelope.items)])


class FailedReply(CallFault):
    """The call fails.

    A worker that raised an exception, as when weights cannot be loaded.
    """

    fault: Literal["failed_reply"] = "failed_reply"
    message: str = Field(
        default="the engine failed on purpose", min_length=1, max_length=1_000, description="What the failure says."
    )

    def edit(self, call_id: int) -> CallEdit:
        """Return what makes the answer a failure."""
        return _Failure(call_id, self.message)


class _Failure(CallEdit):
    def __init__(self, call_id: int, message: str) -> None:
        super().__init__(call_id)
        self._message = message

    def answer(self, envelope: SaidEnvelope, reply: list[Any]) -> None:  # noqa: ARG002 - whatever it says
        reply[1:] = [self._message, None]
