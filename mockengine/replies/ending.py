# SPDX-License-Identifier: Apache-2.0
"""When a reply stops, in vLLM's order: EOS, a stop token, its length, a repetition (protocol section 3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from mockengine.wire.outputs import FinishReason, RequestError
from mockengine.wire.record import record
from mockengine.wire.sampling import SamplingParams

REPETITION: Final = "repetition_detected"
"""What vLLM gives as the reason of a finish REPETITION."""

# Clients choose how long a pattern may be; larger ones than can be compared in some tens of milliseconds are not found.
_MOST_COMPARED: Final = 2**24


@record
class Ending:
    """How a reply ends.

    Attributes:
        output_tokens: all of its tokens, the last one included.
        finish_reason: LENGTH, STOP or REPETITION, or another one that somebody wishes for.
        stop_reason: the stop token's id, or `REPETITION`; an EOS has none.
        last_token: what it ends with if its source does not say it: the EOS or stop token, whose text frontends drop.
        error: with finish reason ERROR, what the client is told.

    """

    output_tokens: int
    finish_reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | str | None = None
    last_token: int | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """When a reply ends because it repeats itself: `min_count` times the same pattern, of so many tokens."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int

    @classmethod
    def of(cls, asked: Mapping[str, object] | None) -> Self | None:
        """Read `repetition_detection`; None where nothing can be one."""
        if asked is None:
            return None
        least, most, count = (_int(asked.get(name)) for name in ("min_pattern_size", "max_pattern_size", "min_count"))
        least = max(1, least)
        return cls(least, most, count) if count > 1 and least <= most else None

    def first_met(self, token_ids: Sequence[int], least: int) -> int | None:
        """Return after how many tokens, at least `least`, the last ones are a repetition for the first time."""
        said = np.array(token_ids, np.uint32)
        places = np.arange(len(said))
        found: list[int] = []
        largest = min(self.max_pattern_size, len(said) // self.min_count, _MOST_COMPARED // max(1, len(said)))
        for size in range(self.min_pattern_size, largest + 1):
            # A pattern repeats while each token is the one of `size` places before.
            is_other = np.ones(len(said), np.bool_)
            is_other[size:] = said[size:] != said[:-size]
            since = places - np.maximum.accumulate(np.where(is_other, places, 0))
            is_met = (since >= size * (self.min_count - 1)) & (places >= least - 1)
            if is_met.any():
                found.append(int(is_met.argmax()) + 1)
        return min(found, default=None)


def natural_ending(params: SamplingParams, most: int, natural: int) -> Ending:
    """Return the ending of a reply that would get `natural` tokens long by itself and may get `most`.

    By itself it ends with EOS, or with the first stop token where it has no EOS; `min_tokens` come before that. One
    that has neither, because EOS is ignored, goes on to the end.
    """
    natural = max(natural, params.min_tokens + 1 if params.min_tokens else 1)
    if natural > most:
        return Ending(most)
    if params.eos_token_id is not None:
        return Ending(natural, FinishReason.STOP, None, params.eos_token_id)
    if params.stop_token_ids:
        token = params.stop_token_ids[0]
        return Ending(natural, FinishReason.STOP, token, token)
    return Ending(most)


def listed_ending(params: SamplingParams, most: int, token_ids: Sequence[int]) -> Ending | None:
    """Return where a reply of these tokens stops, at most after `most`; None if it does not before they are over."""
    said = token_ids[:most]
    ends = {*params.stop_token_ids} if params.eos_token_id is None else {*params.stop_token_ids, params.eos_token_id}
    stopped_at = next((count for count, token in enumerate(said, 1) if token in ends), None)
    if stopped_at is None and said and len(said) == most:
        stopped_at = most
    rule = RepetitionRule.of(params.repetition_detection)
    repeated_at = rule.first_met(said[:stopped_at], params.min_tokens) if rule is not None else None
    if repeated_at is not None and repeated_at != stopped_at:
        return Ending(repeated_at, FinishReason.REPETITION, REPETITION)
    if stopped_at is None:
        return None
    token = said[stopped_at - 1]
    if token not in ends:
        return Ending(stopped_at)
    return Ending(stopped_at, FinishReason.STOP, None if token == params.eos_token_id else token)


def _int(value: object) -> int:
    return value if type(value) is int else 0
