# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while an engine joins a frontend (protocol section 1). They strike when a join begins."""

from typing import Literal

from pydantic import Field

from mockengine.faults.fault import JoinFault, Seconds


class LateReady(JoinFault):
    """READY comes `delay_s` later.

    Weights that load slowly, graphs that are captured, a cold cache of compiled kernels.
    """

    fault: Literal["late_ready"] = "late_ready"
    delay_s: Seconds = Field(default=30.0, description="How much later.")


class WrongReady(JoinFault):
    """What should be READY has another status.

    An engine of a release that starts in another way.
    """

    fault: Literal["wrong_ready"] = "wrong_ready"
    status: str = Field(default="STEADY", min_length=1, max_length=100, description="The status that it has.")


class MissingReadyField(JoinFault):
    """What the engine says of itself lacks a field.

    An engine of an earlier release than its frontend.
    """

    fault: Literal["missing_ready_field"] = "missing_ready_field"
    field: str = Field(default="max_model_len", min_length=1, max_length=100, description="The field that is left out.")


class DuplicateHello(JoinFault):
    """HELLO is said twice.

    Two engines of the same rank, or one that was restarted while its frontend starts.
    """

    fault: Literal["duplicate_hello"] = "duplicate_hello"
