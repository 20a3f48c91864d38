# SPDX-License-Identifier: Apache-2.0
"""Tensors and arrays on the wire: `[dtype, shape, data]` (protocol section 2.3).

Knows their form, not their numbers: data stays raw bytes, so that nothing here needs an array library.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from mockengine.wire.codec import RawView, WireError, raw_view
from mockengine.wire.values import array, integers, string, wrong

_TENSOR_ITEMS = 3
_DIMENSIONS_MOST: Final = 16
"""A product of many large dimensions takes for ever to compute; real tensors have five at most."""
_LARGE_BYTES: Final = 256
"""From here on vLLM sends data in a frame of its own."""
_TYPESTR: Final = re.compile(r"[<|][?biufc]([0-9]{1,2})", re.ASCII)
_ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor or array.

    Attributes:
        dtype: as spelled on the wire: a torch name (`"float32"`) for a tensor, a numpy typestr (`"<f4"`) for an array.
        shape: length of each dimension; `()` is a scalar.
        data: raw little-endian bytes in C order.

    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def is_ndarray(self) -> bool:
        """Whether it is a numpy array rather than a torch tensor; where one is due the other kills a frontend."""
        return _TYPESTR.fullmatch(self.dtype) is not None

    def to_wire(self, aux_frames: list[bytes] | None = None) -> list[Any]:
        """Return the wire form with the data inline, which receivers accept at any size.

        Args:
            aux_frames: those of the message, to which large data is added instead, so that nobody has to copy it.

        Raises:
            ValueError: the data does not fill the shape.

        """
        _check_size(self, "tensor")
        if aux_frames is None or len(self.data) < _LARGE_BYTES:
            return [self.dtype, list(self.shape), raw_view(self.data)]
        aux_frames.append(self.data)
        return [self.dtype, list(self.shape), len(aux_frames)]


def read_tensor(value: Any, aux_frames: Sequence[bytes], place: str) -> Tensor:
    """Read a tensor whose data lies inline or in one of the message's auxiliary frames.

    Args:
        value: the decoded 3-array.
        aux_frames: the frames after the payload; the payload itself counts as frame 0, the first of these as frame 1.
        place: where the tensor stands, for messages.

    Raises:
        WireError: not a tensor, a frame that is not there, shared memory, or a size that contradicts the shape.

    """
    items = array(value, place)
    if len(items) != _TENSOR_ITEMS:
        raise wrong(place, items, "a tensor [dtype, shape, data]")
    dtype = string(items[0], f"{place}.dtype")
    shape = integers(items[1], f"{place}.shape")
    if len(shape) > _DIMENSIONS_MOST:
        raise WireError(f"{place}.shape: {len(shape)} dimensions where at most {_DIMENSIONS_MOST} are allowed")
    tensor = Tensor(dtype, shape, _read_data(items[2], aux_frames, f"{place}.data"))
    _check_size(tensor, place)
    return tensor


def _check_size(tensor: Tensor, place: str) -> None:
    expected_bytes = prod(tensor.shape) * _item_bytes(tensor.dtype, place)
    if len(tensor.data) != expected_bytes:
        shape = list(tensor.shape)
        raise WireError(f"{place}: {len(tensor.data)} bytes where {tensor.dtype} of shape {shape} has {expected_bytes}")


def _read_data(value: Any, aux_frames: Sequence[bytes], place: str) -> bytes:
    if isinstance(value, RawView):
        return value
    if type(value) is int:
        if not 1 <= value <= len(aux_frames):
            raise WireError(f"{place}: frame {value} of a message with {len(aux_frames)} auxiliary frames")
        return aux_frames[value - 1]
    if isinstance(value, dict):
        raise WireError(f"{place}: shared memory (--mm-tensor-ipc torch_shm), which only a local engine can read")
    raise wrong(place, value, "raw bytes or a frame number")


def _item_bytes(dtype: str, place: str) -> int:
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    typestr = _TYPESTR.fullmatch(dtype)
    if typestr is not None:
        return int(typestr[1])
    raise wrong(f"{place}.dtype", dtype, "a torch dtype name or a numpy typestr")
