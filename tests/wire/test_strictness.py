# SPDX-License-Identifier: Apache-2.0
"""What kills a frontend cannot be written, and is refused by the reader that plays one."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from mockengine.wire.codec import WireError
from mockengine.wire.lines import LINES
from mockengine.wire.logprobs import LogprobsLists
from mockengine.wire.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    Envelope,
    EventType,
    FinishReason,
    SpecDecodeMetrics,
    StartWave,
    StepOutputs,
    UtilityReply,
    WaveComplete,
    read_envelope,
    write_envelope,
)
from mockengine.wire.stats import KvFetchStages, PrefillStats, PrefixCacheStats, SchedulerStats, SpecDecodingStats
from mockengine.wire.tensors import Tensor
from mockengine.wire.utility import failure_message
from tests.wire.forms import golden, plain

ONE_TOKEN: Final = EngineCoreOutput(request_id="r", new_token_ids=(5,))


def step(*outputs: EngineCoreOutput, **fields: Any) -> StepOutputs:
    return StepOutputs(engine_index=0, timestamp=1.0, outputs=outputs, **fields)


def scores(ids: Tensor, logprobs: Tensor, ranks: Tensor) -> EngineCoreOutput:
    return replace(ONE_TOKEN, new_logprobs=LogprobsLists(ids, logprobs, ranks))


def cells(dtype: str, *shape: int) -> Tensor:
    return Tensor(dtype, shape, bytes(4 * int(np.prod(shape))))


def drafts(**counts: Any) -> SpecDecodingStats:
    names = ("num_spec_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    per_pos = {"num_accepted_tokens_per_pos": (1, 0), "num_draft_tokens_per_pos": (1, 1)}
    return SpecDecodingStats(**(dict.fromkeys(names, 1) | per_pos | counts))


def metrics(**counts: Any) -> SpecDecodeMetrics:
    values: dict[str, Any] = {"num_spec_tokens": 1, "histogram": (0, 1), "num_draft_tokens": 1}
    return SpecDecodeMetrics(**(values | counts))


IDS, SCORES, RANKS = cells("<i4", 1, 3), cells("<f4", 1, 3), cells("<i4", 1)
TENSOR_IDS, TENSOR_SCORES, TENSOR_RANKS = cells("int32", 1, 3), cells("float32", 1, 3), cells("int32", 1)


@pytest.mark.parametrize(
    ("envelope", "reason"),
    [
        (step(), "an envelope without outputs"),
        (step(weight_version="default"), "an envelope without outputs"),
        (replace(step(ONE_TOKEN), engine_index=-1), "engine_index: -1"),
        (StartWave(0, 1.0, -1), "start_wave: -1"),
        (WaveComplete(0, 1.0, -1), "wave_complete: -1"),
        (step(replace(ONE_TOKEN, new_token_ids=(-1,))), "new_token_ids"),
        (step(replace(ONE_TOKEN, new_token_ids=(2**32,))), "new_token_ids"),
        (step(replace(ONE_TOKEN, new_token_ids=(1.5,))), "new_token_ids"),  # type: ignore[arg-type]
        (step(replace(ONE_TOKEN, stop_reason=-1)), "stop_reason: -1"),
        (step(scheduler_stats=SchedulerStats(num_running_reqs=-1)), "num_running_reqs: -1"),
        (step(scheduler_stats=SchedulerStats(num_waiting_reqs=-1)), "num_waiting_reqs: -1"),
        (step(scheduler_stats=SchedulerStats(num_skipped_waiting_reqs=-1)), "num_skipped_waiting_reqs: -1"),
        (step(scheduler_stats=SchedulerStats(kv_cache_usage=-0.5)), "kv_cache_usage: -0.5"),
        (step(scheduler_stats=SchedulerStats(prefix_cache_stats=PrefixCacheStats(hits=-1))), "hits: -1"),
        (step(scheduler_stats=SchedulerStats(spec_decoding_stats=drafts(num_drafts=-1))), "num_drafts: -1"),
        (
            step(scheduler_stats=SchedulerStats(spec_decoding_stats=drafts(num_draft_tokens_per_pos=(1, -1)))),
            "num_draft_tokens_per_pos: a count is negative",
        ),
        (step(replace(ONE_TOKEN, spec_decode_metrics=metrics(num_draft_tokens=-1))), "num_draft_tokens: a count"),
        (step(replace(ONE_TOKEN, spec_decode_metrics=metrics(histogram=(-1, 1)))), "histogram: a count is negative"),
        (step(scheduler_stats=SchedulerStats(connector_prefix_cache_stats=PrefixCacheStats(hits=-1))), "hits: -1"),
        (step(scheduler_stats=SchedulerStats(num_kv_fetch_reqs_by_stage=KvFetchStages(in_progress=-1))), "in_progress"),
        (step(replace(ONE_TOKEN, prefill_stats=PrefillStats(4, -1, 5))), "num_computed_tokens: -1"),
        (step(replace(ONE_TOKEN, pooling_output=SCORES)), "pooling_output: an array"),
        (step(replace(ONE_TOKEN, pooling_output=Tensor("float32", (2,), b"1234"))), "tensor: 4 bytes"),
        (step(replace(ONE_TOKEN, pooling_output=Tensor("auto", (1,), b"1234"))), "tensor.dtype"),
        (step(replace(scores(IDS, SCORES, RANKS), new_token_ids=(1, 2))), "new_logprobs: 1 rows where 2 tokens"),
        (step(scores(TENSOR_IDS, SCORES, RANKS)), "logprobs: int32 where an array is due"),
        (step(scores(IDS, cells("<f4", 1, 2), RANKS)), "logprobs: shapes"),
        (step(scores(cells("<i4", 1), cells("<f4", 1), RANKS)), "logprobs: shapes"),
        (step(scores(IDS, SCORES, cells("<i4", 1, 1))), "logprobs: shapes"),
        (
            step(replace(ONE_TOKEN, new_prompt_logprobs=LogprobsLists(IDS, SCORES, RANKS))),
            "logprobs: <i4 where a tensor is due",
        ),
        (
            step(replace(ONE_TOKEN, new_prompt_logprobs=LogprobsLists(TENSOR_IDS, TENSOR_SCORES, cells("int32", 2)))),
            "logprobs: shapes",
        ),
    ],
)
def test_what_kills_a_frontend_is_refused_by_the_encoder(envelope: Envelope, reason: str) -> None:
    for line in LINES:
        with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
            write_envelope(envelope, line)


def test_token_ids_of_numpy_are_written_as_plain_ints() -> None:
    ids = np.array([5, 4_294_967_295], dtype=np.uint32)
    written = write_envelope(step(replace(ONE_TOKEN, new_token_ids=list(ids))))
    assert plain(written[0])[1] == [["r", [5, 4_294_967_295]]]


def test_any_kind_of_mapping_is_written_as_a_map() -> None:
    headers = MappingProxyType({"traceparent": "00"})
    output = replace(ONE_TOKEN, trace_headers=headers, kv_transfer_params=headers)
    assert read_envelope(write_envelope(step(output))) == step(
        replace(ONE_TOKEN, trace_headers=dict(headers), kv_transfer_params=dict(headers))
    )


def test_half_a_surrogate_pair_is_written_as_a_question_mark() -> None:
    """JSON can hold one, UTF-8 cannot."""
    (payload,) = write_envelope(UtilityReply(0, 1.0, 7, failure="bad \ud83d text"))
    assert plain(payload)[4] == [7, "bad ? text", None]


def test_zeros_are_said_where_they_mean_something() -> None:
    output = replace(ONE_TOKEN, finish_reason=FinishReason.STOP, stop_reason=0)
    assert plain(write_envelope(step(output))[0])[1] == [["r", [5], None, None, None, 0, 0]]


def test_failed_call_has_no_result() -> None:
    (payload,) = write_envelope(UtilityReply(0, 1.0, 7, result="ignored", failure="no"))
    assert plain(payload)[4] == [7, "no", None]


def test_failures_are_in_the_words_of_a_real_engine() -> None:
    assert failure_message("sleep", "x") == "Call to sleep method failed: x"


# The reader that plays a Rust frontend.

STATS: Final[dict[str, Any]] = plain(golden("stats"))[2]


def without(path: tuple[str, ...]) -> dict[str, Any]:
    stats: dict[str, Any] = msgpack.unpackb(msgpack.packb(STATS))
    container = stats
    for key in path[:-1]:
        container = container[key]
    del container[path[-1]]
    return stats


REQUIRED_STATS: Final = [
    ("num_running_reqs",),
    ("num_waiting_reqs",),
    ("step_counter",),
    ("current_wave",),
    ("kv_cache_usage",),
    ("kv_cache_eviction_events",),
    ("prefix_cache_stats",),
    *(
        ("prefix_cache_stats", key)
        for key in (
            "reset",
            "requests",
            "queries",
            "hits",
            "preempted_requests",
            "preempted_queries",
            "preempted_hits",
        )
    ),
]


@pytest.mark.parametrize("path", REQUIRED_STATS, ids=".".join)
def test_stats_without_a_required_key_are_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(WireError, match=path[-1]):
        read_envelope([msgpack.packb([0, [], without(path), 1.0])])


def test_stats_may_lack_every_other_key() -> None:
    required = {path[0] for path in REQUIRED_STATS}
    fewest = {key: value for key, value in STATS.items() if key in required}
    fewest["prefix_cache_stats"] = {
        key: value for key, value in STATS["prefix_cache_stats"].items() if key != "hits_by_source"
    }
    expected = step(scheduler_stats=SchedulerStats(num_running_reqs=1))
    assert read_envelope([msgpack.packb([0, [], fewest, 1.0])]) == expected


def test_stats_we_write_are_the_full_map_in_the_order_of_a_real_engine() -> None:
    (payload,) = write_envelope(step(scheduler_stats=SchedulerStats()))
    stats = plain(payload)[2]
    assert list(stats) == list(STATS)
    assert list(stats["prefix_cache_stats"]) == list(STATS["prefix_cache_stats"])


def test_hits_of_other_instances_are_those_of_peers() -> None:
    lookups = PrefixCacheStats(requests=2, queries=100, hits=60, preempted_hits=5)
    (payload,) = write_envelope(step(scheduler_stats=SchedulerStats(connector_prefix_cache_stats=lookups)))
    assert plain(payload)[2]["connector_prefix_cache_stats"] == {
        "reset": False,
        "requests": 2,
        "queries": 100,
        "hits": 60,
        "preempted_requests": 0,
        "preempted_queries": 0,
        "preempted_hits": 5,
        "hits_by_source": {"p2p": 60},
    }


def test_usage_may_be_an_int() -> None:
    stats = STATS | {"kv_cache_usage": 0}
    expected = step(scheduler_stats=SchedulerStats(num_running_reqs=1))
    assert read_envelope([msgpack.packb([0, [], stats, 1])]) == expected


OUTPUT: Final[list[Any]] = ["r", [5]]


@pytest.mark.parametrize(
    "envelope",
    [
        [],
        [0],
        [0, []],
        [0, [], None, 1.0],
        [None, [OUTPUT], None, 1.0],
        [-1, [OUTPUT], None, 1.0],
        [0, None, STATS, 1.0],
        [0, {}, STATS, 1.0],
        [0, [OUTPUT], None, None],
        [0, [OUTPUT], None, "1.0"],
        [0, [OUTPUT], None, 1.0, [7, None, [None, None]]],
        [0, [OUTPUT], None, 1.0, None, None, 3],
        [0, [], None, 1.0, None, None, 3, 4],
        [0, [], STATS, 1.0, None, None, None, 4],
        [0, [], None, 1.0, None, ["r"], 3],
        [0, [], None, 1.0, None, None, -1],
        [0, [], None, 1.0, None, None, None, None, "label only"],
        [0, [OUTPUT], None, 1.0, None, [7]],
        [0, [OUTPUT], None, 1.0, None, None, None, None, 7],
        [0, [], None, 1.0, [7, None, None]],
        [0, [], None, 1.0, [7, None, ["type", None]]],
        [0, [], None, 1.0, [7, None]],
        [0, [], None, 1.0, [7, 5, None]],
    ],
)
def test_mixed_empty_or_mistyped_envelope_is_refused(envelope: list[Any]) -> None:
    with pytest.raises(WireError):
        read_envelope([msgpack.packb(envelope)])


@pytest.mark.parametrize(
    "output",
    [
        [],
        ["r"],
        [None, [5]],
        [7, [5]],
        ["r", None],
        ["r", [-1]],
        ["r", [2**32]],
        ["r", [5.0]],
        ["r", [5], []],
        ["r", [5], None, None, ["float32", [2], msgpack.ExtType(3, b"1234")]],
        ["r", [5], None, None, None, 5],
        ["r", [5], None, None, None, "stop"],
        ["r", [5], None, None, None, None, 1.5],
        ["r", [5], None, None, None, None, None, [[1, 1.0]]],
        ["r", [5], None, None, None, None, None, [{"type": 4, "timestamp": 1.0}]],
        ["r", [5], None, None, None, None, None, [{"type": 1}]],
        ["r", [5], *[None] * 9, {"num_prompt_tokens": 1}],
        ["r", [5], *[None] * 12],
        ["r", [5], *[None] * 11, 0, None, None, None, None, {"code": "x"}],
    ],
)
def test_mistyped_output_is_refused(output: list[Any]) -> None:
    with pytest.raises(WireError):
        read_envelope([msgpack.packb([0, [output], None, 1.0])])


def test_scores_of_six_or_of_two_items_are_refused() -> None:
    part = ["<i4", [1, 1], msgpack.ExtType(3, bytes(4))]
    for items in ([part, part], [part] * 3 + [None] * 3):
        with pytest.raises(WireError, match="new_logprobs"):
            read_envelope([msgpack.packb([0, [["r", [5], items]], None, 1.0])])


def test_prefill_stats_of_lines_before_cache_creation_was_counted_are_read() -> None:
    five = {
        "num_prompt_tokens": 4,
        "num_computed_tokens": 2,
        "num_cached_tokens": 2,
        "num_local_cached_tokens": 2,
        "num_external_cached_tokens": 0,
    }
    payload = msgpack.packb([0, [["r", [5], *[None] * 9, five]], None, 1.0])
    assert read_envelope([payload]) == step(replace(ONE_TOKEN, prefill_stats=PrefillStats(4, 2, 2, 2)))


def test_events_may_have_a_time_without_fraction() -> None:
    payload = msgpack.packb([0, [["r", [5], *[None] * 5, [{"type": 3, "timestamp": 7}]]], None, 1])
    assert read_envelope([payload]) == step(replace(ONE_TOKEN, events=(EngineCoreEvent(EventType.PREEMPTED, 7.0),)))


def test_notice_of_the_engine_itself_is_read_with_its_negative_id() -> None:
    payload = msgpack.packb([0, [], None, 1.0, [-2, None, [None, {"id": 0, "status": "healthy"}]]])
    assert read_envelope([payload]) == UtilityReply(0, 1.0, -2, {"id": 0, "status": "healthy"})


def test_unknown_fields_of_a_line_are_passed_over() -> None:
    output = ["r", [5], *[None] * 11, 0, None, {"a": 1}, None, None, None]
    assert read_envelope([msgpack.packb([0, [output], None, 1.0])]) == step(ONE_TOKEN)
