# SPDX-License-Identifier: Apache-2.0
"""Log probabilities on the wire (protocol section 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mockengine.wire.tensors import Tensor, read_tensor
from mockengine.wire.values import array, wrong

_ITEMS_LEAST = 3
_ITEMS_MOST = 5


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

    def to_wire(self) -> list[Any]:
        """Return the wire form of 4 items, the only length that every frontend accepts for both kinds."""
        return [self.token_ids.to_wire(), self.logprobs.to_wire(), self.ranks.to_wire(), None]


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
