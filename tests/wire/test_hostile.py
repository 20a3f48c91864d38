# SPDX-License-Identifier: Apache-2.0
"""Bytes that no frontend sends: they cost one message, bounded memory, bounded time, and never an exception."""

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.wire.codec import MAX_CONTAINERS, MAX_PAYLOAD_BYTES, Flaw, WireError, pack
from mockengine.wire.handshake import read_init, read_ready_response, read_status
from mockengine.wire.kv_events import read_event_batch
from mockengine.wire.lines import LINES
from mockengine.wire.messages import (
    MAX_ANSWERED_ID_BYTES,
    Abort,
    Add,
    Message,
    RequestType,
    StartDpWave,
    Unreadable,
    read_message,
)
from mockengine.wire.outputs import EngineCoreDead, read_envelope
from mockengine.wire.requests import MAX_REQUEST_ID_BYTES
from mockengine.wire.utility import MAX_METHOD_CHARACTERS, UtilityCall
from tests.wire.forms import SEARCH, golden, plain

ADD, ABORT, START_DP_WAVE, UTILITY = (bytes([request_type]) for request_type in RequestType)
REASON_CHARACTERS_MOST: Final = 400


def sane(message: Message) -> Message:
    """Return `message` when it is one that the engine can live with: bounded, showable, fit to be sent back."""
    match message:
        case Add(request):
            assert len(request.request_id.encode()) <= MAX_REQUEST_ID_BYTES
            assert 0 <= request.num_prompt_tokens < 2**31
            assert request.client_index >= 0
            assert 0 <= request.current_wave < 2**31
            for value in (request.kv_hints, request.reasoning_parser_kwargs, request.trace_headers):
                pack(value)
            if request.sampling_params is not None:
                pack([request.sampling_params.extra_args, request.sampling_params.structured_outputs])
        case Abort(request_ids):
            assert all(isinstance(request_id, str) for request_id in request_ids)
        case StartDpWave(wave, exclude):
            assert 0 <= wave < 2**31
            assert exclude is None or isinstance(exclude, (int, bytes))
        case UtilityCall():
            sane_call(message)
        case Unreadable():
            assert 0 < len(message.reason) <= REASON_CHARACTERS_MOST
            assert message.request_id is None or len(message.request_id.encode()) <= MAX_ANSWERED_ID_BYTES
            if message.call is not None:
                sane_call(message.call)
    repr(message)
    return message


def sane_call(call: UtilityCall) -> None:
    assert call.client_index >= 0
    assert 0 <= call.call_id < 2**64
    assert len(call.method) <= MAX_METHOD_CHARACTERS
    pack(list(call.args))


def unreadable(frames: Sequence[bytes]) -> Unreadable:
    message = sane(read_message(frames, 3))
    assert isinstance(message, Unreadable), message
    assert message.frame_bytes == tuple(len(frame) for frame in frames)
    return message


# What is mutated: messages with something in every field.

REQUEST: Final[list[Any]] = [
    "r1",
    [1, 2],
    [
        {
            "data": {"pixels": {"data": ["uint8", [1], 1], "field": ["flat", {"dim": 0}]}},
            "modality": "image",
            "identifier": "i",
            "mm_position": {"offset": 0, "length": 1, "is_embed": ["bool", [1], msgpack.ExtType(3, b"\x01")]},
            "mm_hash": "h",
        }
    ],
    {
        "max_tokens": 8,
        "min_tokens": 1,
        "_eos_token_id": 1,
        "stop_token_ids": [2],
        "_all_stop_token_ids": [1, 2],
        "ignore_eos": False,
        "bad_words": ["w"],
        "_bad_words_token_ids": [[1]],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": -1,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "logprob_token_ids": [1],
        "structured_outputs": {"json": {"type": "object"}},
        "logit_bias": {5: 0.5},
        "allowed_token_ids": [1],
        "extra_args": {"mock": [{"a": 1}]},
        "skip_reading_prefix_cache": False,
        "thinking_token_budget": 1,
        "repetition_detection": {"min_count": 1},
        "trace_decode_token_ids": [1],
    },
    [True, 3, None, None, "embed", False, False, None, None, 2, None],
    5.0,
    ["l1", 1, "/l1", None, False, False],
    "salt",
    0,
    ["float32", [1, 1], msgpack.ExtType(3, b"\x00\x00\x00\x00")],
    [True],
    0,
    0,
    0,
    {"traceparent": "00"},
    False,
    "external",
    False,
    {"chat_template_kwargs": {}},
    False,
    "session",
    {"actions": []},
]
CALL: Final[list[Any]] = [0, 7, "sleep", [1, "abort", {"a": [None]}]]
STEP: Final[list[Any]] = plain(golden("first_token"))


class Raw(NamedTuple):
    """Bytes that stand where a value should."""

    data: bytes


def packed(value: Any) -> bytes:
    """Encode like msgpack, but let raw bytes through."""
    match value:
        case Raw(data):
            return data
        case list():
            return b"\xdc" + len(value).to_bytes(2, "big") + b"".join(packed(item) for item in value)
        case dict():
            items = b"".join(packed(key) + packed(item) for key, item in value.items())
            return b"\xde" + len(value).to_bytes(2, "big") + items
        case _:
            data = msgpack.packb(value)
            assert isinstance(data, bytes)
            return data


LONG: Final = b"\x7f\xff\xff\xff"
HOSTILE: Final[Mapping[str, bytes]] = {
    "nil": b"\xc0",
    "never used": b"\xc1",
    "false": b"\xc2",
    "true": b"\xc3",
    "zero": b"\x00",
    "one": b"\x01",
    "minus one": b"\xff",
    "2**31": b"\xce\x80\x00\x00\x00",
    "2**63": b"\xcf\x80" + b"\x00" * 7,
    "2**64 - 1": b"\xcf" + b"\xff" * 8,
    "-2**63": b"\xd3\x80" + b"\x00" * 7,
    "float32": b"\xca\x3f\x80\x00\x00",
    "float64": b"\xcb\x3f\xf0" + b"\x00" * 6,
    "nan": b"\xcb\x7f\xf8" + b"\x00" * 6,
    "nan32": b"\xca\x7f\xc0\x00\x00",
    "infinity": b"\xcb\x7f\xf0" + b"\x00" * 6,
    "minus infinity": b"\xcb\xff\xf0" + b"\x00" * 6,
    "huge float": b"\xcb\x7f\xef" + b"\xff" * 6,
    "empty str": b"\xa0",
    "str": b"\xa1x",
    "long str": b"\xda\x7f\xff" + b"x" * 0x7FFF,
    "no UTF-8": b"\xa2\xff\xfe",
    "half a surrogate pair": b"\xa3\xed\xa0\x80",
    "bin": b"\xc4\x01\x00",
    "empty array": b"\x90",
    "array of nil": b"\x91\xc0",
    "array of int": b"\x91\x01",
    "array of str": b"\x91\xa1x",
    "array of arrays": b"\x92\x90\x90",
    "array of NaN": b"\x91\xca\x7f\xc0\x00\x00",
    "empty map": b"\x80",
    "map of str": b"\x81\xa1x\xa1y",
    "map of int keys": b"\x82\x01\x01\xff\x01",
    "map of float keys": b"\x81\xca\x3f\x80\x00\x00\x01",
    "map of nil": b"\x81\xc0\xc0",
    "map with a bin key": b"\x81\xc4\x01\x00\x01",
    "map with an array key": b"\x81\x90\x01",
    "map with a map key": b"\x81\x80\x01",
    "map with an extension key": b"\x81\xd4\x03\x00\x01",
    "map with a key twice": b"\x82\xa1x\x01\xa1x\x02",
    "pickle": b"\xd4\x01\x80",
    "cloudpickle": b"\xc7\x01\x02\x80",
    "raw view": b"\xd6\x03\x00\x00\x00\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "wrong timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "unknown extension": b"\xd4\x7f\x00",
    "4 GB str": b"\xdb\xff\xff\xff\xff",
    "4 GB bin": b"\xc6\xff\xff\xff\xff",
    "4 GB extension": b"\xc9\xff\xff\xff\xff\x03",
    "4 G items": b"\xdd\xff\xff\xff\xff",
    "4 G pairs": b"\xdf\xff\xff\xff\xff",
    "2 G items": b"\xdd" + LONG,
    "arrays 100 000 deep": b"\x91" * 100_000 + b"\xc0",
    "arrays 1000 deep": b"\x91" * 1000 + b"\xc0",
    "arrays 200 deep": b"\x91" * 200 + b"\xc0",
    "maps 1000 deep": b"\x81\xa1x" * 1000 + b"\xc0",
    "maps 200 deep": b"\x81\xa1x" * 200 + b"\xc0",
    "tensor of no width": packed(["float32", [10**18, 0], msgpack.ExtType(3, b"")]),
    "tensor of many dimensions": packed(["float32", [2**63] * 2000, msgpack.ExtType(3, b"")]),
    "tensor of a frame that is not there": packed(["float32", [1], 99]),
    "tensor in shared memory": packed(["float32", [1], {}]),
    "tensor of an unknown dtype": packed(["x" * 10_000, [1], msgpack.ExtType(3, b"")]),
}

Path = tuple[Any, ...]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the way to every item below `value`, at any depth."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, list):
        items = list(enumerate(value))
    elif isinstance(value, dict):
        items = list(value.items())
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def changed(value: Any, path: Path, change: Callable[[Any, Any], Any]) -> Any:
    """Return a copy of `value` in which the container of the last step of `path` is what `change` makes of it."""
    copy = list(value) if isinstance(value, list) else dict(value)
    if len(path) == 1:
        return change(copy, path[0])
    copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


MARK: Final = Raw(b"\xd9\x0e<here it goes>")


def put(container: Any, key: Any) -> Any:
    container[key] = MARK
    return container


def insert(container: Any, key: Any) -> Any:
    if isinstance(container, list):
        container.insert(key, MARK)
        return container
    return {MARK: 1, **container}


def delete(container: Any, key: Any) -> Any:
    del container[key]
    return container


def mutations(value: list[Any]) -> Iterator[tuple[Path, bytes]]:
    """Yield what becomes of a message when one item, at any depth, is deleted, replaced or preceded by another."""
    for path in paths(value):
        yield path, packed(changed(value, path, delete))
        # What is inserted deep inside is passed over or replaces nothing.
        for change in (put, insert) if len(path) < 3 else (put,):
            template = packed(changed(value, path, change))
            for data in HOSTILE.values():
                yield path, template.replace(MARK.data, data)


def test_messages_to_be_mutated_are_readable_as_they_are() -> None:
    assert isinstance(read_message([ADD, packed(REQUEST), b"\x00"], 0), Add)
    assert isinstance(read_message([UTILITY, packed(CALL)], 0), UtilityCall)


def test_request_with_one_item_wrong_costs_that_request_and_keeps_its_id() -> None:
    outcomes = {Add: 0, Unreadable: 0}
    for path, payload in mutations(REQUEST):
        message = sane(read_message([ADD, payload, b"\x00"], 0))
        assert isinstance(message, (Add, Unreadable))
        outcomes[type(message)] += 1
        if isinstance(message, Unreadable) and path[0] != 0:
            assert message.request_id == "r1"
    assert min(outcomes.values()) > 1000


def test_call_with_one_item_wrong_costs_that_call_and_keeps_its_id() -> None:
    outcomes = {UtilityCall: 0, Unreadable: 0}
    for path, payload in mutations(CALL):
        message = sane(read_message([UTILITY, payload], 3))
        assert isinstance(message, (UtilityCall, Unreadable))
        outcomes[type(message)] += 1
        if isinstance(message, Unreadable) and path[0] > 2:
            assert message.call == UtilityCall(0, 7, "sleep")
        if isinstance(message, Unreadable) and path[0] == 2:
            assert message.call is not None
            assert message.call.call_id == 7
    assert min(outcomes.values()) > 50


@pytest.mark.parametrize(
    ("request_type", "value"), [(ABORT, ["r1", "r2"]), (START_DP_WAVE, [1, 0]), (START_DP_WAVE, [1, b"\x00\x00"])]
)
def test_abort_or_wave_with_one_item_wrong_costs_that_message(request_type: bytes, value: list[Any]) -> None:
    for _, payload in mutations(value):
        sane(read_message([request_type, payload], 0))


def test_envelope_with_one_item_wrong_is_a_wire_error() -> None:
    for name in ("first_token", "logprobs", "prompt_logprobs", "stats", "utility_reply", "paused_rejection"):
        for _, payload in mutations(plain(golden(name))):
            with contextlib.suppress(WireError):
                read_envelope([payload])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("hello", read_status),
        ("init", read_init),
        ("ready_response", read_ready_response),
        ("kv_events", read_event_batch),
    ],
)
def test_handshake_with_one_item_wrong_is_a_wire_error(name: str, read: Callable[[bytes], object]) -> None:
    for _, payload in mutations(plain(golden(name))):
        with contextlib.suppress(WireError):
            repr(read(payload))


# Damage to the bytes themselves.

GOLDEN_MESSAGES: Final = [
    (ADD, golden("add_python")),
    (ADD, golden("add_rust")),
    (ABORT, golden("abort")),
    (UTILITY, golden("utility")),
    (START_DP_WAVE, golden("start_dp_wave")),
    (START_DP_WAVE, golden("start_dp_wave_excluding_an_identity")),
]
GOLDEN_ENVELOPES: Final = [
    golden(name)
    for name in (
        "outputs_full",
        "first_token",
        "finish_stop",
        "logprobs",
        "prompt_logprobs",
        "stats",
        "utility_reply",
        "utility_failure",
        "paused_rejection",
        "pooling_output",
        "wave_complete",
        "start_wave",
    )
]


@pytest.mark.parametrize(("request_type", "payload"), GOLDEN_MESSAGES)
def test_message_cut_off_anywhere_is_unreadable(request_type: bytes, payload: bytes) -> None:
    for length in range(len(payload)):
        message = unreadable([request_type, payload[:length]])
        if request_type == ADD and length > 30:
            assert message.request_id in ("r1", "cmpl-460c4fe9-406d6b5f")
        if request_type == UTILITY and length > 2:
            method = "sleep" if length > 8 else "?"
            assert message.call == UtilityCall(0, 7, method)


@pytest.mark.parametrize(("request_type", "payload"), GOLDEN_MESSAGES)
def test_message_with_bytes_left_over_is_unreadable(request_type: bytes, payload: bytes) -> None:
    unreadable([request_type, payload + b"\x00"])


@pytest.mark.parametrize(("request_type", "payload"), GOLDEN_MESSAGES)
def test_message_with_any_bit_flipped_is_sane(request_type: bytes, payload: bytes) -> None:
    for damaged in _with_one_bit_flipped(payload):
        sane(read_message([request_type, damaged], 0))


def test_envelope_cut_off_or_with_any_bit_flipped_is_a_wire_error() -> None:
    for payload in GOLDEN_ENVELOPES:
        for damaged in (payload[: len(payload) // 2], *_with_one_bit_flipped(payload)):
            with contextlib.suppress(WireError):
                read_envelope([damaged])
    for length in range(len(GOLDEN_ENVELOPES[1])):
        with pytest.raises(WireError):
            read_envelope([GOLDEN_ENVELOPES[1][:length]])


def _with_one_bit_flipped(payload: bytes) -> Iterator[bytes]:
    for position in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        yield bytes(damaged)


# Frames.


def test_message_of_any_number_of_frames_is_sane() -> None:
    assert unreadable([]) == Unreadable("a message without frames", "", (), flaw=Flaw.FRAMING)
    assert unreadable([ADD]) == Unreadable("no payload frame", "ADD", (1,), flaw=Flaw.FRAMING)
    assert unreadable([b"", b"", b""]).request_type == ""
    for count in range(2, 6):
        assert isinstance(read_message([ADD, golden("add_rust"), *[b"\x00"] * (count - 2)], 0), Add)
        assert isinstance(read_message([ABORT, golden("abort"), *[b"\x00"] * (count - 2)], 0), Abort)


@pytest.mark.parametrize(
    ("frames", "flaw"),
    [
        ([b"\x09", b"\xc0"], Flaw.FRAMING),
        ([ADD, b"\xc1"], Flaw.NOT_MSGPACK),
        ([ADD, b"\x92\xa2r1"], Flaw.NOT_MSGPACK),
        ([ABORT, b"\x91\xa1\xff"], Flaw.NOT_MSGPACK),
        ([ABORT, b"\xdd\x00\x04\x00\x00" + b"\x90" * 2**18], Flaw.TOO_LARGE),
        ([ABORT, b"\xc0" * (MAX_PAYLOAD_BYTES + 1)], Flaw.TOO_LARGE),
        ([ABORT, b"\xc0"], Flaw.MALFORMED),
    ],
    ids=["type", "reserved byte", "truncated", "text", "containers", "bytes", "type of value"],
)
def test_what_is_wrong_is_of_a_kind(frames: list[bytes], flaw: Flaw) -> None:
    assert unreadable(frames).flaw is flaw


def test_every_wrong_type_byte_is_named() -> None:
    for byte in range(4, 256):
        message = unreadable([bytes([byte]), golden("add_rust")])
        assert (message.request_type, message.request_id) == (f"{byte:02x}", None)
        assert f"request type {byte:02x}" in message.reason
    assert unreadable([b"\x00\x00", golden("add_rust")]).request_type == "0000"
    assert unreadable([b"x" * 10_000_000, golden("add_rust")]).request_type == "7878787878787878"


def test_envelope_of_any_number_of_frames_is_a_wire_error_at_most() -> None:
    with pytest.raises(WireError):
        read_envelope([])
    with pytest.raises(EngineCoreDead):
        read_envelope([b"ENGINE_CORE_DEAD"])
    with pytest.raises(WireError):
        read_envelope([b"ENGINE_CORE_DEAD", b""])
    for count in range(1, 6):
        read_envelope([golden("logprobs"), *[b""] * (count - 1)])


@SEARCH
@given(frames=st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames_are_sane(frames: list[bytes]) -> None:
    sane(read_message(frames, 0))


@settings(SEARCH, max_examples=300)
@given(request_type=st.sampled_from([ADD, ABORT, START_DP_WAVE, UTILITY]), payload=st.binary(max_size=200))
def test_random_payloads_are_sane(request_type: bytes, payload: bytes) -> None:
    sane(read_message([request_type, payload], 0))


@settings(SEARCH, max_examples=300)
@given(data=st.binary(max_size=200))
def test_random_bytes_to_any_other_reader_are_a_wire_error(data: bytes) -> None:
    readers: list[Callable[[bytes], object]] = [read_status, read_init, read_ready_response, read_event_batch]
    for read in readers:
        with contextlib.suppress(WireError):
            read(data)
    for line in (LINES[0], LINES[-1]):
        # The search knows the word for a dead engine.
        with contextlib.suppress(WireError, EngineCoreDead):
            read_envelope([data], line)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=10)
    | st.sampled_from([msgpack.ExtType(code, b"\x00") for code in (1, 2, 3, 127)])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from([*REQUEST[3], "type", "data"]) | scalars, inner, max_size=6)
    ),
    max_leaves=12,
)


@SEARCH
@given(values=st.lists(anything, max_size=25), request_id=st.just("r1") | anything)
def test_request_of_anything_is_sane(values: list[Any], request_id: Any) -> None:
    message = sane(read_message([ADD, msgpack.packb([request_id, *values]), b"\x00"], 0))
    if request_id == "r1":
        found = message.request.request_id if isinstance(message, Add) else message.request_id  # type: ignore[union-attr]
        assert found == "r1"


@SEARCH
@given(
    changes=st.dictionaries(st.integers(1, 21), anything, max_size=3),
    sampling=st.dictionaries(st.sampled_from(list(REQUEST[3])), anything, max_size=3),
)
def test_request_with_anything_in_some_fields_is_sane(changes: dict[int, Any], sampling: dict[str, Any]) -> None:
    items = list(REQUEST)
    items[3] = REQUEST[3] | sampling
    for position, value in changes.items():
        items[position] = value
    message = sane(read_message([ADD, msgpack.packb(items), b"\x00"], 0))
    assert isinstance(message, (Add, Unreadable))


@SEARCH
@given(values=st.lists(anything, max_size=6))
def test_call_or_abort_or_wave_of_anything_is_sane(values: list[Any]) -> None:
    for request_type in (ABORT, START_DP_WAVE, UTILITY):
        sane(read_message([request_type, msgpack.packb(values)], 0))
    sane(read_message([UTILITY, msgpack.packb([0, 7, "sleep", values])], 0))


@SEARCH
@given(values=st.lists(anything, max_size=9))
def test_envelope_of_anything_is_a_wire_error_at_most(values: list[Any]) -> None:
    for envelope in (values, [0, [["r", [1], *values]], None, 1.0]):
        with contextlib.suppress(WireError):
            read_envelope([msgpack.packb(envelope)])


# What of a broken message can be saved.


@pytest.mark.parametrize(
    ("payload", "request_id"),
    [
        (b"\x91\xa2r1", None),
        (b"\x92\xa2r1", "r1"),
        (b"\x92\xa2r1\xc1", "r1"),
        (b"\xdd\xff\xff\xff\xff\xa2r1", "r1"),
        (b"\x92\xa2r1" + b"\x91" * 5000, "r1"),
        (b"\x92\xa2r1\xd4\x01\x80", "r1"),
        (b"\x92\xa2r1\x01", "r1"),
        (b"\x92\xa2\xff\xfe\x01", None),
        (b"\x92\xc4\x02r1\x01", None),
        (b"\x92\x01\x01", None),
        (b"\x92" + packed("x" * 70_000) + b"\x01", "x" * 70_000),
        (b"\x92" + packed("x" * (MAX_ANSWERED_ID_BYTES + 1)) + b"\x01", None),
        (b"\x81\xa2r1\x01", None),
        (b"\xa2r1", None),
        (b"", None),
    ],
)
def test_id_of_a_broken_request_is_saved_where_it_can_be(payload: bytes, request_id: str | None) -> None:
    message = sane(read_message([ADD, payload], 0))
    if payload == b"\x91\xa2r1":
        # The shortest request there is: the engine refuses it for what it lacks.
        assert isinstance(message, Add)
    else:
        assert isinstance(message, Unreadable)
        assert message.request_id == request_id


@pytest.mark.parametrize(
    ("payload", "call"),
    [
        (b"\x93\x00\x07\xa5sleep", UtilityCall(0, 7, "sleep")),
        (b"\x95\x00\x07\xa5sleep\x90\x90", UtilityCall(0, 7, "sleep")),
        (b"\x94\x00\x07\xa5sleep\xd4\x01\x80", UtilityCall(0, 7, "sleep")),
        (b"\x94\x00\x07\xa5sleep" + b"\x91" * 2000, UtilityCall(0, 7, "sleep")),
        (b"\x94\x00\x07\xa2\xff\xfe\x90", UtilityCall(0, 7, "?")),
        (b"\x94\x00\x07\x01\x90", UtilityCall(0, 7, "?")),
        (b"\x92\x00\x07", UtilityCall(0, 7, "?")),
        (b"\x94\xff\x07\xa5sleep\x90", UtilityCall(3, 7, "sleep")),
        (b"\x94\xc0\x07\xa5sleep\x90", UtilityCall(3, 7, "sleep")),
        (b"\x94\x00\xff\xa5sleep\x90", None),
        (b"\x94\x00\xc0\xa5sleep\x90", None),
        (b"\x94\x00\xc3\xa5sleep\x90", None),
        (b"\x94\x00\x07" + packed("m" * 1000) + b"\x90", UtilityCall(0, 7, "m" * 256)),
        (b"\x91\x00", None),
        (b"", None),
    ],
)
def test_call_is_saved_where_its_id_can_be(payload: bytes, call: UtilityCall | None) -> None:
    assert unreadable([UTILITY, payload]).call == call


def test_id_of_minus_one_is_never_answered() -> None:
    """An engine speaks of its own accord under that id, and a Python frontend of one rank dies of hearing it."""
    for call_id in (-1, -2, -(2**63)):
        assert unreadable([UTILITY, msgpack.packb([0, call_id, "sleep", []])]).call is None


@pytest.mark.parametrize(
    ("payload", "is_pooling"),
    [
        (packed(["r", [1], None, None, [True]]), True),
        (packed(["r", [1], None, None, ["yes", None, None, None, "embed"]]), True),
        (packed(["r", "prompt", None, None, [None] * 11]), True),
        (packed(["r", [1], None, None, Raw(b"\xc1")]), True),
        (packed(["r", [1], None, {"max_tokens": -1}, None]), False),
        (packed(["r", "prompt", None, None, None]), False),
        (packed(["r", [1], None, Raw(b"\xc1")]), False),
        (packed(["r", Raw(b"\xc1")]), False),
    ],
)
def test_broken_pooling_request_is_told_from_others(payload: bytes, is_pooling: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    message = unreadable([ADD, payload])
    assert (message.request_id, message.is_pooling) == ("r", is_pooling)


# What travels through unread.


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_arguments_are_nested_no_deeper_than_can_be_shown_and_sent_back() -> None:
    deepest = UtilityCall(0, 7, "sleep", tuple(nested(128)))
    assert read_message([UTILITY, msgpack.packb([0, 7, "sleep", nested(128)])], 0) == deepest
    message = unreadable([UTILITY, msgpack.packb([0, 7, "sleep", nested(129)])])
    assert message.reason == "args: arrays and maps nested more than 128 deep"
    assert message.call == UtilityCall(0, 7, "sleep")


def test_arguments_may_hold_bytes_but_no_time() -> None:
    call = read_message([UTILITY, packed([0, 7, "sleep", [b"\x01", Raw(b"\xd4\x03\x02")]])], 0)
    assert call == UtilityCall(0, 7, "sleep", (b"\x01", b"\x02"))
    message = unreadable([UTILITY, packed([0, 7, "sleep", [Raw(HOSTILE["timestamp"])]])])
    assert message.reason.startswith("args: datetime ")
    assert message.reason.endswith(" where a plain value is expected")


@pytest.mark.parametrize("field", ["extra_args", "structured_outputs", "repetition_detection"])
def test_maps_a_request_carries_have_names_for_keys(field: str) -> None:
    message = unreadable([ADD, msgpack.packb(["r", [1], None, {field: {1: 2}}])])
    assert message.reason == f"sampling_params.{field} key: int 1 where a str is expected"
    assert message.request_id == "r"


@pytest.mark.parametrize("wave", [2**31 - 1, 2**31])
def test_wave_leaves_room_for_the_waves_after_it(wave: int) -> None:
    """A rank follows the highest wave it hears of, and says the next one at its end."""
    request = list(REQUEST)
    request[12] = wave
    fits = wave < 2**31
    assert isinstance(read_message([ADD, msgpack.packb(request), b"\x00"], 0), Add) == fits
    assert isinstance(read_message([START_DP_WAVE, msgpack.packb([wave, None])], 0), StartDpWave) == fits


# Bounds.


def cost_of(read: Callable[[], object]) -> tuple[float, int]:
    """Return CPU seconds and peak bytes that `read` takes, with what it holds at its peak beside its argument."""
    tracemalloc.start()
    try:
        start = time.thread_time()
        read()
        return time.thread_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MEGABYTE: Final = 2**20
BOMBS: Final[Mapping[str, bytes]] = {
    "nested arrays": b"\x91" * 10_000_000,
    "nested maps": b"\x81\xa0" * 5_000_000,
    "nested claims": (b"\xdd" + (4_000_000).to_bytes(4, "big")) * 1000 + b"\xc0" * 4_000_000,
    "nested claims of pairs": (b"\xdf" + (1_000_000).to_bytes(4, "big") + b"\xa0") * 1000 + b"\xc0" * 1_000_000,
    "empty arrays": b"\xdd" + (10_000_000).to_bytes(4, "big") + b"\x90" * 10_000_000,
    "empty maps": b"\xdd" + (10_000_000).to_bytes(4, "big") + b"\x80" * 10_000_000,
    "claim of 4 G items": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 1000,
    "claim of 4 G pairs": b"\xdf\xff\xff\xff\xff" + b"\xc0" * 1000,
    "claim of a 4 GB str": b"\xdb\xff\xff\xff\xff" + b"x" * 1000,
    "claim of a 4 GB bin": b"\xc6\xff\xff\xff\xff" + b"x" * 1000,
    "claim of a 4 GB extension": b"\xc9\xff\xff\xff\xff\x03" + b"x" * 1000,
    "10 MB id": packed(["x" * 10_000_000, [1]]),
    "10 MB of garbage": bytes(range(256)) * 40_000,
    "shape of many dimensions": packed(
        ["r", None, None, {}, None, 0.0, None, None, None, ["f", [2**64 - 1] * 60_000, msgpack.ExtType(3, b"")]]
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_costs_little_memory_and_time(name: str) -> None:
    bomb = BOMBS[name]
    seconds, peak = cost_of(lambda: unreadable([ADD, bomb]))
    assert seconds < 5
    assert peak < 12 * len(bomb) + 128 * MEGABYTE
    # The other readers begin in the same way, so two of them stand for all.
    assert isinstance(read_message([ABORT, bomb], 0), (Abort, Unreadable))
    with pytest.raises(WireError):
        read_envelope([bomb])


def test_too_many_arrays_are_refused_before_they_take_memory() -> None:
    most = packed(["r", [1], None, {"_bad_words_token_ids": Raw(_array_of_arrays(MAX_CONTAINERS - 4))}])
    one_more = packed(["r", [1], None, {"_bad_words_token_ids": Raw(_array_of_arrays(MAX_CONTAINERS - 3))}])
    assert isinstance(read_message([ADD, most], 0), Add)
    message = unreadable([ADD, one_more])
    assert message.request_id == "r"
    assert message.reason == f"more than {MAX_CONTAINERS} arrays and maps"


def _array_of_arrays(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


def test_payload_beyond_any_real_one_is_refused_unread() -> None:
    payload = packed(["r", Raw(b"\xc6" + MAX_PAYLOAD_BYTES.to_bytes(4, "big") + bytes(MAX_PAYLOAD_BYTES))])
    message = unreadable([ADD, payload])
    assert message.request_id == "r"
    assert message.reason == f"{len(payload)} bytes where at most {MAX_PAYLOAD_BYTES} are allowed"


def test_long_ids_are_refused_by_their_length_in_bytes() -> None:
    longest = "é" * (MAX_REQUEST_ID_BYTES // 2)
    message = read_message([ADD, msgpack.packb([longest, [1]])], 0)
    assert isinstance(message, Add)
    assert message.request.request_id == longest
    # Too long to serve, but not to be told so.
    assert unreadable([ADD, msgpack.packb([longest + "é", [1]])]).request_id == longest + "é"
    longest_answered = "é" * (MAX_ANSWERED_ID_BYTES // 2)
    assert unreadable([ADD, msgpack.packb([longest_answered + "é", [1]])]).request_id is None


def test_long_ids_to_abort_are_only_looked_up() -> None:
    message = read_message([ABORT, msgpack.packb(["x" * 10_000_000])], 0)
    assert message == Abort(("x" * 10_000_000,))


def test_prompt_of_a_million_tokens_is_read_in_a_few_bytes_per_token() -> None:
    payload = packed(["r", Raw(msgpack.packb([70_000] * 1_000_000)), None, {}])
    message = read_message([ADD, payload], 0)
    assert isinstance(message, Add)
    assert message.request.num_prompt_tokens == 1_000_000
    del message
    _, peak = cost_of(lambda: read_message([ADD, payload], 0))
    assert peak < 64 * MEGABYTE
