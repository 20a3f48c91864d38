# SPDX-License-Identifier: Apache-2.0
"""Documents are scored against queries that came before them, which are held no longer than they are needed."""

from typing import Any

import numpy as np
import pytest

from mockengine.replies.asked import ReplyError
from mockengine.replies.pooling import Pooler
from mockengine.replies.vectors import Vectors
from mockengine.wire.sampling import LateInteractionParams
from tests.replies.test_pooling import DIM, OTHER, TEXT, answer, request


def late(mode: str, key: str = "q", uses: int | None = None) -> dict[str, Any]:
    return {"late_interaction_params": LateInteractionParams(mode, key, uses)}


def hold(pooler: Pooler, tokens: list[int], key: str = "q", uses: int | None = None) -> Vectors:
    return answer(request(tokens, "token_embed", **late("cache_query", key, uses)), pooler)


def score(pooler: Pooler, tokens: list[int], key: str = "q") -> float:
    value = answer(request(tokens, "token_embed", **late("score_doc", key)), pooler)
    assert value.shape == ()
    return float(value)


def test_a_score_sums_what_each_query_token_finds() -> None:
    pooler, query, document = Pooler(DIM, 3), TEXT[:5], OTHER + TEXT[2:8]
    assert hold(pooler, query, uses=2).shape == ()
    similar = answer(request(query, "token_embed")) @ answer(request(document, "token_embed")).T
    found = score(pooler, document)
    assert found == pytest.approx(similar.max(axis=1).sum(), abs=1e-4)
    assert found > score(pooler, OTHER)


def test_a_long_document_is_scored_in_parts_as_a_whole() -> None:
    pooler, query = Pooler(DIM, 3), TEXT[:5]
    document = np.random.default_rng(4).integers(0, 32_000, 2_000).tolist() + query
    hold(pooler, query)
    similar = answer(request(query, "token_embed")) @ answer(request(document, "token_embed")).T
    assert score(pooler, document) == pytest.approx(similar.max(axis=1).sum(), abs=1e-4)


@pytest.mark.parametrize("uses", [None, 0, 1, 3])
def test_a_query_is_let_go_after_its_last_use(uses: int | None) -> None:
    pooler = Pooler(DIM, 3)
    hold(pooler, TEXT, uses=uses)
    for _ in range(uses or 1):
        score(pooler, OTHER)
    with pytest.raises(ReplyError, match=r"no query str 'q' is held \(send it before its documents\)"):
        score(pooler, OTHER)


def test_a_document_that_nobody_waits_for_uses_its_query_all_the_same() -> None:
    pooler = Pooler(DIM, 3)
    hold(pooler, TEXT, uses=1)
    pooler.ask(request(OTHER, "token_embed", **late("score_doc"))).give_up()
    assert len(pooler._queries) == 0


def test_a_document_that_is_given_up_half_way_uses_its_query_once() -> None:
    pooler = Pooler(DIM, 3)
    hold(pooler, TEXT, uses=2)
    half_way = pooler.ask(request(OTHER * 1_000, "token_embed", **late("score_doc")))
    assert half_way.go_on() is None
    half_way.give_up()
    assert score(pooler, OTHER) > 0


def test_queries_that_nobody_uses_do_not_pile_up() -> None:
    pooler = Pooler(8, 3)
    for number in range(1_000):
        hold(pooler, TEXT * 100, f"q{number}", uses=5)
    assert len(pooler._queries) < 300
    assert max(query.features.size for query in pooler._queries._held.values()) <= 1_024
    score(pooler, OTHER, "q999")


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("token_embed", late("other"), "mode: str 'other' is neither cache_query nor score_doc"),
        ("token_embed", late("score_doc", ""), "query_key: it is empty or longer than 1024 characters"),
        ("token_embed", late("cache_query", "q" * 1_025), "query_key: it is empty or longer"),
        ("embed", late("cache_query"), "they go with task token_embed, not with str 'embed'"),
    ],
)
def test_what_could_never_be_scored_is_refused_at_once(task: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        Pooler(DIM, 3).ask(request(TEXT, task, **params))
