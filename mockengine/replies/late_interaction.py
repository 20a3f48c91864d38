# SPDX-License-Identifier: Apache-2.0
"""Late interaction: documents are scored by their tokens against the tokens of a query that came before them.

Frontends name a query, have it computed, and then send its documents, which name it too. So it is held here for as
many documents as were announced; of queries whose documents never come the last few hundred are.
"""

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import numpy as np

from mockengine.replies.asked import ReplyError
from mockengine.replies.hashing import Words
from mockengine.replies.vectors import Vectoriser, Vectors, dot_products, normalised
from mockengine.wire.sampling import LateInteractionParams
from mockengine.wire.values import shown

_CACHE_QUERY: Final = "cache_query"
_SCORE_DOC: Final = "score_doc"
_MOST_QUERIES: Final = 256
# Of a query: each of its tokens is compared with each of a document. Those of models for this have 32.
_MOST_TOKENS: Final = 128
# A name longer than that is none of a frontend's, which are the words of a protocol around 32 digits.
_LONGEST_KEY: Final = 1_024
# Documents that may be announced.
_MOST_USES: Final = 2**31


@dataclass(slots=True)
class _Query:
    """A query, and how many documents are still to come."""

    features: Words
    uses: int


class Queries:
    """The queries of one engine."""

    def __init__(self, vectoriser: Vectoriser) -> None:
        self._vectoriser = vectoriser
        self._held: OrderedDict[str, _Query] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def check(self, params: LateInteractionParams | None, task: str | None) -> None:
        """Raise `ReplyError` if what is asked could never be answered."""
        if params is None:
            return
        if task != "token_embed":
            raise ReplyError(f"late_interaction_params: they go with task token_embed, not with {shown(task)}")
        if params.mode not in (_CACHE_QUERY, _SCORE_DOC):
            raise ReplyError(
                f"late_interaction_params.mode: {shown(params.mode)} is neither {_CACHE_QUERY} nor {_SCORE_DOC}"
            )
        if not 0 < len(params.query_key) <= _LONGEST_KEY:
            raise ReplyError(f"late_interaction_params.query_key: it is empty or longer than {_LONGEST_KEY} characters")

    def answer(self, features: Words, params: LateInteractionParams) -> Generator[None, None, Vectors]:
        """Hold a query, or score a document, part by part; either is answered with a scalar.

        Raises:
            ReplyError: the document's query is not held.

        """
        if params.mode == _CACHE_QUERY:
            self._hold(features, params)
            return np.zeros((), np.float32)
        query = self._use(params.query_key)
        best = np.full(len(query), -np.inf, np.float32)
        for _, rows in self._vectoriser.tokens(features):
            best = np.maximum(best, dot_products(normalised(rows), query).max(axis=0))
            yield
        return np.asarray(best.sum(), np.float32)

    def given_up(self, params: LateInteractionParams | None) -> None:
        """Take note that a document, if it is one, will not be scored any more."""
        if params is not None and params.mode == _SCORE_DOC:
            self._count_use(params.query_key)

    def _hold(self, features: Words, params: LateInteractionParams) -> None:
        uses = max(1, min(params.query_uses or 1, _MOST_USES))
        self._held[params.query_key] = _Query(features[:_MOST_TOKENS].copy(), uses)
        self._held.move_to_end(params.query_key)
        if len(self._held) > _MOST_QUERIES:
            self._held.popitem(last=False)

    def _use(self, query_key: str) -> Vectors:
        """Return the token embeddings of a query, `[tokens, dim]`, which is let go after its last use."""
        query = self._held.get(query_key)
        if query is None:
            raise ReplyError(
                f"late_interaction_params.query_key: no query {shown(query_key)} is held (send it before its documents)"
            )
        self._count_use(query_key)
        return np.concatenate([normalised(rows) for _, rows in self._vectoriser.tokens(query.features)])

    def _count_use(self, query_key: str) -> None:
        query = self._held.get(query_key)
        if query is not None:
            query.uses -= 1
            if query.uses <= 0:
                del self._held[query_key]
