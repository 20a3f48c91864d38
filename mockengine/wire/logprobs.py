# SPDX-License-Identifier: Apache-2.0
"""Log probabilities on the wire (protocol section 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from mockengine.wire.codec import pack
from mockengine.wire.tensors import Tensor, read_tensor
from mockengine.wire.values import array, wrong

_ITEMS_LEAST = 3
_ITEMS_MOST = 5
_DIMENSIONS = 2
_FOUR_ITEMS: Final = b"\x94"
_NO_COUNTS: Final = b"\xc0"
_ARRAY_TYPES: Final = ("<i4", "<f4", "<i4")
_TENSOR_TYPES: Final = ("int32", "float32", "int32")
_NUMBER_BYTES: Final = 4
# Chunk sizes and numbers of logprobs that are asked for at a time are few.
_KNOWN_SIZES: Final = 256

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Singles: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
PackedScores: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
"""Scores of outputs of one size, each an item of so many bytes of msgpack."""


@dataclass(frozen=True, slots=True)
class LogprobsLists:
    """Scores of T tokens with k alternatives each.

    Attributes:
        token_ids: `[T, k+1]` ids, int32; column 0 is the token itself, then the alternatives in rank order.
        logprobs: `[T, k+1]` natural logarithms, float32, same columns.
        ranks: `[T]` rank of the token itself within the vocabulary, from 1, int32.

    Generated tokens travel as arrays (dtype `"<i4"`, `"<f4"`), prompt tokens as tensors (`"int32"`, `"float32"`).
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @property
    def rows(self) -> int:
        """T, the number of tokens scored."""
        return self.ranks.shape[0] if self.ranks.shape else 0

    def to_wire(self, *, as_tensors: bool) -> list[Any]:
        """Return the wire form of 4 items, the only length that every frontend accepts for both kinds.

        Args:
            as_tensors: whether the place wants tensors or arrays.

        Raises:
            ValueError: the other kind, or shapes that contradict each other.

        """
        parts = (self.token_ids, self.logprobs, self.ranks)
        kind = "a tensor" if as_tensors else "an array"
        for part in parts:
            if part.is_ndarray == as_tensors:
                raise ValueError(f"logprobs: {part.dtype} where {kind} is due")
        shapes = [part.shape for part in parts]
        if len(self.token_ids.shape) != _DIMENSIONS or shapes[0] != shapes[1] or shapes[2] != shapes[0][:1]:
            raise ValueError(f"logprobs: shapes {shapes} where [T, k+1], [T, k+1] and [T] are expected")
        return [*(part.to_wire() for part in parts), None]


def logprobs_lists(token_ids: Integers, logprobs: Singles, ranks: Integers, *, as_tensors: bool) -> LogprobsLists:
    """Return the scores of one request.

    Args:
        token_ids: `[T, k+1]`.
        logprobs: `[T, k+1]`.
        ranks: `[T]`.
        as_tensors: whether the place wants tensors or arrays.

    """
    parts = (token_ids, logprobs, ranks)
    return LogprobsLists(
        *(
            Tensor(name, part.shape, np.ascontiguousarray(part, array_type).tobytes())
            for name, array_type, part in zip(_types(as_tensors=as_tensors), _ARRAY_TYPES, parts, strict=True)
        )
    )


@lru_cache(_KNOWN_SIZES)
def logprobs_frame(tokens: int, columns: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the msgpack of the scores of `tokens` tokens, as arrays, without the numbers.

    Returns:
        What stands before the token ids, before the logprobs, before the ranks, and behind these.

    """
    shapes = ((tokens, columns), (tokens, columns), (tokens,))
    heads = []
    for array_type, shape in zip(_ARRAY_TYPES, shapes, strict=True):
        num_bytes = _NUMBER_BYTES * prod(shape)
        whole = pack(Tensor(array_type, shape, bytes(num_bytes)).to_wire())
        heads.append(whole[: len(whole) - num_bytes])
    return _FOUR_ITEMS + heads[0], heads[1], heads[2], _NO_COUNTS


def packed_bytes(tokens: int, columns: int) -> int:
    """Return how long the scores of `tokens` tokens are as msgpack."""
    return len(_template(tokens, columns)[0])


def pack_logprobs(token_ids: Integers, logprobs: Singles, ranks: Integers) -> PackedScores:
    """Return the scores of N outputs of T tokens each as msgpack, in the form that generated tokens have.

    What differs between outputs has the same place and length in all, so it is copied for all of them at once.

    Args:
        token_ids: `[N, T, k+1]`.
        logprobs: `[N, T, k+1]`.
        ranks: `[N, T]`.

    Returns:
        `[N]`, each with the bytes of `pack(logprobs_lists(…).to_wire(as_tensors=False))`.

    """
    outputs, tokens, columns = token_ids.shape
    template, numbers = _template(tokens, columns)
    packed = np.empty(outputs, f"V{len(template)}")
    packed[:] = np.void(template)
    places = packed.view(numbers)
    places["token_ids"], places["logprobs"], places["ranks"] = token_ids, logprobs, ranks
    return packed


@lru_cache(_KNOWN_SIZES)
def _template(tokens: int, columns: int) -> tuple[bytes, np.dtype[np.void]]:
    """Return the scores of an output with zeros for numbers, and where these are."""
    frame = logprobs_frame(tokens, columns)
    shapes = ((tokens, columns), (tokens, columns), (tokens,))
    template, offsets = b"", []
    for head, shape in zip(frame, shapes, strict=False):
        template += head
        offsets.append(len(template))
        template += bytes(_NUMBER_BYTES * prod(shape))
    template += frame[-1]
    numbers = np.dtype(
        {
            "names": ["token_ids", "logprobs", "ranks"],
            "formats": [(array_type, shape) for array_type, shape in zip(_ARRAY_TYPES, shapes, strict=True)],
            "offsets": offsets,
            "itemsize": len(template),
        }
    )
    return template, numbers


def _types(*, as_tensors: bool) -> tuple[str, ...]:
    return _TENSOR_TYPES if as_tensors else _ARRAY_TYPES


def read_logprobs(value: Any, aux_frames: Sequence[bytes], place: str) -> LogprobsLists:
    """Read logprobs of 3 to 5 items.

    Raises:
        WireError: another number of items, or something that is no tensor.

    """
    items = array(value, place)
    if not _ITEMS_LEAST <= len(items) <= _ITEMS_MOST:
        raise wrong(place, items, f"an array of {_ITEMS_LEAST} to {_ITEMS_MOST}")
    token_ids, logprobs, ranks = (
        read_tensor(item, aux_frames, f"{place}.{name}")
        for item, name in zip(items, ("token_ids", "logprobs", "ranks"), strict=False)
    )
    return LogprobsLists(token_ids, logprobs, ranks)
