# SPDX-License-Identifier: Apache-2.0
"""Drafts of speculative decoding: how many of them are accepted, and what is counted of them.

An output of a reply has one token, and as many more as drafts before it were accepted. How many those are is a function
of the reply's key and of the position in the reply at which the output begins, with a stream of its own; tokens do not
depend on it. `docs/load-model.md` explains the formulas to users.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

import numpy as np

from mockengine.engine.distributions import mix
from mockengine.replies.random import random_bits
from mockengine.wire.outputs import SpecDecodeMetrics
from mockengine.wire.stats import SpecDecodingStats

MetricsLevel = Literal["none", "summary", "detailed"]
"""What the last output of a request says of its drafts, under vLLM's names."""

_STREAM: Final = mix(int.from_bytes(b"drafts"))
# Positions whose drafts are decided at once: enough to share the fixed cost.
_DRAWN: Final = 128
# Draws have as many bits as a float's fraction, so that a rate of 1 accepts and one of 0 rejects all of them.
_BITS: Final = 53
_DROPPED_BITS: Final = np.uint64(64 - _BITS)
_HALVINGS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding.

    Attributes:
        acceptance_rates: for each draft of an output, the share of outputs in which it and all before it are accepted;
            none is greater than the one before it.
        metrics: what the last output of a request says of its drafts.

    """

    acceptance_rates: tuple[float, ...]
    metrics: MetricsLevel = "summary"

    @property
    def num_spec_tokens(self) -> int:
        """Drafts of an output."""
        return len(self.acceptance_rates)


def even_rates(acceptance_rate: float, num_spec_tokens: int) -> tuple[float, ...]:
    """Return rates by position with that mean: each draft is accepted as often as any other if those before it are.

    Args:
        acceptance_rate: 0 to 1.
        num_spec_tokens: at least 1.

    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_powers(middle, num_spec_tokens)) < acceptance_rate * num_spec_tokens:
            low = middle
        else:
            high = middle
    # The ends are exact: everything or nothing.
    return _powers(high if acceptance_rate else 0.0, num_spec_tokens)


def _powers(base: float, count: int) -> tuple[float, ...]:
    return tuple(base**power for power in range(1, count + 1))


class Acceptance:
    """Decides how many drafts are accepted, for replies of all keys."""

    def __init__(self, rates: tuple[float, ...]) -> None:
        """Accept by these rates, as `SpeculationConfig` has them."""
        self.num_spec_tokens = len(rates)
        self._thresholds = np.array([round(rate * 2**_BITS) for rate in rates], np.uint64)

    def draw(self, key: int, start: int, count: int) -> bytes:
        """Return the number of accepted drafts for outputs that begin at positions `start` … `start + count - 1`."""
        keys, starts = np.array([key ^ _STREAM], np.uint64), np.array([start], np.int64)
        bits = random_bits(keys, starts, count)[0] >> _DROPPED_BITS
        # One draw decides on all drafts, so that a rate is that of a draft and all before it.
        accepted: bytes = (bits[:, None] < self._thresholds).sum(axis=1).astype(np.uint8).tobytes()
        return accepted


class DraftCounts:
    """What is counted of the drafts of one rank.

    Attributes:
        accepted: outputs by the number of their drafts that were accepted, of those that had drafts.
        drafted: the same outputs by the number of their drafts.

    """

    __slots__ = ("accepted", "drafted")

    def __init__(self, num_spec_tokens: int) -> None:
        self.accepted = [0] * (num_spec_tokens + 1)
        self.drafted = [0] * (num_spec_tokens + 1)

    def take(self) -> SpecDecodingStats | None:
        """Return what was counted since the last call, or None if there were no drafts."""
        num_drafts = sum(self.drafted)
        if not num_drafts:
            return None
        accepted, drafted = _at_least(self.accepted), _at_least(self.drafted)
        self.accepted = [0] * len(self.accepted)
        self.drafted = [0] * len(self.drafted)
        return SpecDecodingStats(
            num_spec_tokens=len(accepted),
            num_drafts=num_drafts,
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=accepted,
            num_draft_tokens_per_pos=drafted,
        )


def _at_least(counts: list[int]) -> tuple[int, ...]:
    """Return how many were at least 1, at least 2 and so on, of counts by number from 0 on."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


class Drafts:
    """The drafts of one reply."""

    __slots__ = (
        "_acceptance",
        "_counts",
        "_drawn",
        "_drawn_from",
        "_histogram",
        "_key",
        "_level",
        "_num_tokens",
        "_steps",
    )

    def __init__(self, config: SpeculationConfig, acceptance: Acceptance, counts: DraftCounts, key: int) -> None:
        """Begin with nothing drafted.

        Args:
            config: what is drafted.
            acceptance: decides on it.
            counts: of the rank.
            key: the reply's.

        """
        self._acceptance = acceptance
        self._counts = counts
        self._key = key
        self._level = config.metrics
        self._drawn = b""
        self._drawn_from = 0
        self._histogram = [0] * (config.num_spec_tokens + 1)
        self._num_tokens = 0
        # Drafts and accepted ones of every output that had some, where that is told.
        self._steps: list[tuple[int, int]] | None = [] if config.metrics == "detailed" else None

    def verify(self, position: int, num_drafts: int) -> int:
        """Return how many of the drafts of the output that begins at a position are accepted, and count them."""
        place = position - self._drawn_from
        if not 0 <= place < len(self._drawn):
            self._drawn = self._acceptance.draw(self._key, position, _DRAWN)
            self._drawn_from, place = position, 0
        accepted = self._drawn[place]
        if accepted > num_drafts:  # noqa: PLR1730 - calling min() costs more
            accepted = num_drafts
        self._count(num_drafts, accepted)
        return accepted

    def reject(self, num_drafts: int) -> None:
        """Count drafts of which none can be accepted."""
        self._count(num_drafts, 0)

    def metrics(self) -> SpecDecodeMetrics | None:
        """Return what the last output of the request says of all of them, if anything."""
        if self._level == "none":
            return None
        steps = self._steps or ()
        return SpecDecodeMetrics(
            num_spec_tokens=len(self._histogram) - 1,
            histogram=tuple(self._histogram),
            num_draft_tokens=self._num_tokens,
            per_step_accepted=tuple(accepted for _, accepted in steps),
            per_step_drafted=tuple(drafted for drafted, _ in steps),
        )

    def _count(self, num_drafts: int, accepted: int) -> None:
        counts = self._counts
        counts.drafted[num_drafts] += 1
        counts.accepted[accepted] += 1
        self._histogram[accepted] += 1
        self._num_tokens += num_drafts
        if self._steps is not None:
            self._steps.append((num_drafts, accepted))
