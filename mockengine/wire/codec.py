# SPDX-License-Identifier: Apache-2.0
"""msgpack as vLLM speaks it: strict about types, deaf to pickles, one kind of error.

Knows msgpack and its extension codes (protocol section 2.3). Knows no message.
"""

from collections.abc import Callable
from typing import Any, Final

import msgpack

EXT_PICKLE: Final = 1
EXT_CLOUDPICKLE: Final = 2
EXT_RAW_VIEW: Final = 3

_packer = msgpack.Packer(use_bin_type=True, autoreset=True)


class WireError(ValueError):
    """Bytes that are not the message they should be. The text names the place, what is there and what is allowed."""


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
        WireError: truncated, trailing bytes, invalid UTF-8, nesting too deep, a map key that cannot be one, or an
            extension that is never decoded (pickles).

    """
    return _reading(lambda: msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=_read_ext))


def leading_items(data: bytes, count: int) -> list[Any]:
    """Read up to `count` leading items of a msgpack array of which the rest may be broken.

    For messages that cannot be read as a whole: the id at their head still tells whom to answer.

    Returns:
        The items before the first one that cannot be read; an empty list when `data` is no array.

    """
    items: list[Any] = []
    try:
        unpacker = msgpack.Unpacker(
            raw=False, strict_map_key=False, ext_hook=_read_ext, max_buffer_size=max(len(data), 1)
        )
        unpacker.feed(data)
        length = _reading(unpacker.read_array_header)
        while len(items) < min(count, length):
            items.append(_reading(unpacker.unpack))
    except WireError:
        pass
    return items


def _reading(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except WireError:
        raise
    except UnicodeDecodeError as error:
        raise WireError(f"a string is not UTF-8: {error.reason} at byte {error.start} of it") from error
    except RecursionError as error:
        raise WireError("nested too deeply") from error
    except Exception as error:  # msgpack raises ValueError, TypeError, OverflowError and subclasses of its own
        raise WireError(f"not msgpack: {str(error) or type(error).__name__}") from error


def _read_ext(code: int, data: bytes) -> RawView:
    if code == EXT_RAW_VIEW:
        return RawView(data)
    if code in (EXT_PICKLE, EXT_CLOUDPICKLE):
        raise WireError(f"extension {code} is a pickle, which is never decoded")
    raise WireError(f"extension {code} is unknown (only {EXT_RAW_VIEW}, raw array bytes, is)")
