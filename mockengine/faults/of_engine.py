# SPDX-License-Identifier: Apache-2.0
"""What happens to the engine as a whole, or to a rank of it. Who does it: `transport.calamities`, `engine.ranks`."""

from typing import Annotated, Literal

from pydantic import Field

from mockengine.faults.fault import EngineFault, Seconds


class Crash(EngineFault):
    """The process ends at once, with or without a last word to its frontend.

    With `notice`, an exception that the engine does not survive; without, the out-of-memory killer, a machine that is
    gone.
    """

    fault: Literal["crash"] = "crash"
    notice: bool = Field(default=True, description="Whether it says `ENGINE_CORE_DEAD` before.")
    exit_code: Annotated[int, Field(ge=0, le=255)] = Field(default=1, description="Code that it exits with.")


class ForAWhile(EngineFault):
    """A fault that is over after some time, or when its rule is removed."""

    for_s: Seconds | None = Field(default=None, description="How long; left out is until its rule is removed.")


class Freeze(ForAWhile):
    """Nothing goes on in the engine: it neither reads nor steps, and its own `/health` fails after a while.

    A GPU that does not answer, a process that is stopped, a lock that nobody lets go of.
    """

    fault: Literal["freeze"] = "freeze"


class FreezeRank(ForAWhile):
    """One rank neither reads nor steps, while others go on.

    A rank whose GPU hangs, and, in a mixture of experts, others that wait for it.
    """

    fault: Literal["freeze_rank"] = "freeze_rank"
    rank: Annotated[int, Field(ge=0, lt=2**16)] | None = Field(
        default=None, description="Which; left out is the one that the rule is about, or the first of the process."
    )


class StopReading(ForAWhile):
    """The engine goes on with what it has, and takes nothing in any more.

    An input thread that died: new requests hang, and those that run get to their end.
    """

    fault: Literal["stop_reading"] = "stop_reading"


class Disconnect(EngineFault):
    """All connections to the frontend break, and come back after `for_s`.

    A network that fails for a moment, a proxy that is restarted.
    """

    fault: Literal["disconnect"] = "disconnect"
    for_s: Seconds = Field(default=0.5, description="How long there is none.")


class GrowMemory(ForAWhile):
    """The process takes so much more memory.

    A leak, a cache without a limit: what a container's memory limit is there for.
    """

    fault: Literal["grow_memory"] = "grow_memory"
    megabytes: Annotated[int, Field(ge=1, le=1_048_576)] = Field(default=256, description="How much more, at once.")


class KvCacheFull(ForAWhile):
    """That share of the KV cache is taken by nobody, so that requests wait and are preempted; takes `load_model` vllm.

    Long contexts, blocks that other instances have not loaded yet, a leak of blocks.
    """

    fault: Literal["kv_cache_full"] = "kv_cache_full"
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Of all blocks, as far as they are free."
    )


class StaleWave(EngineFault):
    """The next wave that the coordinator hears of has the number before the right one; takes a mixture of experts.

    Ranks that disagree on whether all are idle.
    """

    fault: Literal["stale_wave"] = "stale_wave"
