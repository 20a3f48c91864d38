# SPDX-License-Identifier: Apache-2.0
"""Every release line's layouts: requests of any length are read, outputs are never longer than a line allows."""

from dataclasses import replace
from typing import Any, Final

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.wire.codec import WireError
from mockengine.wire.lines import LINES, NEWEST, Line, in_common, line_of_release, lines_of_add
from mockengine.wire.logprobs import LogprobsLists
from mockengine.wire.messages import Add, read_message
from mockengine.wire.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    RequestError,
    SpecDecodeMetrics,
    StartWave,
    StepOutputs,
    UtilityReply,
    WaveComplete,
    read_envelope,
    write_envelope,
)
from mockengine.wire.requests import EngineCoreRequest, LoraRequest, request_items
from mockengine.wire.sampling import PoolingParams, SamplingParams
from mockengine.wire.stats import KvFetchStages, PrefillStats, PrefixCacheStats, SchedulerStats, SpecDecodingStats
from mockengine.wire.tensors import Tensor
from tests.wire.forms import SEARCH, plain, token_ids

LINE: Final = {line.name: line for line in LINES}

# Requests.

SAMPLING: Final = {"max_tokens": 8, "temperature": 0.7, "logit_bias": {5: 0.5}}
HEAD: Final[dict[str, Any]] = {
    "request_id": "r",
    "prompt_token_ids": [1, 4_294_967_295],
    "mm_features": [
        {
            "data": None,
            "modality": "image",
            "identifier": "i",
            "mm_position": {"offset": 5, "length": 4, "is_embed": None},
            "mm_hash": "h",
        }
    ],
    "sampling_params": SAMPLING,
    "pooling_params": None,
    "arrival_time": 5.25,
    "lora_request": ["l1", 1, "/l1", None, True, False],
    "cache_salt": "salt",
    "data_parallel_rank": 1,
    "prompt_embeds": None,
}
MIDDLE: Final[dict[str, Any]] = {
    "client_index": 2,
    "current_wave": 3,
    "priority": -4,
    "trace_headers": {"traceparent": "00"},
    "resumable": True,
    "external_req_id": "external",
    "reasoning_ended": False,
}
INSERTED: Final[dict[str, Any]] = {"prompt_is_token_ids": [True, False]}
TAIL: Final[dict[str, Any]] = {
    "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
    "abort_immediately": True,
    "session_id": "session",
    "kv_hints": {"protocol_version": 1, "message_id": "m", "actions": []},
}
OLD_LAYOUT: Final = HEAD | MIDDLE | TAIL
NEW_LAYOUT: Final = HEAD | INSERTED | MIDDLE | TAIL
VALUES: Final[dict[str, Any]] = NEW_LAYOUT | {
    "prompt_token_ids": token_ids(1, 4_294_967_295),
    "sampling_params": SamplingParams(max_tokens=8, temperature=0.7, logit_bias={5: 0.5}),
    "lora_request": LoraRequest("l1", 1, "/l1", load_inplace=True),
    "prompt_is_token_ids": (True, False),
}


def request_array(items: int) -> dict[str, Any]:
    """Return the fields of a request of `items` items in order, none at its default."""
    layout = OLD_LAYOUT if items <= 18 else NEW_LAYOUT
    return dict(list(layout.items())[:items])


def request_value(items: int, *, single_floats: bool = False) -> EngineCoreRequest:
    """Return the value of that request."""
    known = {name: VALUES[name] for name in request_array(items)}
    known["mm_features"] = read_features()
    if single_floats and "sampling_params" in known:
        known["sampling_params"] = replace(known["sampling_params"], temperature=0.699999988079071)
    keys = frozenset(SAMPLING) if "sampling_params" in known else frozenset[str]()
    return EngineCoreRequest(**known, items=items, sampling_keys=keys)


def read_features() -> tuple[Any, ...]:
    message = read_message([b"\x00", msgpack.packb(["r", None, HEAD["mm_features"]])], 0)
    assert isinstance(message, Add)
    (feature,) = message.request.mm_features
    expected = ("image", "i", 5, 4, "h", False)
    found = (
        feature.modality,
        feature.identifier,
        feature.offset,
        feature.length,
        feature.mm_hash,
        feature.has_data,
    )
    assert found == expected
    return message.request.mm_features


def read_array(items: list[Any], *, single_floats: bool = False) -> EngineCoreRequest:
    payload = msgpack.packb(items, use_single_float=single_floats)
    message = read_message([b"\x00", payload], 0)
    assert isinstance(message, Add), message
    return message.request


def test_lines_have_the_lengths_of_the_protocol() -> None:
    lengths = {line.name: (line.add_items, len(line.output_fields), line.has_weight_version) for line in LINES}
    assert lengths == {
        "0.19": (17, 14, False),
        "0.20": (18, 13, False),
        "0.21": (20, 13, False),
        "0.26": (20, 14, False),
        "0.28": (21, 16, False),
        "0.29": (21, 17, False),
        "0.31": (22, 19, False),
        "0.32": (22, 19, True),
        "0.33": (22, 19, True),
    }


@pytest.mark.parametrize("single_floats", [False, True], ids=["float64", "float32"])
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_request_of_every_line_is_read(line: Line, single_floats: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    items = list(request_array(line.add_items).values())
    assert len(items) == line.add_items
    expected = request_value(line.add_items, single_floats=single_floats)
    assert read_array(items, single_floats=single_floats) == expected


@pytest.mark.parametrize("items", range(1, 23))
def test_shorter_request_takes_defaults_for_what_is_missing(items: int) -> None:
    fields = {name: VALUES[name] for name in list(NEW_LAYOUT)[:items]}
    if items > 2:
        fields["mm_features"] = read_features()
    keys = frozenset(SAMPLING) if items > 3 else frozenset[str]()
    expected = EngineCoreRequest(**fields, items=items, sampling_keys=keys)
    assert read_array(list(NEW_LAYOUT.values())[:items]) == expected


@pytest.mark.parametrize("layout", [OLD_LAYOUT, NEW_LAYOUT], ids=["old", "new"])
def test_unknown_tail_of_a_longer_request_is_ignored(layout: dict[str, Any]) -> None:
    items = list(layout.values())
    tails: list[list[Any]] = [[None], [{"later": 1}, b"\x01", 7], [[]] * 20]
    for tail in tails:
        assert read_array([*items, *tail]) == replace(read_array(items), items=len(items) + len(tail))


def test_sounds_with_their_data_beside_the_request_are_read() -> None:
    field = {"data": ["float32", [1, 4], 1], "field": ["batched", {"keep_on_cpu": False}]}
    sound = {
        "data": {"input_audio_features": field, "feature_attention_mask": field | {"data": ["bool", [2, 2], 2]}},
        "modality": "audio",
        "identifier": "i",
        "mm_position": {"offset": 1, "length": 2, "is_embed": ["bool", [2], msgpack.ExtType(3, b"\1\1")]},
        "mm_hash": "h",
    }
    payload = msgpack.packb(["r", [7, 8, 8], [sound, sound | {"data": None}], SAMPLING])
    message = read_message([b"\x00", payload, bytes(16), bytes(4)], 0)
    assert isinstance(message, Add)
    assert [(each.modality, each.has_data) for each in message.request.mm_features] == [
        ("audio", True),
        ("audio", False),
    ]
    assert message.request.num_prompt_tokens == 3


def test_old_layout_is_told_by_the_int_at_position_10_whatever_the_length() -> None:
    everything_old = list(OLD_LAYOUT.values())
    assert len(everything_old) == 21
    request = read_array(everything_old)
    assert (request.client_index, request.prompt_is_token_ids, request.session_id) == (2, None, "session")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_request_is_laid_out_as_its_line_does(line: Line) -> None:
    values = request_array(line.add_items)
    assert request_items(values, line.add_items) == list(values.values())
    defaults = request_items({"request_id": "r"}, line.add_items)
    assert len(defaults) == line.add_items
    assert read_array(defaults) == EngineCoreRequest(request_id="r", items=line.add_items)


def test_field_that_a_layout_lacks_is_refused() -> None:
    with pytest.raises(KeyError, match="kv_hints"):
        request_items({"request_id": "r", "kv_hints": {}}, 21)
    with pytest.raises(KeyError, match="prompt_is_token_ids"):
        request_items({"request_id": "r", "prompt_is_token_ids": []}, 17)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["n", 1, "/p", None, True, False], LoraRequest("n", 1, "/p", None, load_inplace=True)),
        (["n", 1, "/p", "base", False, True], LoraRequest("n", 1, "/p", "base", is_3d=True)),
        (["n", 1, "/p", None, None, True, True], LoraRequest("n", 1, "/p", None, load_inplace=True, is_3d=True)),
        (["n", 1, "/p", None, {"dir": "x"}, False, True], LoraRequest("n", 1, "/p", is_3d=True)),
        (["n", 1, "/p", "base", None, True], LoraRequest("n", 1, "/p", "base", load_inplace=True)),
        (["n", 1, "/p"], LoraRequest("n", 1, "/p")),
    ],
    ids=["0.32", "0.32 3d", "0.24", "0.24 tensorizer", "0.19", "shortest"],
)
def test_lora_request_of_every_line_is_read(items: list[Any], expected: LoraRequest) -> None:
    request = read_array(["r", [1], None, {}, None, 0.0, items])
    assert request.lora_request == expected


@pytest.mark.parametrize(
    ("tail", "late_chunk_size"),
    [([], None), ([None], None), ([[64]], 64)],
    ids=["10 items", "11 items", "late chunking"],
)
def test_pooling_params_of_every_line_are_read(tail: list[Any], late_chunk_size: int | None) -> None:
    pooling = [True, 64, None, None, "embed", False, False, None, None, 2, *tail]
    request = read_array(["r", [1], None, None, pooling, 0.0])
    expected = PoolingParams("embed", use_activation=True, dimensions=64, late_chunk_size=late_chunk_size)
    assert request.pooling_params == expected
    assert request.is_from_python


RUST: Final = frozenset({"temperature", "watermarking"})


@pytest.mark.parametrize(
    ("items", "keys", "from_python", "expected"),
    [
        (3, RUST, False, ["0.19"]),
        (17, RUST, False, ["0.19"]),
        (17, RUST, True, ["0.19"]),
        (18, RUST, False, ["0.20"]),
        (19, RUST, False, ["0.20"]),
        (20, RUST, False, ["0.21", "0.26"]),
        (20, RUST, True, ["0.21", "0.26"]),
        (21, RUST, False, ["0.28"]),
        (21, RUST | {"routed_experts_prompt_start"}, False, ["0.29"]),
        (21, RUST, True, ["0.29"]),
        (22, RUST | {"routed_experts_prompt_start"}, False, ["0.31", "0.32", "0.33"]),
        (22, RUST, True, ["0.33"]),
        (40, RUST, True, ["0.33"]),
    ],
)
def test_add_tells_the_lines_it_may_be_of(
    items: int,
    keys: frozenset[str],
    from_python: bool,  # noqa: FBT001 - pytest passes it by name
    expected: list[str],
) -> None:
    assert [line.name for line in lines_of_add(items, keys, from_python=from_python)] == expected


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.19.1", "0.19"),
        ("0.24.0", "0.21"),
        ("0.27.1", "0.26"),
        ("0.30.0", "0.29"),
        ("0.33.0", "0.33"),
        ("1.2", "0.33"),
    ],
)
def test_release_belongs_to_the_line_before_it(release: str, expected: str) -> None:
    assert line_of_release(release).name == expected


@pytest.mark.parametrize("release", ["0.18.1", "newest", "0", "v0.33"])
def test_release_that_is_none_or_too_old_is_refused(release: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        line_of_release(release)


# Outputs. The layouts are written out here once more, from the protocol's table.

OUTPUT_HEAD: Final = [
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "finish_reason",
    "stop_reason",
    "events",
    "kv_transfer_params",
]
OUTPUT_MISSES: Final = (None, 0, "mm_cache_miss_hashes")
OUTPUT_DRAFTS: Final = (*OUTPUT_MISSES, None, "spec_decode_metrics")
OUTPUT_SAID: Final[dict[str, list[Any]]] = {
    "0.19": [*OUTPUT_HEAD, "trace_headers", "num_cached_tokens", "num_external_computed_tokens"],
    "0.20": [*OUTPUT_HEAD, "trace_headers", "prefill_stats"],
    "0.21": [*OUTPUT_HEAD, "trace_headers", "prefill_stats"],
    "0.26": [*OUTPUT_HEAD, None, "trace_headers", "prefill_stats"],
    "0.28": [*OUTPUT_HEAD, None, "trace_headers", "prefill_stats", *OUTPUT_MISSES],
    "0.29": [*OUTPUT_HEAD, None, "trace_headers", "prefill_stats", *OUTPUT_DRAFTS],
    "0.31": [*OUTPUT_HEAD, None, "trace_headers", "prefill_stats", *OUTPUT_DRAFTS, None, "error"],
    "0.32": [*OUTPUT_HEAD, None, "trace_headers", "prefill_stats", *OUTPUT_DRAFTS, None, "error"],
    "0.33": [*OUTPUT_HEAD, None, "trace_headers", "prefill_stats", *OUTPUT_DRAFTS, None, "error"],
}
"""What an output with something in every field of ours says: field by position, or the default in between."""


def tensor(dtype: str, *shape: int) -> Tensor:
    count = 1
    for length in shape:
        count *= length
    return Tensor(dtype, shape, bytes(range(4 * count)))


def wire_tensor(value: Tensor) -> list[Any]:
    return [value.dtype, list(value.shape), msgpack.ExtType(3, value.data)]


SCORES: Final = LogprobsLists(tensor("<i4", 2, 3), tensor("<f4", 2, 3), tensor("<i4", 2))
PROMPT_SCORES: Final = LogprobsLists(tensor("int32", 4, 2), tensor("float32", 4, 2), tensor("int32", 4))
EVERYTHING: Final = EngineCoreOutput(
    request_id="r",
    new_token_ids=(5, 4_294_967_295),
    new_logprobs=SCORES,
    new_prompt_logprobs=PROMPT_SCORES,
    pooling_output=tensor("float32", 3),
    finish_reason=FinishReason.ERROR,
    stop_reason="repetition_detected",
    events=(
        EngineCoreEvent(EventType.QUEUED, 1.5),
        EngineCoreEvent(EventType.SCHEDULED, 2.5),
        EngineCoreEvent(EventType.PREEMPTED, 3.5),
    ),
    kv_transfer_params={"remote": [1]},
    trace_headers={"traceparent": "00"},
    prefill_stats=PrefillStats(10, 6, 4, 3, 1, 5),
    mm_cache_miss_hashes=("h", "i"),
    spec_decode_metrics=SpecDecodeMetrics(
        num_spec_tokens=2, histogram=(0, 1, 1), num_draft_tokens=3, per_step_accepted=(2, 1), per_step_drafted=(2, 1)
    ),
    error=RequestError("engine_paused", "m", retryable=True),
)
EVERYTHING_SAID: Final[dict[Any, Any]] = {
    "request_id": "r",
    "new_token_ids": [5, 4_294_967_295],
    "new_logprobs": [wire_tensor(part) for part in (SCORES.token_ids, SCORES.logprobs, SCORES.ranks)] + [None],
    "new_prompt_logprobs_tensors": [
        wire_tensor(part) for part in (PROMPT_SCORES.token_ids, PROMPT_SCORES.logprobs, PROMPT_SCORES.ranks)
    ]
    + [None],
    "pooling_output": wire_tensor(tensor("float32", 3)),
    "finish_reason": 3,
    "stop_reason": "repetition_detected",
    "events": [
        {"type": 1, "timestamp": 1.5},
        {"type": 2, "timestamp": 2.5},
        {"type": 3, "timestamp": 3.5},
    ],
    "kv_transfer_params": {"remote": [1]},
    "trace_headers": {"traceparent": "00"},
    "num_cached_tokens": 4,
    "num_external_computed_tokens": 1,
    "prefill_stats": {
        "num_prompt_tokens": 10,
        "num_computed_tokens": 6,
        "num_cached_tokens": 4,
        "num_local_cached_tokens": 3,
        "num_external_cached_tokens": 1,
        "num_cache_creation_tokens": 5,
    },
    "mm_cache_miss_hashes": ["h", "i"],
    "spec_decode_metrics": {
        "num_spec_tokens": 2,
        "histogram": [0, 1, 1],
        "num_draft_tokens": 3,
        "per_step_accepted": [2, 1],
        "per_step_drafted": [2, 1],
    },
    "error": {"code": "engine_paused", "message": "m", "retryable": True},
}


def step(*outputs: EngineCoreOutput, **fields: Any) -> StepOutputs:
    return StepOutputs(engine_index=1, timestamp=4.5, outputs=outputs, **fields)


def as_known_to(line: Line, whole: StepOutputs) -> StepOutputs:
    """Return what a frontend of `line` can know of a step."""
    has_error, has_prefill = "error" in line.output_fields, "prefill_stats" in line.output_fields
    has_drafts = "spec_decode_metrics" in line.output_fields
    has_misses = "mm_cache_miss_hashes" in line.output_fields
    outputs = tuple(
        replace(
            output,
            error=output.error if has_error else None,
            prefill_stats=output.prefill_stats if has_prefill else None,
            spec_decode_metrics=output.spec_decode_metrics if has_drafts else None,
            mm_cache_miss_hashes=output.mm_cache_miss_hashes if has_misses else (),
        )
        for output in whole.outputs
    )
    return replace(whole, outputs=outputs, weight_version=whole.weight_version if line.has_weight_version else None)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_every_field_sits_at_its_position_and_the_last_one_ends_the_array(line: Line) -> None:
    (payload,) = write_envelope(step(EVERYTHING), line)
    (output,) = plain(payload)[1]
    assert output == [EVERYTHING_SAID.get(said, said) for said in OUTPUT_SAID[line.name]]
    assert len(output) <= len(line.output_fields)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_what_a_line_does_not_know_is_left_out(line: Line) -> None:
    whole = step(EVERYTHING, finished_requests=("r",), weight_version="v2")
    assert read_envelope(write_envelope(whole, line), line) == as_known_to(line, whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (name, getattr(EVERYTHING, name))
        for name in ("finish_reason", "stop_reason", "events", "kv_transfer_params", "trace_headers", "prefill_stats")
    ],
)
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_output_ends_with_its_last_field_that_says_something(line: Line, field: str, value: Any) -> None:
    output = EngineCoreOutput(request_id="r", new_token_ids=(5,), **{field: value})
    (payload,) = write_envelope(step(output), line)
    (said,) = plain(payload)[1]
    last = "num_external_computed_tokens" if field == "prefill_stats" and line.name == "0.19" else field
    assert len(said) == OUTPUT_SAID[line.name].index(last) + 1
    assert said[-1] == EVERYTHING_SAID[last]
    in_between = said[2:-2] if line.name == "0.19" and field == "prefill_stats" else said[2:-1]
    assert in_between == [None] * len(in_between)


def test_plain_token_takes_two_items_in_every_line() -> None:
    output = EngineCoreOutput(request_id="r", new_token_ids=(5,))
    payloads = {tuple(write_envelope(step(output), line)) for line in LINES}
    assert [plain(payload) for (payload,) in payloads] == [[1, [["r", [5]]], None, 4.5]]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_envelope_is_as_short_as_it_can_be(line: Line) -> None:
    stats = SchedulerStats(num_running_reqs=1)
    (told_of_all,) = write_envelope(step(finished_requests=("r",), scheduler_stats=stats, weight_version="v2"), line)
    (told_of_label,) = write_envelope(step(scheduler_stats=stats, weight_version="v2"), line)
    map_of_stats = plain(told_of_all)[2]
    head: list[Any] = [1, [], map_of_stats, 4.5]
    if line.has_weight_version:
        assert plain(told_of_all) == [*head, None, ["r"], None, None, "v2"]
        assert plain(told_of_label) == [*head, None, None, None, None, "v2"]
    else:
        assert plain(told_of_all) == [*head, None, ["r"]]
        assert plain(told_of_label) == head
    assert ("encoder_cache_usage" in map_of_stats) == (line.name == "0.19")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_replies_and_waves_are_the_same_for_every_line(line: Line) -> None:
    for envelope in (
        UtilityReply(1, 4.5, 2**64 - 1, result=[None, {"a": 1}]),
        UtilityReply(1, 4.5, 0, failure="no"),
        StartWave(1, 4.5, 3),
        WaveComplete(1, 4.5, 0),
    ):
        frames = write_envelope(envelope, line)
        assert frames == write_envelope(envelope)
        assert read_envelope(frames, line) == envelope


AMBIGUOUS: Final = [
    lines
    for lines in dict.fromkeys(
        lines_of_add(items, RUST, from_python=python) for items in range(25) for python in (False, True)
    )
    if len(lines) > 1
]


def test_ambiguous_requests_are_the_known_ones() -> None:
    assert sorted("|".join(line.name for line in lines) for lines in AMBIGUOUS) == ["0.21|0.26", "0.31|0.32|0.33"]


@pytest.mark.parametrize("lines", AMBIGUOUS, ids=lambda lines: in_common(lines).name)
def test_what_lines_have_in_common_reads_alike_in_each(lines: tuple[Line, ...]) -> None:
    common = in_common(lines)
    stats = SchedulerStats(num_running_reqs=1)
    whole = step(EVERYTHING, finished_requests=("r",), weight_version="v2", scheduler_stats=stats)
    frames = write_envelope(whole, common)
    known = as_known_to(common, whole)
    if common.name == "0.21|0.26":
        # ec_transfer_params was inserted in front of it, so its place is unknown.
        known = replace(known, outputs=(replace(known.outputs[0], trace_headers=None),))
    assert [read_envelope(frames, line) for line in lines] == [known] * len(lines)


def test_lines_in_common_with_the_oldest_want_its_stats() -> None:
    common = in_common(LINES)
    assert common.stats_have_encoder_cache_usage
    assert not common.has_weight_version
    assert list(common.output_fields) == OUTPUT_HEAD


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_output_longer_than_its_line_is_refused_as_a_rust_frontend_does(line: Line) -> None:
    longest: list[Any] = ["r", [5], *[None] * (len(line.output_fields) - 2)]
    for name in ("num_nans_in_logits", "num_cached_tokens", "num_external_computed_tokens"):
        if name in line.output_fields:
            longest[line.output_fields.index(name)] = 0
    known = step(EngineCoreOutput(request_id="r", new_token_ids=(5,)))
    assert read_envelope([msgpack.packb([1, [longest], None, 4.5])], line) == known
    with pytest.raises(WireError, match="output: array of"):
        read_envelope([msgpack.packb([1, [[*longest, None]], None, 4.5])], line)
    envelope = [1, [longest], None, 4.5, None, None, None, None]
    too_long = [*envelope, None, None] if line.has_weight_version else [*envelope, None]
    with pytest.raises(WireError, match="EngineCoreOutputs: array of"):
        read_envelope([msgpack.packb(too_long)], line)


# Random steps.

unsigned = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e9)
names = st.text(max_size=8)
counts = st.lists(unsigned, max_size=4).map(tuple)
token_lists = st.lists(unsigned, max_size=5).map(tuple)


@st.composite
def logprobs_lists(draw: st.DrawFn, rows: int, *, as_tensors: bool) -> LogprobsLists:
    width = draw(st.integers(1, 3))
    ids, scores = ("int32", "float32") if as_tensors else ("<i4", "<f4")
    cells = st.binary(min_size=4 * rows * width, max_size=4 * rows * width)
    return LogprobsLists(
        Tensor(ids, (rows, width), draw(cells)),
        Tensor(scores, (rows, width), draw(cells)),
        Tensor(ids, (rows,), draw(st.binary(min_size=4 * rows, max_size=4 * rows))),
    )


# Those of 256 bytes and more have a frame of their own.
TENSORS = [Tensor("uint8", (size,), bytes([size % 251]) * size) for size in (0, 1, 8, 255, 256, 1_000)]


@st.composite
def engine_core_outputs(draw: st.DrawFn) -> EngineCoreOutput:
    new_token_ids = draw(token_lists)
    return EngineCoreOutput(
        request_id=draw(names),
        new_token_ids=new_token_ids,
        new_logprobs=draw(st.none() | logprobs_lists(len(new_token_ids), as_tensors=False)),
        new_prompt_logprobs=draw(st.none() | logprobs_lists(3, as_tensors=True)),
        pooling_output=draw(st.none() | st.sampled_from(TENSORS)),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        stop_reason=draw(st.none() | unsigned | names),
        events=draw(st.lists(st.builds(EngineCoreEvent, st.sampled_from(EventType), seconds), max_size=3).map(tuple)),
        kv_transfer_params=draw(st.none() | st.dictionaries(names, unsigned, max_size=2)),
        trace_headers=draw(st.none() | st.dictionaries(names, names, max_size=2)),
        prefill_stats=draw(st.none() | st.builds(PrefillStats, *[unsigned] * 6)),
        mm_cache_miss_hashes=draw(st.lists(names, max_size=2).map(tuple)),
        spec_decode_metrics=draw(
            st.none()
            | st.builds(
                SpecDecodeMetrics,
                num_spec_tokens=unsigned,
                histogram=counts,
                num_draft_tokens=unsigned,
                per_step_accepted=counts,
                per_step_drafted=counts,
            )
        ),
        error=draw(st.none() | st.builds(RequestError, names, names, st.booleans())),
    )


steps = st.builds(
    StepOutputs,
    engine_index=st.integers(0, 65_535),
    timestamp=seconds,
    outputs=st.lists(engine_core_outputs(), max_size=3).map(tuple),
    scheduler_stats=st.none()
    | st.builds(
        SchedulerStats,
        *[unsigned] * 5,
        st.floats(0, 1),
        st.builds(PrefixCacheStats, st.booleans(), *[unsigned] * 6),
        st.none()
        | st.builds(
            SpecDecodingStats,
            num_spec_tokens=unsigned,
            num_drafts=unsigned,
            num_draft_tokens=unsigned,
            num_accepted_tokens=unsigned,
            num_accepted_tokens_per_pos=counts,
            num_draft_tokens_per_pos=counts,
        ),
        st.builds(KvFetchStages, *[unsigned] * 3),
        st.none() | st.builds(PrefixCacheStats, st.booleans(), *[unsigned] * 6),
    ),
    finished_requests=st.lists(names, max_size=3).map(tuple),
    weight_version=st.none() | names,
).filter(lambda whole: bool(whole.outputs or whole.scheduler_stats or whole.finished_requests))


@SEARCH
@given(whole=steps)
def test_any_step_survives_in_every_line(whole: StepOutputs) -> None:
    for line in LINES:
        frames = write_envelope(whole, line)
        assert read_envelope(frames, line) == as_known_to(line, whole)
        envelope = plain(frames[0])
        assert len(envelope) <= (9 if line.has_weight_version else 8)
        assert all(len(output) <= len(line.output_fields) for output in envelope[1])


def test_newest_line_is_spoken_by_default() -> None:
    whole = step(EVERYTHING, weight_version="v2")
    assert write_envelope(whole) == write_envelope(whole, NEWEST)
    assert read_envelope(write_envelope(whole)) == whole
    assert LINE["0.33"] is NEWEST
