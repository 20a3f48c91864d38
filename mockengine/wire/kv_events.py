# SPDX-License-Identifier: Apache-2.0
"""KV-cache events: what an engine tells routers of the blocks it holds (protocol section 9).

An event is a map with its `type`, or, from engines of 0.19 and 0.20, an array with its tag first. The batch around
them is an array in both. The bytes are those of a real 0.33 engine, down to the order of keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from mockengine.wire.codec import WireError, pack, unpack
from mockengine.wire.values import array, integer, integers, mapping, number, plain, string, wrong

BlockHash = int | bytes
"""What identifies a block and its whole prefix: 64 bits as an unsigned int by default, or 32 bytes."""

ExtraKeys = tuple[object, ...] | None
"""What entered a block's hash beside its tokens: adapter name, cache salt, identifiers of images …"""

_LAST_MINOR_OF_ARRAYS: Final = 20
_SEQUENCE_BYTES: Final = 8
_MESSAGE_FRAMES: Final = 3
_BATCH_ITEMS_LEAST: Final = 2
_BATCH_ITEMS_MOST: Final = 3
_FIXARRAY_ITEMS: Final = 16
_FIXMAP_ITEMS: Final = 16
_ARRAY16_ITEMS_MOST: Final = 0xFFFF
_END_SEQUENCE: Final = b"\xff" * _SEQUENCE_BYTES

REPLAY_END: Final = (b"", _END_SEQUENCE, b"")
"""The frames that end a replay, after the delimiter: no topic, sequence -1, no payload."""


class EventForm(Enum):
    """How events are written: `MAP` since 0.21, `ARRAY` up to 0.20."""

    MAP = auto()
    ARRAY = auto()


def event_form(release: str) -> EventForm:
    """Return how a release of vLLM, such as `0.33.0`, writes events."""
    return EventForm.ARRAY if int(release.split(".")[1]) <= _LAST_MINOR_OF_ARRAYS else EventForm.MAP


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks became full and may be hit from now on.

    Attributes:
        block_hashes: of the blocks, each the child of the one before.
        parent_block_hash: of the block before the first; None when that begins a prompt.
        token_ids: of all blocks together.
        block_size: in tokens.
        medium: where they are; `"GPU"`.
        extra_keys: an entry per block.
        group_idx: which group of the KV cache; engines up to 0.19 have none.
        kv_cache_spec_kind: `"full_attention"`, `"sliding_window"` …
        kv_cache_spec_sliding_window: its window, in tokens.

    The other attributes are named and ordered as in vLLM. What is None is left out where vLLM leaves it out.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks can no longer be hit; their room was given to others."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """What one step did to the cache; `ts` is in unix seconds."""

    ts: float
    events: tuple[KVCacheEvent, ...]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class KVEventMessage:
    """A batch as published: under a topic, which may be empty, and a number that counts the publisher's batches."""

    topic: str
    sequence: int
    batch: KVEventBatch


def write_event_batch(batch: KVEventBatch, form: EventForm = EventForm.MAP) -> bytes:
    """Return the payload of a batch."""
    write = _map_bytes if form is EventForm.MAP else _array_bytes
    events = b"".join(write(event) for event in batch.events)
    # Encoded with nil in place of the events, whose own bytes follow the array header.
    head, tail = pack([batch.ts])[1:], pack(batch.data_parallel_rank)
    return b"\x93" + head + _array_header(len(batch.events)) + events + tail


def read_event_batch(payload: bytes) -> KVEventBatch:
    """Read the payload of a batch in either form; keys and items of later releases are passed over.

    Raises:
        WireError: by place and reason.

    """
    items = array(unpack(payload), "KVEventBatch")
    if not _BATCH_ITEMS_LEAST <= len(items) <= _BATCH_ITEMS_MOST:
        raise wrong("KVEventBatch", items, f"an array of {_BATCH_ITEMS_LEAST} or {_BATCH_ITEMS_MOST}")
    timestamp, events, rank = [*items, None][:_BATCH_ITEMS_MOST]
    return KVEventBatch(
        ts=number(timestamp, "ts"),
        events=tuple(_read_event(item, f"events[{index}]") for index, item in enumerate(array(events, "events"))),
        data_parallel_rank=None if rank is None else integer(rank, "data_parallel_rank"),
    )


def event_message(topic: str, sequence: int, payload: bytes) -> list[bytes]:
    """Return the frames that publish a payload, or answer a replay with it after the delimiter."""
    return [topic.encode(), sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload]


def read_event_message(frames: Sequence[bytes]) -> KVEventMessage | None:
    """Read a published message, or one of a replay without its delimiter; None is the end of a replay.

    Raises:
        WireError: by place and reason.

    """
    if tuple(frames) == REPLAY_END:
        return None
    if len(frames) != _MESSAGE_FRAMES:
        raise WireError(f"KV events: {len(frames)} frames where topic, sequence and payload are expected")
    topic, sequence, payload = frames
    try:
        name = topic.decode()
    except UnicodeDecodeError as error:
        raise WireError("KV events: the topic is not UTF-8") from error
    return KVEventMessage(name, read_sequence(sequence), read_event_batch(payload))


def read_sequence(frame: bytes) -> int:
    """Read the number of a batch, or the one from which on a replay is asked for.

    Raises:
        WireError: not eight bytes.

    """
    if len(frame) != _SEQUENCE_BYTES:
        raise WireError(f"KV events: a sequence of {len(frame)} bytes where {_SEQUENCE_BYTES} are expected")
    return int.from_bytes(frame, "big")


_Reader = Callable[[Any, str], Any]


def _block_hash(value: Any, place: str) -> BlockHash:
    return value if type(value) is bytes else integer(value, place)


def _block_hashes(value: Any, place: str) -> tuple[BlockHash, ...]:
    return tuple(_block_hash(item, f"{place}[{index}]") for index, item in enumerate(array(value, place)))


def _extra_keys(value: Any, place: str) -> tuple[ExtraKeys, ...]:
    return tuple(
        None if item is None else tuple(plain(array(item, f"{place}[{index}]"), place))
        for index, item in enumerate(array(value, place))
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one kind of event is written.

    Attributes:
        make: its class.
        readers: of its fields, in order.
        always: how many of them are said even when nil, as a map.
        always_as_array: the same for the array form, which cannot leave out what stands before something said.
        is_large: whether the map's header takes three bytes at any size: vLLM's encoder writes it before it knows how
            many keys will follow, with room for as many as there may be.

    """

    make: type[KVCacheEvent]
    readers: Mapping[str, _Reader]
    always: int
    always_as_array: int
    is_large: bool = False


_LAYOUTS: Final[Mapping[str, _Layout]] = {
    "BlockStored": _Layout(
        BlockStored,
        {
            "block_hashes": _block_hashes,
            "parent_block_hash": _block_hash,
            "token_ids": integers,
            "block_size": integer,
            "lora_id": integer,
            "medium": string,
            "lora_name": string,
            "extra_keys": _extra_keys,
            "group_idx": integer,
            "kv_cache_spec_kind": string,
            "kv_cache_spec_sliding_window": integer,
            "locality": string,
            "ownership": string,
            "session_id": string,
            "lookahead_token_ids": integers,
        },
        always=7,
        always_as_array=8,
        is_large=True,
    ),
    "BlockRemoved": _Layout(
        BlockRemoved,
        {
            "block_hashes": _block_hashes,
            "medium": string,
            "group_idx": integer,
            "locality": string,
            "ownership": string,
        },
        always=2,
        always_as_array=2,
    ),
    "AllBlocksCleared": _Layout(AllBlocksCleared, {}, always=0, always_as_array=0),
}
_NEVER_NIL: Final = frozenset({"block_hashes", "token_ids", "block_size"})


def _map_bytes(event: KVCacheEvent) -> bytes:
    name = type(event).__name__
    layout = _LAYOUTS[name]
    said: dict[str, object] = {"type": name}
    for index, key in enumerate(layout.readers):
        value = getattr(event, key)
        if value is not None or index < layout.always:
            said[key] = value
    packed = pack(said)
    if not layout.is_large or len(said) >= _FIXMAP_ITEMS:
        return packed
    return b"\xde" + len(said).to_bytes(2, "big") + packed[1:]


def _array_bytes(event: KVCacheEvent) -> bytes:
    name = type(event).__name__
    layout = _LAYOUTS[name]
    values = [getattr(event, key) for key in layout.readers]
    while len(values) > layout.always_as_array and values[-1] is None:
        values.pop()
    return pack([name, *values])


def _array_header(length: int) -> bytes:
    if length < _FIXARRAY_ITEMS:
        return bytes([0x90 | length])
    return b"\xdd" + length.to_bytes(4, "big") if length > _ARRAY16_ITEMS_MOST else b"\xdc" + length.to_bytes(2, "big")


def _read_event(value: Any, place: str) -> KVCacheEvent:
    """Read an event; what the map form lacks and what the array form is too short for is None."""
    tag = (value[0] if value else None) if isinstance(value, list) else mapping(value, place).get("type")
    layout = _LAYOUTS.get(tag) if isinstance(tag, str) else None
    if layout is None:
        raise wrong(f"{place}.type", tag, f"one of {', '.join(_LAYOUTS)}")
    said = dict(zip(layout.readers, value[1:], strict=False)) if isinstance(value, list) else value
    fields: dict[str, Any] = {}
    for key, read in layout.readers.items():
        item = said.get(key)
        if item is None and key in _NEVER_NIL:
            raise wrong(f"{place}.{key}", item, "a value")
        fields[key] = None if item is None else read(item, f"{place}.{key}")
    return layout.make(**fields)
