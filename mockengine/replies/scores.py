# SPDX-License-Identifier: Apache-2.0
"""The logprobs that requests ask for: of one output, of many of one reply, and of many replies at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from mockengine.replies import Keys, Positions, Tokens
from mockengine.replies.logprobs import SamplingLimits, ScoredTokens, TokenIds, TokenScorer, sampling_limits
from mockengine.wire.logprobs import LogprobsLists, logprobs_lists
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.tensors import Tensor

AskedScores: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
"""What replies of one form ask, an item for each; `ScoreForm.items` says what it holds."""

# Where a token has more, each output costs so much that nothing is gained by making those of many together.
_MOST_COLUMNS: Final = 256


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """What replies have in common whose tokens can be scored together.

    Attributes:
        scorer: what scores them.
        columns: scores of each token, its own among them; 0 where none are asked for.
        are_given: whether the others are those of tokens that the request names, not of the most likely ones.

    """

    scorer: TokenScorer
    columns: int
    are_given: bool

    @property
    def can_be_many(self) -> bool:
        """Whether scores of many outputs cost less when they are made together."""
        return self.columns <= _MOST_COLUMNS

    @property
    def items(self) -> np.dtype[np.void]:
        """What an item of `AskedScores` holds."""
        given = self.columns - 1 if self.are_given else 0
        return np.dtype([("top_k", np.int64), ("top_p", np.float64), ("token_ids", np.int64, (given,))])

    def score(self, asked: AskedScores, keys: Keys, starts: Positions, tokens: Tokens) -> ScoredTokens:
        """Score tokens of N replies, as `TokenScorer` does it.

        Args:
            asked: `[N]`.
            keys: `[N]`.
            starts: `[N]`.
            tokens: `[N, T]`.

        Raises:
            ValueError: more than `MAX_SCORES`, or none are asked for.

        """
        if not self.columns:
            raise ValueError("scores are made that nobody has asked for")
        limits = SamplingLimits(asked["top_k"], asked["top_p"])
        if self.are_given:
            return self.scorer.sampled_among(keys, starts, tokens, asked["token_ids"], limits)
        return self.scorer.sampled(keys, starts, tokens, self.columns - 1, limits)


def wants_scores(params: SamplingParams) -> bool:
    """Tell whether a request asks for logprobs of any kind."""
    return (
        params.logprobs is not None
        or params.logprob_token_ids is not None
        or params.prompt_logprobs is not None
        or params.prompt_logprob_token_ids is not None
    )


class ReplyScores:
    """Scores the tokens of one reply, and of its prompt.

    Attributes:
        form: of the scores of the reply, with no columns where they are not asked for.
        asked: `[1]`, what is asked of them.

    """

    def __init__(
        self, scorer: TokenScorer, key: int, seed: int, request: EngineCoreRequest, params: SamplingParams
    ) -> None:
        """Set up for one request.

        Args:
            scorer: over the vocabulary.
            key: of the reply.
            seed: of the engine, which decides the scores of prompts.
            request: whose prompt it is.
            params: what it asks.

        """
        self._scorer = scorer
        self._keys = np.array([key], np.uint64)
        self._seed = seed
        self._prompt = request.prompt_token_ids
        self._num_prompt_logprobs = params.prompt_logprobs
        self._prompt_token_ids = _rows(params.prompt_logprob_token_ids)
        self._prompt_start = params.prompt_logprob_start
        self.form = _form(scorer, params)
        self.asked: AskedScores = np.zeros(1, self.form.items)
        self.asked["top_k"], self.asked["top_p"] = sampling_limits(params)
        if self.form.are_given:
            self.asked["token_ids"] = params.logprob_token_ids

    @property
    def problem(self) -> str | None:
        """Why what is asked of the prompt cannot be answered, if so."""
        wanted = self._prompt_token_ids
        if self._prompt is None and (wanted is not None or self._num_prompt_logprobs is not None):
            return "prompt logprobs: a prompt of embeddings has no tokens that could be scored"
        if wanted is None or self._prompt is None:
            return None
        places = max(len(self._prompt) - 1 - self._prompt_start, 0)
        if len(wanted) == places:
            return None
        return f"prompt_logprob_token_ids: {len(wanted)} rows where the prompt has {places} places from its start on"

    @property
    def prompt_scores(self) -> int:
        """All scores of the prompt."""
        given = 0 if self._prompt_token_ids is None else self._prompt_token_ids.size
        if self._num_prompt_logprobs is None or self._prompt is None:
            return given
        return given + (len(self._prompt) - 1) * self._scorer.columns(self._num_prompt_logprobs)

    def of(self, start: int, token_ids: Sequence[int]) -> LogprobsLists | None:
        """Return the scores of the tokens of one output, the first of which has position `start` in the reply."""
        if not token_ids or not self.form.columns:
            return None
        scored = self.of_many(start, np.array([token_ids], np.uint32))
        return logprobs_lists(scored.token_ids[0], scored.logprobs[0], scored.ranks[0], as_tensors=False)

    def of_many(self, start: int, tokens: Tokens) -> ScoredTokens:
        """Return scores in `[1, T]` of tokens `[1, T]`, be they of one output or of several; raises as `ScoreForm`."""
        return self.form.score(self.asked, self._keys, np.array([start], np.int64), tokens)

    def of_prompt_token_ids(self) -> Tensor | None:
        """Return the scores of given tokens at places of the prompt, `[rows, count]`."""
        if self._prompt_token_ids is None or self._prompt is None:
            return None
        scores = self._scorer.prompt_among(
            np.array(self._prompt, np.uint32), self._prompt_token_ids, self._prompt_start, self._seed
        )
        return Tensor("float32", scores.shape, scores.astype("<f4").tobytes())

    def of_prompt(self) -> LogprobsLists | None:
        """Return the scores of all tokens of the prompt but the first."""
        if self._num_prompt_logprobs is None or self._prompt is None:
            return None
        scored: ScoredTokens = self._scorer.prompt(
            np.array(self._prompt, np.uint32), self._num_prompt_logprobs, self._seed
        )
        return logprobs_lists(scored.token_ids, scored.logprobs, scored.ranks, as_tensors=True)


def _form(scorer: TokenScorer, params: SamplingParams) -> ScoreForm:
    """Return the form of the scores of a reply."""
    if params.logprob_token_ids is not None:
        return ScoreForm(scorer, 1 + len(params.logprob_token_ids), are_given=True)
    columns = 0 if params.logprobs is None else scorer.columns(params.logprobs)
    return ScoreForm(scorer, columns, are_given=False)


def _rows(asked: Tensor | None) -> TokenIds | None:
    return None if asked is None else np.frombuffer(asked.data, "<i4").astype(np.int32).reshape(asked.shape)
