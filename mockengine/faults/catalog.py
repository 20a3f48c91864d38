# SPDX-License-Identifier: Apache-2.0
"""All faults there are."""

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pydantic import BeforeValidator, Field

from mockengine.faults import of_calls, of_engine, of_joining, of_outputs, of_requests
from mockengine.faults.fault import Fault

RequestKind: TypeAlias = of_requests.Error | of_requests.Abort | of_requests.Hang | of_requests.Stall | of_requests.Slow
OutputKind: TypeAlias = (
    of_outputs.Drop
    | of_outputs.WrongCounts
    | of_outputs.DuplicateFinalOutput
    | of_outputs.UnknownId
    | of_outputs.UndecodableFrame
    | of_outputs.EnvelopeTooLong
    | of_outputs.OutputTooLong
    | of_outputs.MixedEnvelope
    | of_outputs.NegativeCounter
    | of_outputs.MissingStatsKey
)
CallKind: TypeAlias = of_calls.NoReply | of_calls.RepeatedReply | of_calls.FailedReply
EngineKind: TypeAlias = (
    of_engine.Crash
    | of_engine.Freeze
    | of_engine.FreezeRank
    | of_engine.StopReading
    | of_engine.Disconnect
    | of_engine.GrowMemory
    | of_engine.KvCacheFull
    | of_engine.StaleWave
)
JoinKind: TypeAlias = (
    of_joining.LateReady | of_joining.WrongReady | of_joining.MissingReadyField | of_joining.DuplicateHello
)
AnyKind: TypeAlias = RequestKind | OutputKind | CallKind | EngineKind | JoinKind

KINDS: Final[tuple[type[Fault], ...]] = AnyKind.__args__
"""Every fault, in the order of docs/faults.md."""
NAMES: Final = tuple(kind.name() for kind in KINDS)


def _named(value: object) -> object:
    """Let a name alone stand for a fault with nothing set."""
    return {"fault": value} if isinstance(value, str) else value


AnyFault: TypeAlias = Annotated[AnyKind, Field(discriminator="fault"), BeforeValidator(_named)]
"""One of them, told by its name."""


def texts_of(kind: type[Fault]) -> Mapping[str, str]:
    """Return what docs say of a fault: what happens, what does so in a real engine."""
    what, _, cause = (kind.__doc__ or "").partition("\n\n")
    return {"what": " ".join(what.split()), "cause": " ".join(cause.split())}
