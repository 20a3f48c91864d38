# SPDX-License-Identifier: Apache-2.0
"""A vocabulary has the ids that may be said, each at one place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.vocabulary import Vocabulary

IDS = st.lists(st.integers(-3, 45), max_size=40)


@given(vocab_size=st.integers(1, 40), without=IDS, only=st.none() | IDS)
def test_places_are_the_allowed_ids_in_order(vocab_size: int, without: list[int], only: list[int] | None) -> None:
    allowed = [each for each in range(vocab_size) if each not in without and (only is None or each in only)]
    if not allowed:
        with pytest.raises(ValueError, match="no token id is left"):
            Vocabulary(vocab_size, without, only)
        return
    vocabulary = Vocabulary(vocab_size, without, only)

    assert vocabulary.size == len(allowed)
    assert [vocabulary.id_at(place) for place in range(vocabulary.size)] == allowed
    places = np.arange(vocabulary.size, dtype=np.uint64).reshape(1, -1)
    assert vocabulary.ids_at(places).tolist() == [allowed]
    assert [each for each in range(-2, 50) if each in vocabulary] == allowed
    assert vocabulary.among(range(-2, 50)) == allowed
