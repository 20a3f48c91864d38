# SPDX-License-Identifier: Apache-2.0
"""The logprobs that one request asked for, output by output."""

from collections.abc import Sequence

import numpy as np

from mockengine.replies.logprobs import SamplingLimits, ScoredTokens, TokenIds, TokenScorer, sampling_limits
from mockengine.wire.logprobs import LogprobsLists, logprobs_lists
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.tensors import Tensor


def wants_scores(params: SamplingParams) -> bool:
    """Tell whether a request asks for logprobs of any kind."""
    asked = (params.logprobs, params.logprob_token_ids, params.prompt_logprobs, params.prompt_logprob_token_ids)
    return any(each is not None for each in asked)


class ReplyScores:
    """Scores the tokens of one reply, and of its prompt."""

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
        self._num_logprobs = params.logprobs
        self._token_ids = None if params.logprob_token_ids is None else np.array(params.logprob_token_ids, np.int64)
        self._num_prompt_logprobs = params.prompt_logprobs
        self._prompt_token_ids = _rows(params.prompt_logprob_token_ids)
        self._prompt_start = params.prompt_logprob_start
        top_k, top_p = sampling_limits(params)
        self._limits = SamplingLimits(np.array([top_k], np.int64), np.array([top_p]))

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
    def columns(self) -> int:
        """Scores of each token, its own among them; 0 if those of the reply are not asked for."""
        if self._token_ids is not None:
            return 1 + len(self._token_ids)
        return 0 if self._num_logprobs is None else self._scorer.columns(self._num_logprobs)

    @property
    def prompt_scores(self) -> int:
        """All scores of the prompt."""
        given = 0 if self._prompt_token_ids is None else self._prompt_token_ids.size
        if self._num_prompt_logprobs is None or self._prompt is None:
            return given
        return given + (len(self._prompt) - 1) * self._scorer.columns(self._num_prompt_logprobs)

    def of(self, start: int, token_ids: Sequence[int]) -> LogprobsLists | None:
        """Return the scores of the tokens of one output, the first of which has position `start` in the reply."""
        if not token_ids:
            return None
        starts, tokens = np.array([start], np.int64), np.array([token_ids], np.uint32)
        if self._token_ids is not None:
            scored = self._scorer.sampled_among(self._keys, starts, tokens, self._token_ids, self._limits)
        elif self._num_logprobs is not None:
            scored = self._scorer.sampled(self._keys, starts, tokens, self._num_logprobs, self._limits)
        else:
            return None
        return logprobs_lists(scored.token_ids[0], scored.logprobs[0], scored.ranks[0], as_tensors=False)

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


def _rows(asked: Tensor | None) -> TokenIds | None:
    return None if asked is None else np.frombuffer(asked.data, "<i4").astype(np.int32).reshape(asked.shape)
