# SPDX-License-Identifier: Apache-2.0
"""Replies stop where vLLM's would."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.ending import Ending, RepetitionRule, listed_ending, natural_ending
from mockengine.wire.outputs import FinishReason
from mockengine.wire.sampling import SamplingParams

STOP, LENGTH, REPETITION = FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION
EOS = 2


@pytest.mark.parametrize(
    ("asked", "most", "natural", "ending"),
    [
        ({"eos_token_id": EOS}, 10, 4, Ending(4, STOP, None, EOS)),
        # EOS is looked at before the length.
        ({"eos_token_id": EOS}, 4, 4, Ending(4, STOP, None, EOS)),
        ({"eos_token_id": EOS}, 3, 4, Ending(3)),
        ({"eos_token_id": EOS, "stop_token_ids": (7,)}, 10, 4, Ending(4, STOP, None, EOS)),
        ({"stop_token_ids": (7, 8)}, 10, 4, Ending(4, STOP, 7, 7)),
        # EOS is ignored.
        ({}, 10, 4, Ending(10)),
        # EOS cannot be sampled before that many other tokens.
        ({"eos_token_id": EOS, "min_tokens": 6}, 10, 4, Ending(7, STOP, None, EOS)),
        ({"eos_token_id": EOS, "min_tokens": 10}, 10, 4, Ending(10)),
        ({"eos_token_id": EOS}, 10, 1, Ending(1, STOP, None, EOS)),
    ],
)
def test_a_reply_ends_by_itself(asked: dict[str, object], most: int, natural: int, ending: Ending) -> None:
    assert natural_ending(SamplingParams(**asked), most, natural) == ending  # type: ignore[arg-type]  # its own names


@pytest.mark.parametrize(
    ("asked", "most", "ending"),
    [
        ({"eos_token_id": 5}, 9, Ending(3, STOP)),
        ({"stop_token_ids": (5,)}, 9, Ending(3, STOP, 5)),
        ({"stop_token_ids": (5,), "eos_token_id": 5}, 9, Ending(3, STOP)),
        ({"stop_token_ids": (5,)}, 3, Ending(3, STOP, 5)),
        ({"stop_token_ids": (5,)}, 2, Ending(2)),
        ({"stop_token_ids": (6, 5)}, 9, Ending(3, STOP, 5)),
        ({}, 9, None),
        ({}, 6, Ending(6)),
    ],
)
def test_listed_tokens_end_at_the_first_stop(asked: dict[str, object], most: int, ending: Ending | None) -> None:
    said = [3, 4, 5, 6, 5, 5]
    assert listed_ending(SamplingParams(**asked), most, said) == ending  # type: ignore[arg-type]  # its own names


def test_a_repetition_ends_a_reply_unless_it_ends_with_the_same_token_anyway() -> None:
    asked = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}

    def ending(said: Sequence[int], most: int = 99, **params: object) -> Ending | None:
        return listed_ending(SamplingParams(repetition_detection=asked, **params), most, said)  # type: ignore[arg-type]

    assert ending([9, 1, 2, 1, 2, 1, 2, 8]) == Ending(7, REPETITION, "repetition_detected")
    assert ending([1, 1, 1, 1, 1, 1]) == Ending(6, REPETITION, "repetition_detected")
    assert ending([1, 2, 1, 2, 1]) is None
    assert ending([9, 1, 2, 1, 2, 1, 2, 8], 7) == Ending(7)
    assert ending([9, 1, 2, 1, 2, 1, 2, 8], eos_token_id=2) == Ending(3, STOP)
    assert ending([9, 1, 2, 1, 2, 1, 2, 1], min_tokens=8) == Ending(8, REPETITION, "repetition_detected")


@pytest.mark.parametrize(
    "asked", [None, {}, {"max_pattern_size": 0, "min_count": 3}, {"max_pattern_size": 5, "min_count": 1}]
)
def test_what_asks_for_no_repetition_is_none(asked: dict[str, object] | None) -> None:
    assert RepetitionRule.of(asked) is None


def _repeats(said: Sequence[int], rule: RepetitionRule) -> bool:
    """Tell, from the definition, whether the last tokens are a pattern as often as that."""
    return any(
        len(said) >= size * rule.min_count
        and list(said[len(said) - size * rule.min_count :]) == list(said[len(said) - size :]) * rule.min_count
        for size in range(rule.min_pattern_size, rule.max_pattern_size + 1)
    )


@given(
    said=st.lists(st.integers(0, 1), max_size=40),
    least=st.integers(0, 20),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    count=st.integers(2, 4),
)
def test_repetitions_are_found_where_they_are_complete(
    said: list[int], least: int, sizes: tuple[int, int], count: int
) -> None:
    rule = RepetitionRule(*sizes, count)
    expected = next((end for end in range(max(1, least), len(said) + 1) if _repeats(said[:end], rule)), None)
    assert rule.first_met(said, least) == expected
