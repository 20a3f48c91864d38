# SPDX-License-Identifier: Apache-2.0
"""What a rank is made of, as its configuration has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mockengine.engine.adapters import Adapters
from mockengine.engine.batching import BatchRunner
from mockengine.engine.config import EngineConfig
from mockengine.engine.control import Control
from mockengine.engine.dialect import Dialect
from mockengine.engine.drafted import DraftedRunner
from mockengine.engine.gate import Gate
from mockengine.engine.mm_cache import MmCache
from mockengine.engine.moments import MomentRunner
from mockengine.engine.outgoing import Outbound
from mockengine.engine.pausing import Pausing
from mockengine.engine.runner import FreeRunner, Runner
from mockengine.engine.scheduled import KvEventSink
from mockengine.engine.sleeping import Sleeping
from mockengine.engine.timing import RequestTiming
from mockengine.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one rank.

    Attributes:
        runner: runs its requests.
        adapters: which are loaded, where there may be any.
        pausing: whether requests go on.
        weights: what it is said to compute with.
        mm_cache: data of multimodal items that it is said to have.
        control: answers calls about all that.

    """

    runner: Runner
    adapters: Adapters | None
    pausing: Pausing
    weights: Weights
    mm_cache: MmCache
    control: Control


def make_parts(
    rank: int,
    config: EngineConfig,
    dialect: Dialect,
    kv_event_sink: KvEventSink | None,
    abort_running: Callable[[float], Sequence[Outbound]],
) -> Parts:
    """Return the parts of a rank.

    Args:
        rank: its index.
        config: what it plays.
        dialect: of the frontend.
        kv_event_sink: hears of what happens to blocks of the KV cache, where there is one.
        abort_running: ends every request at a time; returns what clients are told of that.

    """
    adapters = None if config.loras is None else Adapters(config.loras)
    runner = _make_runner(rank, config, kv_event_sink, adapters)
    pausing = Pausing(runner, abort_running, waits_for_others=config.has_waves)
    settings = config.control
    weights = Weights(rank, settings.world_size, settings.weight_transfer_backend, config.replies.seed)
    mm_cache = MmCache(config.mm_cache)
    control = Control(
        rank=rank,
        block_size=config.block_size,
        has_waves=config.has_waves,
        dialect=dialect,
        runner=runner,
        pausing=pausing,
        sleeping=Sleeping(pausing, runner, weights, sleep_s=settings.sleep_s, wake_up_s=settings.wake_up_s),
        weights=weights,
        supported_tasks=config.supported_tasks,
        mm_cache=mm_cache,
        adapters=adapters,
    )
    return Parts(runner, adapters, pausing, weights, mm_cache, control)


def _make_runner(
    rank: int, config: EngineConfig, kv_event_sink: KvEventSink | None, adapters: Adapters | None
) -> Runner:
    timing = config.timing_of(rank)
    if isinstance(timing, RequestTiming):
        return MomentRunner(rank, config, config.batching, timing, kv_event_sink, adapters)
    if config.batching is not None:
        return BatchRunner(rank, config, config.batching, timing, kv_event_sink, adapters)
    speculation = config.speculation
    runner = FreeRunner(config) if speculation is None else DraftedRunner(config, speculation)
    return Gate(runner, adapters, 0 if config.loras is None else config.loras.max_loras)
