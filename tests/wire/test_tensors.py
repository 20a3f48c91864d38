# SPDX-License-Identifier: Apache-2.0
"""Tensors and arrays: where their data may lie, and what makes them no tensor."""

from typing import Any

import msgpack
import numpy as np
import pytest

from mockengine.wire.codec import RawView, WireError, unpack
from mockengine.wire.messages import Add, Unreadable, read_message
from mockengine.wire.tensors import Tensor, read_tensor

INLINE = RawView(bytes(range(8)))


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("float32", [2], INLINE),
        ("float32", [], RawView(bytes(4))),
        ("float32", [0], RawView(b"")),
        ("float32", [3, 0], RawView(b"")),
        ("bfloat16", [2, 2], INLINE),
        ("int64", [1], INLINE),
        ("bool", [8], INLINE),
        ("<f4", [2], INLINE),
        ("<i8", [1], INLINE),
        ("|b1", [2, 4], INLINE),
        ("|u1", [8], INLINE),
        ("<c16", [0], RawView(b"")),
    ],
)
def test_tensor_with_its_data_inline_is_read_and_written(dtype: str, shape: list[int], data: RawView) -> None:
    tensor = read_tensor([dtype, shape, data], (), "t")
    assert tensor == Tensor(dtype, tuple(shape), bytes(data))
    assert unpack(msgpack.packb(tensor.to_wire())) == [dtype, shape, data]


def test_array_of_numpy_keeps_its_numbers() -> None:
    numbers = np.arange(6, dtype="<i4").reshape(2, 3)
    tensor = read_tensor(["<i4", [2, 3], RawView(numbers.tobytes())], (), "t")
    assert tensor.is_ndarray
    assert np.array_equal(np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape), numbers)
    assert not Tensor("int32", (), bytes(4)).is_ndarray


def test_data_in_an_auxiliary_frame_is_found_by_its_number() -> None:
    frames = [b"first", bytes(range(8))]
    assert read_tensor(["float32", [2], 2], frames, "t") == Tensor("float32", (2,), frames[1])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "t: nil where an array is expected"),
        ([], "t: array of 0 where a tensor [dtype, shape, data] is expected"),
        (["float32", [2], INLINE, 1], "t: array of 4 where a tensor [dtype, shape, data] is expected"),
        ([1, [2], INLINE], "t.dtype: int 1 where a str is expected"),
        (["float32", 2, INLINE], "t.shape: int 2 where an array is expected"),
        (["float32", [-2], INLINE], "t.shape[0]: int -2 where an int of 0 to 18446744073709551615 is expected"),
        (["float32", [1] * 17, INLINE], "t.shape: 17 dimensions where at most 16 are allowed"),
        (["float32", [3], INLINE], "t: 8 bytes where float32 of shape [3] has 12"),
        (["float32", [2**64 - 1] * 2, INLINE], f"t: 8 bytes where float32 of shape [{2**64 - 1}, {2**64 - 1}] has "),
        (["float32", [2], b"12345678"], "t.data: bin of 8 where raw bytes or a frame number is expected"),
        (["float32", [2], 0], "t.data: frame 0 of a message with 1 auxiliary frames"),
        (["float32", [2], 2], "t.data: frame 2 of a message with 1 auxiliary frames"),
        (["float32", [2], True], "t.data: bool True where raw bytes or a frame number is expected"),
        (["float32", [2], {"shm": 1}], "t.data: shared memory"),
        (["auto", [2], INLINE], "t.dtype: str 'auto' where a torch dtype name or a numpy typestr is expected"),
        (["<f123", [2], INLINE], "t.dtype: str '<f123' where a torch dtype name or a numpy typestr is expected"),
        (["<f٤", [2], INLINE], "t.dtype: str '<f٤' where a torch dtype name or a numpy typestr is expected"),
        ([">f4", [2], INLINE], "t.dtype: str '>f4' where a torch dtype name or a numpy typestr is expected"),
    ],
)
def test_what_is_no_tensor_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        read_tensor(value, [b"12345678"], "t")
    assert str(caught.value).startswith(reason)


def test_tensor_that_does_not_fill_its_shape_is_not_written() -> None:
    with pytest.raises(ValueError, match="4 bytes where float32 of shape"):
        Tensor("float32", (2,), bytes(4)).to_wire()


def embeddings(shape: list[int], data: object, *aux_frames: bytes) -> Add | Unreadable:
    request: list[Any] = ["r", None, None, {}, None, 0.0, None, None, None, ["bfloat16", shape, data]]
    message = read_message([b"\x00", msgpack.packb(request), *aux_frames], 0)
    assert isinstance(message, (Add, Unreadable))
    return message


def test_prompt_of_embeddings_has_a_token_per_row() -> None:
    message = embeddings([3, 64], 1, bytes(384))
    assert isinstance(message, Add)
    assert message.request.prompt_embeds == Tensor("bfloat16", (3, 64), bytes(384))
    assert message.request.num_prompt_tokens == 3


@pytest.mark.parametrize("shape", [[10**18, 0], [4], [], [2, 1, 2]])
def test_embeddings_that_are_no_rows_are_refused(shape: list[int]) -> None:
    """A row without width takes no bytes, so that a prompt of any length could be claimed."""
    message = embeddings(shape, msgpack.ExtType(3, bytes(2 * int(np.prod(shape)))))
    assert isinstance(message, Unreadable)
    assert message.reason == f"prompt_embeds: shape {shape} where [rows, width] is expected"
