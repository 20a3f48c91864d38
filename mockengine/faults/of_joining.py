# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while an engine joins a frontend (protocol section 1). They strike when the frontend has answered."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from mockengine.faults.fault import JoinFault, Seconds
from mockengine.wire.codec import pack, unpack_plainly
from mockengine.wire.handshake import EngineStatus


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


class SpoiledJoin:
    """What an engine says wrongly during one join."""

    def __init__(self, faults: Sequence[JoinFault] = ()) -> None:
        """Do all of these; none is to join as one should."""
        self._faults = faults

    @property
    def delay_s(self) -> float:
        """How much later READY comes."""
        return sum(fault.delay_s for fault in self._faults if isinstance(fault, LateReady))

    @property
    def repeats_hello(self) -> bool:
        """Whether HELLO is said again."""
        return any(isinstance(fault, DuplicateHello) for fault in self._faults)

    def ready(self, status: EngineStatus) -> EngineStatus:
        """Return what is said instead of READY."""
        for fault in self._faults:
            if isinstance(fault, WrongReady):
                status = replace(status, status=fault.status)
        return status

    def introduction(self, ready_response: bytes) -> bytes:
        """Return what a rank says of itself instead of a ready response."""
        missing = {fault.field for fault in self._faults if isinstance(fault, MissingReadyField)}
        if not missing:
            return ready_response
        said = unpack_plainly(ready_response)
        return pack({name: value for name, value in said.items() if name not in missing})
