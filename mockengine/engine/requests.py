# SPDX-License-Identifier: Apache-2.0
"""One request's life in the engine: waiting, then running, then gone.

It knows what it says next. It does not know when, nor beside whom.
"""

from collections.abc import Mapping

from mockengine.engine.kv_transfer import KvTransfer
from mockengine.engine.observer import Served
from mockengine.engine.own_timing import moments_of
from mockengine.replies.planner import Plan
from mockengine.wire.outputs import EngineCoreEvent, EngineCoreOutput, EventType, FinishReason
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import PrefillStats


class Request:
    """An accepted request.

    Attributes:
        request_id: the frontend's internal id.
        client: index of the API server that asked, which gets its outputs.
        accepted_at: when it was accepted, in engine seconds.
        output_tokens: tokens said so far.
        key: identifies the reply to its source.
        source: of its tokens, but for a last one that ends it.
        scores: of its tokens, where they are asked for.
        is_in_running_set: whether it is a row there.
        moments: when it says something, if that is not left to the engine.
        cached_tokens: tokens of the prompt that are said to have come out of the cache, if that is not left to it.
        is_resumable: whether it is a turn of a session, after which another one may come.
        is_queued_told: whether it has been told that it is queued, with the turn before it.
        kv_transfer: its part in prefill/decode disaggregation.
        pooling: computes what it says instead of tokens, if it does.

    """

    def __init__(self, request: EngineCoreRequest, plan: Plan, now: float, *, is_first_turn: bool = True) -> None:
        self.request_id = request.request_id
        self.client = request.client_index
        self.accepted_at = now
        self.output_tokens = 0
        self._num_prompt_tokens = request.num_prompt_tokens
        self._max_tokens = request.sampling_params.max_tokens if request.sampling_params else 0
        self._trace_headers = request.trace_headers
        self._ending = plan.ending
        self.key = plan.key
        self.source = plan.source
        self._prompt_scores = plan.scores
        self.scores = plan.scores if plan.scores is not None and plan.scores.form.columns else None
        # Such that every output is made by itself.
        self._has_many_scores = self.scores is not None and not self.scores.form.can_be_many
        self.pooling = plan.pooling
        self._first_output_pending = True
        self._events: tuple[EngineCoreEvent, ...] = ()
        self._prefill_stats: PrefillStats | None = None
        self._kv_transfer_params: Mapping[str, object] | None = None
        self.is_in_running_set = False
        self.moments = moments_of(plan.timing)
        # As with a cache, the last token is always computed.
        most = self._num_prompt_tokens - 1
        self.cached_tokens = None if plan.cached_tokens is None else min(plan.cached_tokens, most)
        self.is_resumable = request.resumable
        self.is_queued_told = False
        # As in vLLM, how a prompt was computed is told of the first turn of a session only.
        self._tells_prefill = is_first_turn
        self.kv_transfer: KvTransfer | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of its prompt."""
        return self._num_prompt_tokens

    @property
    def num_reply_tokens(self) -> int:
        """All tokens that it says."""
        return self._ending.output_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended, or None while it has not."""
        if self.output_tokens < self._ending.output_tokens or self._first_output_pending:
            return None
        return self._ending.finish_reason

    def tell(
        self,
        events: tuple[EngineCoreEvent, ...],
        prefill_stats: PrefillStats | None = None,
        kv_transfer_params: Mapping[str, object] | None = None,
    ) -> None:
        """Have the next output tell more than tokens.

        Args:
            events: what has happened since the last output.
            prefill_stats: how the prompt was computed, for the first output; None is as a whole.
            kv_transfer_params: for the last output, what another instance needs to load its blocks.

        """
        self._kv_transfer_params = kv_transfer_params
        self._events = events
        self._prefill_stats = prefill_stats

    def tell_scheduled(self, now: float) -> None:
        """Have the next output tell that it was queued, if that has not been told, and that it runs since now."""
        scheduled = EngineCoreEvent(EventType.SCHEDULED, now)
        queued = EngineCoreEvent(EventType.QUEUED, self.accepted_at)
        self.tell((scheduled,) if self.is_queued_told else (queued, scheduled))

    def advance(self, chunk_size: int) -> EngineCoreOutput:
        """Say the next tokens, at most `chunk_size` of them; the last ones come together with the finish reason."""
        count = min(chunk_size, self._ending.output_tokens - self.output_tokens)
        position, scores = self.output_tokens, self.scores
        tokens = self._take(count)
        is_first, self._first_output_pending = self._first_output_pending, False
        prompt_scores = self._prompt_scores if is_first else None
        events, self._events = self._events, ()
        finish_reason = self.finish_reason
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=tokens,
            new_logprobs=None if scores is None else scores.of(position, tokens),
            new_prompt_logprobs=None if prompt_scores is None else prompt_scores.of_prompt(),
            prompt_token_id_logprobs=None if prompt_scores is None else prompt_scores.of_prompt_token_ids(),
            finish_reason=finish_reason,
            stop_reason=None if finish_reason is None else self._ending.stop_reason,
            error=None if finish_reason is None else self._ending.error,
            events=events,
            kv_transfer_params=self._kv_transfer_params,
            # Frontends that trace look at those of the last output.
            trace_headers=self._trace_headers if is_first or finish_reason is not None else None,
            prefill_stats=self._how_prefilled() if is_first and self._tells_prefill else None,
        )

    @property
    def has_more_to_say(self) -> bool:
        """Whether its next output tells more than tokens and few scores, even if it is not the last one."""
        return self._first_output_pending or self._has_many_scores or bool(self._events)

    def plain_outputs_left(self, chunk_size: int) -> int:
        """Return how many outputs are left that say a full chunk of tokens and few scores or none.

        That is all but the last one.
        """
        if self._has_many_scores:
            return 0
        return -(-(self._ending.output_tokens - self.output_tokens) // chunk_size) - 1

    def said(self) -> list[int]:
        """Return the tokens said so far."""
        tokens = self.source.tokens(self.key, 0, self.output_tokens)
        if self._ending.last_token is not None and self.output_tokens == self._ending.output_tokens:
            tokens[-1] = self._ending.last_token
        return tokens

    def skip(self, tokens: int) -> None:
        """Count tokens as said that somebody else has said for this request."""
        self.output_tokens += tokens

    def served(self, rank: int) -> Served:
        """Return its life so far, for the observer."""
        return Served(self.request_id, rank, self.client, self._num_prompt_tokens, self._max_tokens, self.output_tokens)

    def _how_prefilled(self) -> PrefillStats:
        """Return how the prompt was computed, or how it is said to have been."""
        stats = self._prefill_stats or PrefillStats(self._num_prompt_tokens, self._num_prompt_tokens)
        return stats if self.cached_tokens is None else stats.with_cached_tokens(self.cached_tokens)

    def _take(self, count: int) -> list[int]:
        tokens = self.source.tokens(self.key, self.output_tokens, count)
        self.output_tokens += count
        if self._ending.last_token is not None and self.output_tokens == self._ending.output_tokens:
            tokens[-1] = self._ending.last_token
        return tokens
