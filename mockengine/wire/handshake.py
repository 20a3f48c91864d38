# SPDX-License-Identifier: Apache-2.0
"""The start-up messages: HELLO, INIT, READY and the ready response (protocol sections 1.3 to 1.5)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mockengine.wire.codec import WireError, pack, unpack
from mockengine.wire.values import integer, mapping, named, string, strings

IDENTITY_BYTES = 2
DTYPES = ("float16", "bfloat16", "float32")
"""What `dtype` of a ready response may be."""


def engine_identity(rank: int) -> bytes:
    """Return the ZMQ identity of a rank: its index as two bytes, little-endian."""
    return rank.to_bytes(IDENTITY_BYTES, "little")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """HELLO or READY. A mock is remote and headless: Python refuses anything else, Rust does not look.

    Attributes:
        status: `"HELLO"` or `"READY"`.
        extra: keys of READY only, such as `parallel_config_hash`.

    """

    status: str
    local: bool = False
    headless: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)

    def to_wire(self) -> bytes:
        """Return the message, one frame."""
        return pack({"status": self.status, "local": self.local, "headless": self.headless, **self.extra})


def read_status(frame: bytes) -> EngineStatus:
    """Read a HELLO or READY.

    Raises:
        WireError: no map, or without a status.

    """
    items = named(unpack(frame), "engine status")
    status = string(items.pop("status", None), "status")
    return EngineStatus(status, bool(items.pop("local", False)), bool(items.pop("headless", False)), items)


@dataclass(frozen=True, slots=True)
class Init:
    """Where a frontend's sockets are.

    Attributes:
        inputs: one address per client; the index is the client index.
        outputs: as many, in the same order.
        coordinator_input: where START_DP_WAVE comes from; both coordinator addresses are set or neither.
        coordinator_output: where counts and waves go.
        frontend_stats_publish_address: not for the engine, but echoed in the ready response.
        parallel_config: settings the frontend wants adopted; empty unless Python serves a mixture of experts with
            several ranks.

    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None
    parallel_config: Mapping[str, object] = field(default_factory=dict)

    @property
    def has_coordinator(self) -> bool:
        """Whether the frontend runs a data-parallel coordinator."""
        return self.coordinator_input is not None

    @property
    def coordinates_waves(self) -> bool:
        """Whether the coordinator runs waves, as for a mixture of experts.

        A Python frontend then sends a configuration; a Rust frontend runs a coordinator for nothing else, and is
        known by having no statistics to publish.
        """
        return self.has_coordinator and (bool(self.parallel_config) or self.frontend_stats_publish_address is None)

    @property
    def expected_data_parallel_size(self) -> int | None:
        """How many ranks the frontend counts on, where it says so."""
        size = self.parallel_config.get("data_parallel_size")
        return size if isinstance(size, int) else None

    def to_wire(self) -> bytes:
        """Return the message, one frame."""
        addresses = {
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "coordinator_input": self.coordinator_input,
            "coordinator_output": self.coordinator_output,
            "frontend_stats_publish_address": self.frontend_stats_publish_address,
        }
        return pack({"addresses": addresses, "parallel_config": dict(self.parallel_config)})


def read_init(frame: bytes) -> Init:
    """Read an INIT.

    Raises:
        WireError: not an INIT, or one whose addresses contradict each other.

    """
    items = mapping(unpack(frame), "INIT")
    addresses = mapping(items.get("addresses"), "addresses")
    config = items.get("parallel_config")
    init = Init(
        inputs=strings(addresses.get("inputs"), "addresses.inputs"),
        outputs=strings(addresses.get("outputs"), "addresses.outputs"),
        coordinator_input=_optional_string(addresses, "coordinator_input"),
        coordinator_output=_optional_string(addresses, "coordinator_output"),
        frontend_stats_publish_address=_optional_string(addresses, "frontend_stats_publish_address"),
        parallel_config={} if config is None else named(config, "parallel_config"),
    )
    if not init.inputs or len(init.inputs) != len(init.outputs):
        raise WireError(
            f"addresses: {len(init.inputs)} inputs and {len(init.outputs)} outputs where one of each per client "
            "is expected"
        )
    if (init.coordinator_input is None) != (init.coordinator_output is None):
        raise WireError("addresses: only one of the two coordinator addresses is set")
    return init


def _optional_string(addresses: dict[Any, Any], key: str) -> str | None:
    value = addresses.get(key)
    return None if value is None else string(value, f"addresses.{key}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyResponse:
    """What an engine tells each client of itself (EngineCoreReadyResponse); always all keys of 0.33.

    Rust 0.33 dies of a missing required key and ignores unknown ones, as does every older frontend, so the newest
    form serves all. Names and defaults are vLLM's.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool = False
    max_loras: int = 0
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: Mapping[str, object] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = True
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None

    def to_wire(self) -> bytes:
        """Return the message, one frame for each input socket.

        Raises:
            ValueError: what makes a Rust frontend exit: a dtype it does not know, or LoRA without any adapter or
                adapters without LoRA.

        """
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype} where one of {', '.join(DTYPES)} is expected")
        if self.supports_lora != (self.max_loras > 0):
            raise ValueError(f"max_loras: {self.max_loras} where supports_lora is {self.supports_lora}")
        return pack(asdict(self))


def read_ready_response(frame: bytes) -> dict[str, Any]:
    """Read a ready response as the map it is; frontends of different lines read different keys of it.

    Raises:
        WireError: no map of plain values by name, or a size that is no positive int.

    """
    items = named(unpack(frame), "ready response")
    for key in ("max_model_len", "num_gpu_blocks", "block_size"):
        integer(items.get(key), key, low=1)
    return items
