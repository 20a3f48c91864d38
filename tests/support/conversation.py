# SPDX-License-Identifier: Apache-2.0
"""A frontend double and engines without a mind of their own that have joined it, and short ways to say things."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from mockengine.testing.double import FrontendDouble
from mockengine.wire.logprobs import LogprobsLists
from mockengine.wire.outputs import EngineCoreEvent, EngineCoreOutput, EventType, FinishReason, StepOutputs
from mockengine.wire.stats import PrefillStats, SchedulerStats
from mockengine.wire.tensors import Tensor
from tests.support.bare_engine import COORDINATOR, BareEngine

QUEUED, SCHEDULED, PREEMPTED = EventType
STOP, LENGTH, ABORT, ERROR, _ = FinishReason
POOLING: Final[dict[str, Any]] = {"sampling_params": None, "pooling_params": [True, None, None, None, "embed"]}
EMBEDDING: Final = Tensor("float32", (1,), b"\0" * 4)
BUSY: Final = SchedulerStats(num_running_reqs=1)
IDLE: Final = SchedulerStats()


def event(kind: EventType, timestamp: float) -> EngineCoreEvent:
    return EngineCoreEvent(kind, timestamp)


def more(request_id: str = "r1", tokens: Sequence[int] = (7,), **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=tokens, **fields)


def first(request_id: str = "r1", tokens: Sequence[int] = (7,), **fields: Any) -> EngineCoreOutput:
    """Make the first output of a request as `FrontendDouble.add` makes them."""
    usual = {"events": (event(QUEUED, 0.5), event(SCHEDULED, 0.6)), "prefill_stats": PrefillStats(3, 3)}
    return more(request_id, tokens, **{**usual, **fields})


def step(at: float, *outputs: EngineCoreOutput, rank: int = 0, **fields: Any) -> StepOutputs:
    return StepOutputs(engine_index=rank, timestamp=at, outputs=outputs, **fields)


def scores(rows: int, *, as_tensors: bool = False) -> LogprobsLists:
    """Make scores with one alternative each."""
    ids, logprobs = ("int32", "float32") if as_tensors else ("<i4", "<f4")
    return LogprobsLists(
        Tensor(ids, (rows, 2), bytes(8 * rows)),
        Tensor(logprobs, (rows, 2), bytes(8 * rows)),
        Tensor(ids, (rows,), bytes(4 * rows)),
    )


def call(frontend: FrontendDouble, **where: int) -> None:
    """Call without waiting for the answer."""
    with suppress(TimeoutError):
        frontend.call("is_sleeping", deadline_s=0, **where)


@contextmanager
def joined(**double: Any) -> Iterator[tuple[FrontendDouble, list[BareEngine]]]:
    """Yield a double of two ranks, two clients and a coordinator, and the engines, all of which have joined it."""
    with FrontendDouble(**{"ranks": 2, "clients": 2, "coordinator": True, **double}) as frontend, ExitStack() as stack:
        engines = [
            stack.enter_context(BareEngine(frontend.handshake_address, rank, frontend.line)) for rank in range(2)
        ]
        for engine in engines:
            engine.hello()
        frontend.greet()
        for engine in engines:
            engine.take_init()
            engine.introduce()
            engine.subscribe()
        frontend.subscribe()
        for engine in engines:
            engine.take_go_ahead()
            engine.ready(num_gpu_blocks=1, dp_stats_address=None)
        assert sorted(frontend.next_status()[0] for _ in engines) == [0, 1]
        frontend.take_ready_responses()
        yield frontend, engines


def listen(frontend: FrontendDouble, said: Sequence[int]) -> None:
    """Hear as many envelopes as were said, where they were said."""
    for to in said:
        if to == COORDINATOR:
            frontend.listen_as_coordinator()
        else:
            frontend.listen(to)
