# SPDX-License-Identifier: Apache-2.0
"""msgpack as vLLM speaks it: strict about types, deaf to pickles, one kind of error.

Knows msgpack and its extension codes (protocol section 2.3). Knows no message.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

import msgpack

EXT_PICKLE: Final = 1
EXT_CLOUDPICKLE: Final = 2
EXT_RAW_VIEW: Final = 3
MAX_PAYLOAD_BYTES: Final = 64 * 2**20
"""A prompt of a million tokens has 5 MB; what is larger than this is no message of vLLM's."""
MAX_CONTAINERS: Final = 250_000
"""Arrays and maps in one payload. An empty one is a single byte on the wire and 64 in memory, each of them watched by
the garbage collector; real messages hold a few, the largest step of a big engine some ten thousand."""

# Sockets carry any text, but a lone surrogate (JSON can hold one) has no UTF-8: it must not stop the engine.
_packer = msgpack.Packer(use_bin_type=True, autoreset=True, unicode_errors="replace")
_TIMESTAMP_AS_DATETIME: Final = 3


class Flaw(StrEnum):
    """Kinds of what can be wrong with a message, few enough to count by."""

    FRAMING = "framing"
    TOO_LARGE = "too_large"
    NOT_MSGPACK = "not_msgpack"
    MALFORMED = "malformed"
    MISDIRECTED = "misdirected"


class WireError(ValueError):
    """Bytes that are not the message they should be. The text names the place, what is there and what is allowed.

    Attributes:
        flaw: the kind of it.

    """

    def __init__(self, text: str, flaw: Flaw = Flaw.MALFORMED) -> None:
        super().__init__(text)
        self.flaw = flaw


class RawView(bytes):
    """The payload of an extension of code 3: the raw little-endian, C-order bytes of an array."""

    __slots__ = ()


def pack(value: object) -> bytes:
    """Encode `value` as msgpack. Floats are float64, `RawView` becomes extension 3.

    One thread encodes: the packer and its buffer are shared to spare an allocation for each message.
    """
    packed: bytes = _packer.pack(value)
    return packed


def raw_view(data: bytes) -> msgpack.ExtType:
    """Wrap raw array bytes for `pack`: extension of code 3."""
    return msgpack.ExtType(EXT_RAW_VIEW, data)


def unpack(data: bytes) -> Any:
    """Decode exactly one msgpack value.

    Raises:
        WireError: truncated, trailing bytes, invalid UTF-8, nesting too deep, too large, a map key that cannot be one,
            or an extension that is never decoded (pickles).

    """
    if len(data) > MAX_PAYLOAD_BYTES:
        raise WireError(f"{len(data)} bytes where at most {MAX_PAYLOAD_BYTES} are allowed", Flaw.TOO_LARGE)
    # A container takes a byte at least, so a short payload cannot hold too many: nearly all need not be counted.
    options = _options() if len(data) > MAX_CONTAINERS else _UNCOUNTED
    try:
        return msgpack.unpackb(data, **options)
    except WireError:
        raise
    except Exception as error:
        raise _not_msgpack(error) from error


def unpack_plainly(data: bytes) -> Any:
    """Decode what `pack` has made such that `pack` makes the same of it again: extensions stay as they are."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def leading_items(data: bytes, count: int) -> list[Any]:
    """Read up to `count` leading items of a msgpack array of which the rest may be broken.

    For messages that cannot be read as a whole: the id at their head still tells whom to answer.

    Returns:
        The items before the first one that cannot be read; an empty list when `data` is no array.

    """
    items: list[Any] = []
    try:
        unpacker = _unpacker_of(data)
        length = _reading(unpacker.read_array_header)
        while len(items) < min(count, length):
            items.append(_reading(unpacker.unpack))
    except WireError:
        pass
    return items


def has_nil_at(data: bytes, position: int) -> bool | None:
    """Tell whether the item at `position` of a msgpack array is nil, without reading any; None when that is unknown."""
    try:
        unpacker = _unpacker_of(data)
        if _reading(unpacker.read_array_header) <= position:
            return None
        for _ in range(position):
            _reading(unpacker.skip)
    except WireError:
        return None
    at = unpacker.tell()
    return data[at : at + 1] == _NIL if at < len(data) else None


_NIL: Final = b"\xc0"


def _unpacker_of(data: bytes) -> msgpack.Unpacker:
    head = data[:MAX_PAYLOAD_BYTES]
    unpacker = msgpack.Unpacker(**_options(), max_buffer_size=max(len(head), 1))
    unpacker.feed(head)
    return unpacker


def _options() -> dict[str, Any]:
    count_container = _ContainerCount()
    return {**_UNCOUNTED, "list_hook": count_container, "object_hook": count_container}


class _ContainerCount:
    """Lets arrays and maps of one payload pass until there are too many."""

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise WireError(f"more than {MAX_CONTAINERS} arrays and maps", Flaw.TOO_LARGE)
        return container


def _reading(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except WireError:
        raise
    except Exception as error:
        raise _not_msgpack(error) from error


def _not_msgpack(error: Exception) -> WireError:
    """Say what msgpack found: it raises ValueError, TypeError, OverflowError and subclasses of its own."""
    if isinstance(error, UnicodeDecodeError):
        return WireError(f"a string is not UTF-8: {error.reason} at byte {error.start} of it", Flaw.NOT_MSGPACK)
    if isinstance(error, RecursionError):
        return WireError("nested too deeply", Flaw.TOO_LARGE)
    return WireError(f"not msgpack: {str(error) or type(error).__name__}", Flaw.NOT_MSGPACK)


def _read_ext(code: int, data: bytes) -> RawView:
    if code == EXT_RAW_VIEW:
        return RawView(data)
    if code in (EXT_PICKLE, EXT_CLOUDPICKLE):
        raise WireError(f"extension {code} is a pickle, which is never decoded")
    raise WireError(f"extension {code} is unknown (only {EXT_RAW_VIEW}, raw array bytes, is)")


_UNCOUNTED: Final[Mapping[str, Any]] = {
    "raw": False,
    "strict_map_key": False,
    "ext_hook": _read_ext,
    # The one extension msgpack decodes itself. As a number it would pass for one, and as msgpack's own type its hash is
    # known beforehand, so that maps of it could be made slow.
    "timestamp": _TIMESTAMP_AS_DATETIME,
}
