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
from mockengine.replies.hashing import draws_from
from mockengine.wire.outputs import SpecDecodeMetrics
from mockengine.wire.stats import SpecDecodingStats

MetricsLevel = Literal["none", "summary", "detailed"]
"""What the last output of a request says of its drafts, under vLLM's names."""

_STREAM: Final = mix(int.from_bytes(b"drafts"))
# Positions whose drafts are decided at once: enough to share the fixed cost.
_DRAWN: Final = 256
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
        self._thresholds = np.array([round(rate * 2**_BITS) for rate in reversed(rates)], np.uint64)

    def draw(self, key: int, start: int, count: int) -> bytes:
        """Return the number of accepted drafts for outputs that begin at positions `start` … `start + count - 1`."""
        keys, starts = np.array([key ^ _STREAM], np.uint64), np.array([start], np.int64)
        bits = draws_from(keys, starts, count)[0] >> _DROPPED_BITS
        # One draw decides on all drafts of an output, so that a rate is that of a draft and all before it.
        rejected = np.searchsorted(self._thresholds, bits, side="right")
        accepted: bytes = (self.num_spec_tokens - rejected).astype(np.uint8).tobytes()
        return accepted


class DraftCounts:
    """What is counted of the drafts of one rank.

    Attributes:
        accepted: outputs by the number of their drafts that were accepted, of those that had drafts.
        short: those of these outputs that had fewer than all drafts, by the number of their drafts.

    """

    __slots__ = ("accepted", "short")

    def __init__(self, num_spec_tokens: int) -> None:
        self.accepted = [0] * (num_spec_tokens + 1)
        self.short = [0] * (num_spec_tokens + 1)

    def take(self) -> SpecDecodingStats | None:
        """Return what was counted since the last call, or None if there were no drafts."""
        num_drafts = sum(self.accepted)
        if not num_drafts:
            return None
        drafted = self.short
        drafted[-1] = num_drafts - sum(drafted)
        accepted_per_pos, drafted_per_pos = _at_least(self.accepted), _at_least(drafted)
        for counts in (self.accepted, self.short):
            counts[:] = [0] * len(counts)
        return SpecDecodingStats(
            num_spec_tokens=len(accepted_per_pos),
            num_drafts=num_drafts,
            num_draft_tokens=sum(drafted_per_pos),
            num_accepted_tokens=sum(accepted_per_pos),
            num_accepted_tokens_per_pos=accepted_per_pos,
            num_draft_tokens_per_pos=drafted_per_pos,
        )


def _at_least(counts: list[int]) -> tuple[int, ...]:
    """Return how many were at least 1, at least 2 and so on, of counts by number from 0 on."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


class Drafts:
    """The drafts of one reply."""

    __slots__ = (
        *("_acceptance", "_counts", "_drawn", "_drawn_from", "_has_metrics"),
        *("_histogram", "_key", "_num_missing", "_num_spec_tokens", "_steps"),
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
        self._num_spec_tokens = config.num_spec_tokens
        self._has_metrics = config.metrics != "none"
        self._drawn = b""
        self._drawn_from = 0
        self._histogram = [0] * (config.num_spec_tokens + 1)
        self._num_missing = 0
        # Drafts and accepted ones of every output that had some, where that is told.
        self._steps: list[tuple[int, int]] | None = [] if config.metrics == "detailed" else None

    def verify(self, position: int, num_drafts: int) -> int:
        """Return how many of the drafts of the output that begins at a position are accepted, and count them."""
        place = position - self._drawn_from
        if not 0 <= place < len(self._drawn):
            self._drawn = self._acceptance.draw(self._key, position, _DRAWN)
            self._drawn_from, place = position, 0
        accepted = self._drawn[place]
        if num_drafts < self._num_spec_tokens:
            accepted = min(accepted, num_drafts)
            self._note_short(num_drafts)
        self._counts.accepted[accepted] += 1
        self._histogram[accepted] += 1
        if self._steps is not None:
            self._steps.append((num_drafts, accepted))
        return accepted

    def reject(self, num_drafts: int) -> None:
        """Count drafts of which none can be accepted."""
        if num_drafts < self._num_spec_tokens:
            self._note_short(num_drafts)
        self._counts.accepted[0] += 1
        self._histogram[0] += 1
        if self._steps is not None:
            self._steps.append((num_drafts, 0))

    def metrics(self) -> SpecDecodeMetrics | None:
        """Return what the last output of the request says of all of them, if anything."""
        if not self._has_metrics:
            return None
        steps = self._steps or ()
        return SpecDecodeMetrics(
            num_spec_tokens=self._num_spec_tokens,
            histogram=tuple(self._histogram),
            num_draft_tokens=self._num_spec_tokens * sum(self._histogram) - self._num_missing,
            per_step_accepted=tuple(accepted for _, accepted in steps),
            per_step_drafted=tuple(drafted for drafted, _ in steps),
        )

    def _note_short(self, num_drafts: int) -> None:
        self._counts.short[num_drafts] += 1
        self._num_missing += self._num_spec_tokens - num_drafts
