# SPDX-License-Identifier: Apache-2.0
"""What an engine needs to know to run: a value that the service makes of the settings and of a frontend's INIT."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.mm_cache import MmCacheConfig
from mockengine.engine.timing import Timing, TimingConfig, make_timing
from mockengine.replies.planner import RepliesConfig

GENERATION_TASKS: Final = frozenset({"generate", "transcription", "realtime"})
"""Tasks that are answered with tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """Limits and cache of a rank, under the settings' names.

    Attributes:
        async_scheduling: whether a step is scheduled while the one before it is computed.

    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    num_gpu_blocks: int = 16_384
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """The instance's part in prefill/decode disaggregation.

    As in vLLM its role forbids nothing: whoever is asked loads blocks and keeps them.

    Attributes:
        is_producer: whether what a preempted request was about to say is computed again, so that no request ends
            without its blocks.
        is_consumer: whether blocks are free only when no step under way can write into them any more, since what is
            loaded into them is not ordered with steps.
        engine_id: names the instance towards others.
        side_channel_host, side_channel_port: where others are told to ask it for its blocks; rank r adds r to the port.
        transfer_s, transfer_s_per_token: what loading the blocks of a prompt takes, in seconds.
        hold_s: time from the end of a prefill until its blocks are loaded, in seconds.

    """

    engine_id: str
    is_producer: bool = True
    is_consumer: bool = True
    side_channel_host: str = "localhost"
    side_channel_port: int = 5_600
    transfer_s: float = 0.0
    transfer_s_per_token: float = 0.0
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Room for LoRA adapters.

    Attributes:
        max_loras: slots, which is how many different adapters those have at most who run at once.
        max_cpu_loras: how many are loaded at once, those in slots among them.
        load_s: what loading one takes, in seconds.
        is_there: tells whether there is an adapter at a path.

    """

    max_loras: int
    max_cpu_loras: int
    load_s: float = 0.0
    is_there: Callable[[str], bool] = lambda _path: True


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """What utility calls are about, besides requests.

    Attributes:
        world_size: workers of a rank.
        weight_transfer_backend: how a trainer may send other weights; None is not at all.
        sleep_s, wake_up_s: what falling asleep and waking up take, in seconds.

    """

    world_size: int = 1
    weight_transfer_backend: str | None = None
    sleep_s: float = 0.0
    wake_up_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's part of the settings, under the same names and with the same meaning.

    Attributes:
        replies: what is said, and how much of it.
        batching: scheduler and cache; without it whatever arrives runs at once.
        timing: how long steps take with `batching`.
        kv_transfer: with `batching`, how blocks are exchanged with other instances; without it they are not.
        itl_s: without it, time from one step to the next, in seconds; 0 is as soon as clients take the output.
        clients: number of API servers of the frontend.
        has_coordinator: whether the frontend runs a data-parallel coordinator.
        has_waves: whether it coordinates waves, as for a mixture of experts.
        mm_cache: what is remembered of images and the like.
        speculation: drafts of outputs, where there are any; then `output_token_chunk_size` is 1.
        supported_tasks: what may be asked of it, under vLLM's names.
        loras: room for adapters, where there may be any.
        control: what utility calls are about.

    """

    max_model_len: int
    block_size: int
    output_token_chunk_size: int
    replies: RepliesConfig
    data_parallel_size: int
    clients: int
    has_coordinator: bool
    has_waves: bool
    itl_s: float = 0.0
    batching: BatchingConfig | None = None
    kv_transfer: KvTransferConfig | None = None
    timing: TimingConfig = field(default_factory=lambda: TimingConfig(timing="instant"))
    mm_cache: MmCacheConfig = field(default_factory=MmCacheConfig)
    speculation: SpeculationConfig | None = None
    supported_tasks: tuple[str, ...] = ("generate",)
    loras: LoraConfig | None = None
    control: ControlConfig = field(default_factory=ControlConfig)

    @property
    def generates(self) -> bool:
        """Whether tokens may be asked of it."""
        return not GENERATION_TASKS.isdisjoint(self.supported_tasks)

    @property
    def num_spec_tokens(self) -> int:
        """Drafts of an output, or 0."""
        return 0 if self.speculation is None else self.speculation.num_spec_tokens

    @property
    def most_tokens_per_step(self) -> int:
        """Tokens that a decode computes at most."""
        return self.output_token_chunk_size + self.num_spec_tokens

    @property
    def reports_finished_requests(self) -> bool:
        """Whether frontends count on hearing of every finished and aborted id (protocol section 4.5)."""
        return self.has_coordinator or self.data_parallel_size > 1

    def timing_of(self, rank: int) -> Timing:
        """Return how long things take on a rank; raises `ValueError` where a duration of mean 0 has a spread."""
        most = 1 if self.batching is None else self.batching.max_num_seqs
        return make_timing(self.timing, max_num_seqs=most, seed=self.replies.seed, rank=rank)
