# SPDX-License-Identifier: Apache-2.0
"""Every way in which requests run, for what must hold in all of them; and what calls are answered."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Final

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.timing import TimingConfig
from mockengine.wire.outputs import Envelope, FinishReason, StepOutputs, UtilityReply
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig

ITL_S: Final = 0.01
"""Time from token to token in each of them, but for drafts."""
_ROOM: Final = replace(CONFIG, max_model_len=512)
_MOMENTS: Final = TimingConfig(timing="per_request", itl_ms=1e3 * ITL_S, ttft_ms=1e3 * ITL_S)
_STEPS: Final = TimingConfig(timing="step", step_base_ms=1e3 * ITL_S)
_BATCHING: Final = BatchingConfig(num_gpu_blocks=200)
RUNNERS: Final[dict[str, EngineConfig]] = {
    "free": replace(_ROOM, itl_s=ITL_S),
    "drafted": replace(_ROOM, itl_s=ITL_S, speculation=SpeculationConfig(acceptance_rates=(0.5, 0.5))),
    "moments": replace(_ROOM, timing=_MOMENTS),
    "moments, limited": replace(_ROOM, timing=_MOMENTS, batching=_BATCHING),
    "steps": replace(_ROOM, timing=_STEPS, batching=replace(_BATCHING, async_scheduling=False)),
    "steps, asynchronous": replace(_ROOM, timing=_STEPS, batching=_BATCHING),
}
WITH_CACHE: Final = ("moments, limited", "steps", "steps, asynchronous")

_NOBODY: Final = frozenset[int]()
_CALL_IDS: Final[Iterator[int]] = count(2**63)


def call(rig: Rig, method: str, *args: Any, rank: int = 0) -> int:
    """Call a method; return the id of the call."""
    call_id = next(_CALL_IDS)
    rig.receive(UtilityCall(0, call_id, method, args), rank=rank)
    return call_id


def is_answered(rig: Rig, call_id: int) -> bool:
    """Whether a call has its reply, of which there must not be two."""
    replies = [each for _, each in rig.heard if isinstance(each, UtilityReply) and each.call_id == call_id]
    assert len(replies) <= 1
    return bool(replies)


def reply(rig: Rig, call_id: int) -> UtilityReply:
    """Return the reply to a call."""
    assert is_answered(rig, call_id)
    return next(each for _, each in rig.heard if isinstance(each, UtilityReply) and each.call_id == call_id)


def answer(rig: Rig, method: str, *args: Any, rank: int = 0) -> Any:
    """Return the result of a call that is answered at once."""
    replied = reply(rig, call(rig, method, *args, rank=rank))
    assert replied.failure is None
    return replied.result


def failure(rig: Rig, method: str, *args: Any) -> str | None:
    """Return why a call fails that is answered at once."""
    return reply(rig, call(rig, method, *args)).failure


def is_due(rig: Rig) -> float | None:
    """Return when something is due next."""
    return rig.ranks.next_deadline(rig.now, _NOBODY)


def play(rig: Rig, seconds: float | None = None, most_turns: int = 20_000) -> None:
    """Let time pass from deadline to deadline, until nothing is due or for so long."""
    end = None if seconds is None else rig.now + seconds
    for _ in range(most_turns):
        due = is_due(rig)
        if due is None or (end is not None and due > end):
            rig.now = rig.now if end is None else end
            return
        rig.now = max(rig.now, due)
        rig._hear(rig.ranks.step(rig.now, _NOBODY))
    raise AssertionError(f"still stepping after {most_turns} turns")


def kind(envelope: Envelope) -> str:
    """Return what an envelope is about, in a word."""
    if isinstance(envelope, UtilityReply):
        return "reply"
    assert isinstance(envelope, StepOutputs)
    if not envelope.outputs:
        return "stats"
    return "aborts" if envelope.outputs[0].finish_reason is FinishReason.ABORT else "tokens"


def kinds(rig: Rig) -> list[str]:
    """Return what client 0 heard, in order, equals in a row counted once."""
    words = [kind(envelope) for envelope in rig.to(0)]
    return [word for index, word in enumerate(words) if index == 0 or words[index - 1] != word]
