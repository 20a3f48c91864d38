# SPDX-License-Identifier: Apache-2.0
"""KV-cache events: a real engine's bytes, both forms, publishing and replay."""

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.wire.codec import WireError, pack
from mockengine.wire.kv_events import (
    REPLAY_END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventForm,
    KVCacheEvent,
    KVEventBatch,
    KVEventMessage,
    event_form,
    event_message,
    read_event_batch,
    read_event_message,
    read_sequence,
    write_event_batch,
)
from tests.wire.forms import SEARCH, golden, plain, recorded

STORED = BlockStored(block_hashes=(12345,), parent_block_hash=678, token_ids=(1, 2), block_size=2)
EVERYTHING = BlockStored(
    block_hashes=(1, b"\x02" * 32),
    parent_block_hash=b"\x01" * 32,
    token_ids=(5, 6, 7, 8),
    block_size=2,
    lora_id=3,
    medium="CPU",
    lora_name="l",
    extra_keys=(("l", 4), None),
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=128,
    locality="LOCAL",
    ownership="o",
    session_id="s",
    lookahead_token_ids=(9,),
)
EVERYTHING_AS_MAP = {
    "type": "BlockStored",
    "block_hashes": [1, b"\x02" * 32],
    "parent_block_hash": b"\x01" * 32,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": 3,
    "medium": "CPU",
    "lora_name": "l",
    "extra_keys": [["l", 4], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "o",
    "session_id": "s",
    "lookahead_token_ids": [9],
}


def batch(*events: KVCacheEvent, rank: int | None = 0) -> KVEventBatch:
    return KVEventBatch(1000.5, events, rank)


def event_said(said: dict[str, Any]) -> KVCacheEvent:
    """Make the value of a recorded event."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in said.items() if key != "type"
    }
    if "extra_keys" in fields:
        fields["extra_keys"] = tuple(None if keys is None else tuple(keys) for keys in said["extra_keys"])
    match said["type"]:
        case "BlockStored":
            return BlockStored(**fields)
        case "BlockRemoved":
            return BlockRemoved(**fields)
        case _:
            return AllBlocksCleared(**fields)


def test_every_payload_of_a_real_engine_is_reproduced_byte_for_byte() -> None:
    records = recorded("kv_events")
    assert len(records) == 31
    assert [record["sequence"] for record in records] == list(range(31))
    for record in records:
        timestamp, events, rank = record["said"]
        told = KVEventBatch(timestamp, tuple(event_said(event) for event in events), rank)
        payload, ours = bytes.fromhex(record["payload"]), write_event_batch(told)
        if record["is_whole"]:
            assert ours == payload
            assert read_event_batch(payload) == told
        else:
            # The recording breaks off here, its decoded form does not.
            assert ours.startswith(payload)
        assert read_event_batch(ours) == told
        assert plain(ours) == record["said"]
    assert sum(record["is_whole"] for record in records) == 26


def test_golden_batch_reads_as_described_and_is_written_byte_for_byte() -> None:
    told = batch(replace(STORED, lora_id=1, lora_name="a"), rank=None)
    assert read_event_batch(golden("kv_events")) == told
    assert write_event_batch(told) == golden("kv_events")


def test_map_says_every_field_in_the_order_of_a_real_engine() -> None:
    (event,) = plain(write_event_batch(batch(EVERYTHING)))[1]
    assert event == EVERYTHING_AS_MAP
    assert list(event) == list(EVERYTHING_AS_MAP)


def test_map_leaves_out_what_is_not_set_but_for_the_fields_always_there() -> None:
    removed = BlockRemoved(block_hashes=(1,), medium=None)
    payload = write_event_batch(
        batch(replace(STORED, parent_block_hash=None, medium=None), removed, AllBlocksCleared())
    )
    assert plain(payload) == [
        1000.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [12345],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": None,
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [1], "medium": None},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_array_form_has_the_tag_first_and_the_fields_that_lines_with_it_know() -> None:
    events = (
        replace(STORED, extra_keys=(("s1",),)),
        STORED,
        BlockRemoved(block_hashes=(1, 2)),
        AllBlocksCleared(),
    )
    payload = write_event_batch(batch(*events), EventForm.ARRAY)
    assert plain(payload) == [
        1000.5,
        [
            ["BlockStored", [12345], 678, [1, 2], 2, None, "GPU", None, [["s1"]]],
            ["BlockStored", [12345], 678, [1, 2], 2, None, "GPU", None, None],
            ["BlockRemoved", [1, 2], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    assert read_event_batch(payload) == batch(*events)


def test_array_form_says_the_group_where_there_is_one() -> None:
    events = (replace(STORED, group_idx=0), BlockRemoved(block_hashes=(1,), group_idx=0))
    payload = write_event_batch(batch(*events), EventForm.ARRAY)
    assert plain(payload)[1] == [
        ["BlockStored", [12345], 678, [1, 2], 2, None, "GPU", None, None, 0],
        ["BlockRemoved", [1], "GPU", 0],
    ]
    assert read_event_batch(payload) == batch(*events)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_batches_of_any_length_have_the_shortest_header(count: int) -> None:
    told = KVEventBatch(1.0, (AllBlocksCleared(),) * count, 3)
    payload = write_event_batch(told)
    assert payload == msgpack.packb([1.0, [{"type": "AllBlocksCleared"}] * count, 3])
    assert read_event_batch(payload) == told


def test_message_has_topic_sequence_and_payload() -> None:
    told = batch(STORED)
    payload = write_event_batch(told)
    frames = event_message("kv-events", 258, payload)
    assert frames == [b"kv-events", b"\x00\x00\x00\x00\x00\x00\x01\x02", payload]
    assert read_event_message(frames) == KVEventMessage("kv-events", 258, told)
    assert read_event_message(event_message("", 0, payload)) == KVEventMessage("", 0, told)


def test_replay_ends_with_sequence_minus_one_and_nothing_else() -> None:
    assert REPLAY_END == (b"", b"\xff" * 8, b"")
    assert read_event_message(list(REPLAY_END)) is None


def test_replay_request_is_a_sequence() -> None:
    assert read_sequence(b"\x00\x00\x00\x00\x00\x00\x00\x07") == 7


def test_later_keys_and_items_are_passed_over() -> None:
    later = [1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "new": 1, 5: 2}], 0]
    assert read_event_batch(pack(later)) == KVEventBatch(1.0, (BlockRemoved(block_hashes=(1,)),), 0)
    longer = [1.0, [["BlockRemoved", [1], "GPU", None, None, None, "new"]]]
    assert read_event_batch(pack(longer)) == KVEventBatch(1.0, (BlockRemoved(block_hashes=(1,)),))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not msgpack: Unpack failed: incomplete input"),
        (pack({}), "KVEventBatch: map of 0 where an array is expected"),
        (pack([1.0]), "KVEventBatch: array of 1 where an array of 2 or 3 is expected"),
        (pack(["now", []]), "ts: str 'now' where a number is expected"),
        (pack([1.0, None]), "events: nil where an array is expected"),
        (pack([1.0, [], -1]), "data_parallel_rank: int -1 where an int of 0 to 18446744073709551615 is expected"),
        (pack([1.0, [7]]), "events[0]: int 7 where a map is expected"),
        (pack([1.0, [[]]]), "events[0].type: nil where one of BlockStored, BlockRemoved, AllBlocksCleared is expected"),
        (
            pack([1.0, [{"type": "Moved"}]]),
            "events[0].type: str 'Moved' where one of BlockStored, BlockRemoved, AllBlocksCleared is expected",
        ),
        (pack([1.0, [["BlockRemoved"]]]), "events[0].block_hashes: nil where a value is expected"),
        (
            pack([1.0, [["BlockRemoved", ["x"]]]]),
            "events[0].block_hashes[0]: str 'x' where an int of 0 to 18446744073709551615 is expected",
        ),
    ],
)
def test_broken_batch_says_what_is_wrong(payload: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        read_event_batch(payload)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"topic", b"\x00" * 8], "KV events: 2 frames where topic, sequence and payload are expected"),
        ([b"\xff", b"\x00" * 8, b""], "KV events: the topic is not UTF-8"),
        ([b"", b"\x00" * 7, b""], "KV events: a sequence of 7 bytes where 8 are expected"),
    ],
)
def test_broken_message_says_what_is_wrong(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError) as caught:
        read_event_message(frames)
    assert str(caught.value) == reason


hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=32, max_size=32)
optional_names = st.none() | st.text(max_size=5)
optional_numbers = st.none() | st.integers(0, 2**32)
several_tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple)
extra_keys = st.none() | st.lists(st.text(max_size=3) | st.integers(0, 9), max_size=2).map(tuple)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=20).map(tuple),
    parent_block_hash=st.none() | hashes,
    token_ids=several_tokens,
    block_size=st.integers(1, 256),
    lora_id=optional_numbers,
    medium=optional_names,
    lora_name=optional_names,
    extra_keys=st.none() | st.lists(extra_keys, max_size=20).map(tuple),
    group_idx=optional_numbers,
    kv_cache_spec_kind=optional_names,
    kv_cache_spec_sliding_window=optional_numbers,
    locality=optional_names,
    ownership=optional_names,
    session_id=optional_names,
    lookahead_token_ids=st.none() | several_tokens,
)
removed = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, max_size=3).map(tuple),
    medium=optional_names,
    group_idx=optional_numbers,
    locality=optional_names,
    ownership=optional_names,
)


@SEARCH
@given(
    events=st.lists(stored | removed | st.just(AllBlocksCleared()), max_size=4).map(tuple),
    timestamp=st.floats(0, 1e10),
    rank=optional_numbers,
    form=st.sampled_from(EventForm),
)
def test_any_batch_survives_being_written_and_read(
    events: tuple[KVCacheEvent, ...], timestamp: float, rank: int | None, form: EventForm
) -> None:
    told = KVEventBatch(timestamp, events, rank)
    assert read_event_batch(write_event_batch(told, form)) == told


@SEARCH
@given(data=st.binary(max_size=60))
def test_any_bytes_raise_nothing_but_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(read_event_batch(data), KVEventBatch)


@pytest.mark.parametrize(
    ("release", "form"),
    [("0.19", EventForm.ARRAY), ("0.20.1", EventForm.ARRAY), ("0.21.0", EventForm.MAP), ("0.100", EventForm.MAP)],
)
def test_the_release_tells_the_form(release: str, form: EventForm) -> None:
    assert event_form(release) is form
