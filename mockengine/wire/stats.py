# SPDX-License-Identifier: Apache-2.0
"""What an engine counts: scheduler statistics, prefix-cache statistics, prefill statistics (protocol 4.4 and 5).

Always full maps: a Rust frontend dies of a missing key, and every frontend of a negative count.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final

from mockengine.wire.codec import WireError
from mockengine.wire.record import keyword_record, record
from mockengine.wire.values import boolean, integer, integers, mapping, number


@record
class PrefillStats:
    """How a request's prompt was computed, in tokens; `num_prompt_tokens` = computed + cached.

    `num_cached_tokens` = local + external; `num_cache_creation_tokens` are those newly written to the prefix cache.
    """

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0

    def with_cached_tokens(self, count: int) -> "PrefillStats":
        """Return what these would be if so many tokens of the prompt had been cached, at most all of them."""
        external = min(self.num_external_cached_tokens, count)
        in_cache_now = self.num_cached_tokens + self.num_cache_creation_tokens
        return PrefillStats(
            self.num_prompt_tokens,
            self.num_prompt_tokens - count,
            num_cached_tokens=count,
            num_local_cached_tokens=count - external,
            num_external_cached_tokens=external,
            num_cache_creation_tokens=max(0, in_cache_now - count),
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the map; raises ValueError on a negative count."""
        return _not_negative(_shallow(self))


@record
class PrefixCacheStats:
    """Prefix-cache queries and hits in tokens since the previous statistics, not totals."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def with_lookup(self, queries: int, hits: int, *, is_resumed: bool) -> "PrefixCacheStats":
        """Return these with one request more, which was looked up anew if it is resumed after a preemption."""
        fresh, resumed = (0, 1) if is_resumed else (1, 0)
        # dataclasses.replace takes twice as long, once per request.
        return PrefixCacheStats(
            self.reset,
            self.requests + fresh,
            self.queries + fresh * queries,
            self.hits + fresh * hits,
            self.preempted_requests + resumed,
            self.preempted_queries + resumed * queries,
            self.preempted_hits + resumed * hits,
        )

    def to_wire(self, source: str | None = None) -> dict[str, Any]:
        """Return the map; raises ValueError on a negative count.

        Args:
            source: what `hits_by_source` says of the hits; None is nothing, as a real engine says of its own cache.

        """
        by_source = {source: self.hits} if source is not None and self.hits else {}
        return _not_negative(_shallow(self)) | {"hits_by_source": by_source}


@dataclass(frozen=True, slots=True)
class KvFetchStages:
    """How many waiting requests are how far with loading what another instance has computed."""

    waiting_to_start: int = 0
    in_progress: int = 0
    completed_waiting: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return the map; raises ValueError on a negative count."""
        return _not_negative(_shallow(self))


_NO_FETCHES: Final = KvFetchStages()
_FROM_OTHER_INSTANCES: Final = "p2p"


@keyword_record
class SpecDecodingStats:
    """Drafts of speculative decoding since the previous statistics, not totals.

    Attributes:
        num_spec_tokens: most drafts of an output, and the length of both tuples.
        num_drafts: outputs that had drafts.
        num_draft_tokens: their drafts.
        num_accepted_tokens: those of them that were accepted.
        num_accepted_tokens_per_pos: the accepted ones by their place among the drafts of an output.
        num_draft_tokens_per_pos: all of them, likewise.

    """

    num_spec_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_draft_tokens_per_pos: tuple[int, ...]

    def to_wire(self) -> dict[str, Any]:
        """Return the map; raises ValueError on a negative count."""
        for name in ("num_accepted_tokens_per_pos", "num_draft_tokens_per_pos"):
            if min(getattr(self, name), default=0) < 0:
                raise ValueError(f"{name}: a count is negative, which every frontend dies of")
        return _not_negative(_shallow(self))


@record
class SchedulerStats:
    """One rank's load at the end of a step.

    Attributes:
        kv_cache_usage: 0 to 1.
        step_counter, current_wave: for the coordinator only; 0 towards clients.
        spec_decoding_stats: None where nothing was drafted.
        num_kv_fetch_reqs_by_stage: those that load what other instances have computed.
        connector_prefix_cache_stats: of other instances' caches; None without a connector.

    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None
    num_kv_fetch_reqs_by_stage: KvFetchStages = _NO_FETCHES
    connector_prefix_cache_stats: PrefixCacheStats | None = None

    def to_wire(self, *, with_encoder_cache_usage: bool = False) -> dict[str, Any]:
        """Return the full map of 0.33, which every line accepts; 0.19 wants one key more.

        Raises:
            ValueError: a negative count.

        """
        connector = self.connector_prefix_cache_stats
        stats = {
            "num_running_reqs": self.num_running_reqs,
            "num_waiting_reqs": self.num_waiting_reqs,
            "num_skipped_waiting_reqs": self.num_skipped_waiting_reqs,
            "num_kv_fetch_reqs_by_stage": self.num_kv_fetch_reqs_by_stage.to_wire(),
            "step_counter": self.step_counter,
            "current_wave": self.current_wave,
            "kv_cache_usage": self.kv_cache_usage,
            "iteration_details": None,
            "prefix_cache_stats": self.prefix_cache_stats.to_wire(),
            "connector_prefix_cache_stats": connector and connector.to_wire(_FROM_OTHER_INSTANCES),
            "kv_cache_eviction_events": [],
            "spec_decoding_stats": self.spec_decoding_stats and self.spec_decoding_stats.to_wire(),
            "kv_connector_stats": None,
            "ec_connector_stats": None,
            "waiting_lora_adapters": {},
            "running_lora_adapters": {},
            "cudagraph_stats": None,
            "perf_stats": None,
        }
        if with_encoder_cache_usage:
            stats["encoder_cache_usage"] = 0.0
        return _not_negative(stats)


def read_scheduler_stats(value: Any) -> SchedulerStats:
    """Read a statistics map as strictly as a Rust frontend does.

    Raises:
        WireError: a required key is missing, negative or of the wrong type.

    """
    stats = mapping(value, "scheduler_stats")
    if not isinstance(stats.get("kv_cache_eviction_events"), list):
        raise WireError("scheduler_stats.kv_cache_eviction_events: missing")
    connector = stats.get("connector_prefix_cache_stats")
    stages = mapping(stats.get("num_kv_fetch_reqs_by_stage", {}), "num_kv_fetch_reqs_by_stage")
    return SchedulerStats(
        num_running_reqs=integer(stats.get("num_running_reqs"), "num_running_reqs"),
        num_waiting_reqs=integer(stats.get("num_waiting_reqs"), "num_waiting_reqs"),
        num_skipped_waiting_reqs=integer(stats.get("num_skipped_waiting_reqs", 0), "num_skipped_waiting_reqs"),
        num_kv_fetch_reqs_by_stage=KvFetchStages(
            **{item.name: integer(stages.get(item.name, 0), item.name) for item in fields(KvFetchStages)}
        ),
        step_counter=integer(stats.get("step_counter"), "step_counter"),
        current_wave=integer(stats.get("current_wave"), "current_wave"),
        kv_cache_usage=number(stats.get("kv_cache_usage"), "kv_cache_usage"),
        prefix_cache_stats=_read_prefix_cache_stats(stats.get("prefix_cache_stats"), "prefix_cache_stats"),
        connector_prefix_cache_stats=(
            None if connector is None else _read_prefix_cache_stats(connector, "connector_prefix_cache_stats")
        ),
        spec_decoding_stats=_read_spec_decoding_stats(stats.get("spec_decoding_stats")),
    )


def _read_prefix_cache_stats(value: Any, place: str) -> PrefixCacheStats:
    stats = mapping(value, f"scheduler_stats.{place}")
    counts = {
        item.name: integer(stats.get(item.name), f"{place}.{item.name}")
        for item in fields(PrefixCacheStats)
        if item.name != "reset"
    }
    return PrefixCacheStats(reset=boolean(stats.get("reset"), f"{place}.reset"), **counts)


def _read_spec_decoding_stats(value: Any) -> SpecDecodingStats | None:
    if value is None:
        return None
    stats = mapping(value, "spec_decoding_stats")
    per_pos = ("num_accepted_tokens_per_pos", "num_draft_tokens_per_pos")
    counts: dict[str, Any] = {
        name: (integers if name in per_pos else integer)(stats.get(name), f"spec_decoding_stats.{name}")
        for name in (item.name for item in fields(SpecDecodingStats))
    }
    return SpecDecodingStats(**counts)


def read_prefill_stats(value: Any) -> PrefillStats:
    """Read prefill statistics; lines before 0.29 have no `num_cache_creation_tokens`.

    Raises:
        WireError: a count is missing, negative or of the wrong type.

    """
    stats = {"num_cache_creation_tokens": 0} | mapping(value, "prefill_stats")
    return PrefillStats(**{item.name: integer(stats.get(item.name), item.name) for item in fields(PrefillStats)})


def _shallow(stats: PrefillStats | PrefixCacheStats | SpecDecodingStats | KvFetchStages) -> dict[str, Any]:
    """Return the fields by name; dataclasses.asdict copies each value, at ten times the cost, once per request."""
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


def _not_negative(stats: dict[str, Any]) -> dict[str, Any]:
    for key, value in stats.items():
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{key}: {value} is negative, which every frontend dies of")
    return stats
