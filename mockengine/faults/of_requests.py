# SPDX-License-Identifier: Apache-2.0
"""What a request suffers: its messages are in order, and its client gets something else than it asked for."""

from math import inf
from typing import Annotated, Literal

from pydantic import Field

from mockengine.faults.fault import RequestFault, Seconds
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.wire.outputs import FinishReason, RequestError

_MOST_TEXT = 1_000
_After = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Error(RequestFault):
    """The request ends with `finish_reason` error, at once or after `after_tokens`.

    A step that ran out of memory, a kernel that failed, a request that the engine cannot serve.
    """

    fault: Literal["error"] = "error"
    code: str | None = Field(
        default=None,
        min_length=1,
        max_length=_MOST_TEXT,
        description="Code of the error; `validation_error` is status 400 with 0.33, others are 500.",
    )
    message: str = Field(default="the engine failed on purpose", max_length=_MOST_TEXT, description="What it says.")
    retryable: bool = Field(default=False, description="Whether another try may do better: status 503 with 0.33.")
    after_tokens: _After = Field(default=0, description="Tokens that are said before.")

    def wish(self) -> Wish:
        """Return an end with ERROR, with details if there are any."""
        details = RequestError(self.code or "server_error", self.message, self.retryable)
        is_plain = self.code is None and not self.retryable and not self.model_fields_set & {"message"}
        return _ending(FinishReason.ERROR, self.after_tokens, None if is_plain else details)


class Abort(RequestFault):
    """The request is aborted by the engine, at once or after `after_tokens`.

    An engine that shuts down, a pause with mode abort, a scheduler that gives a request up.
    """

    fault: Literal["abort"] = "abort"
    after_tokens: _After = Field(default=0, description="Tokens that are said before.")

    def wish(self) -> Wish:
        """Return an end with ABORT."""
        return _ending(FinishReason.ABORT, self.after_tokens, None)


class Hang(RequestFault):
    """The request never says anything, until its client goes away.

    A collective operation that waits for a worker that is gone, a request that a scheduler has lost.
    """

    fault: Literal["hang"] = "hang"

    def wish(self) -> Wish:
        """Return a first token that never comes."""
        return Wish(timing=OwnTiming(ttft_s=inf))


class Stall(RequestFault):
    """The reply stops in the middle, after `after_outputs`, for `for_s` or for ever.

    A preemption that takes long, blocks that are swapped out, a network between workers that drops packets.
    """

    fault: Literal["stall"] = "stall"
    after_outputs: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(default=1, description="Outputs before that.")
    for_s: Seconds | None = Field(default=None, description="How long; left out is for ever.")

    def wish(self) -> Wish:
        """Return a gap between two outputs."""
        return Wish(timing=OwnTiming(stalls_after=self.after_outputs, stall_s=self.for_s))


class Slow(RequestFault):
    """The request takes `factor` times as long as it would, from its first token on to its last.

    A GPU that throttles, a neighbour on the same machine, a long context beside a short one.
    """

    fault: Literal["slow"] = "slow"
    factor: Annotated[float, Field(ge=1, le=10_000)] = Field(
        default=10.0, description="By how much; 0 ms, as in an engine without timing, stay 0."
    )

    def wish(self) -> Wish:
        """Return times that are stretched."""
        return Wish(timing=OwnTiming(stretch=self.factor))


def _ending(reason: FinishReason, after_tokens: int, error: RequestError | None) -> Wish:
    if after_tokens:
        return Wish(finish_reason=reason, output_tokens=after_tokens, error=error)
    return Wish(finish_reason=reason, token_ids=(), error=error)
