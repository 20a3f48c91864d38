# SPDX-License-Identifier: Apache-2.0
"""Log probabilities on the wire (protocol section 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from mockengine.wire.tensors import Tensor, read_tensor
from mockengine.wire.values import array, wrong

_ITEMS_LEAST = 3
_ITEMS_MOST = 5
_DIMENSIONS = 2
_FOUR_ITEMS: Final = b"\x94"
_NO_COUNTS: Final = b"\xc0"
_ARRAY_TYPES: Final = ("<i4", "<f4", "<i4")
_TENSOR_TYPES: Final = ("int32", "float32", "int32")

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Singles: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes, one row for each request."""


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
