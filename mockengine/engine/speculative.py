# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with speculative decoding, as for drafters that have a KV cache of their own, such as EAGLE and MTP.

A decode wants its last token and the drafts after it, and gets an output of one token and the accepted drafts; the
others are taken back when the result arrives. Until then all of them count as computed, so with asynchronous scheduling
the next step is scheduled as if none would be rejected. The drafter writes ahead of what is computed, which takes
blocks for as many tokens more.

The first output after an admission is that of a prefill and has no drafts. One that has a single token to compute gets
padding instead where the step has no other prefill, so that all requests compute the same number of tokens; padding is
counted as drafts, and rejected.
"""

from typing import Final

from mockengine.engine.block_hash import Block
from mockengine.engine.kv_cache import KVCache
from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.scheduler import SchedulerConfig
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.session_scheduler import SessionScheduler
from mockengine.engine.steps import Step, StepResult
from mockengine.wire.outputs import EventType

_RUNNING: Final = Status.RUNNING


class LookaheadCache(KVCache):
    """A cache in which sequences hold blocks for more tokens than are computed.

    Attributes:
        num_lookahead_tokens: how many more, within `max_model_len`.

    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_prefix_caching: bool = True,
        enable_kv_cache_events: bool = False,
    ) -> None:
        super().__init__(
            num_gpu_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        self.num_lookahead_tokens = 0
        self._max_model_len = max_model_len

    def admit(self, sequence: TokenSequence, hits: list[Block], num_tokens: int) -> bool:
        """Do as any cache, if there is room for the tokens more as well."""
        needed = self.blocks_for(num_tokens + self._ahead(num_tokens)) - len(hits)
        if needed + sum(not block.num_holders for block in hits) > self.num_free_blocks:
            return False
        return super().admit(sequence, hits, num_tokens)

    def extend(self, sequence: TokenSequence, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        """Do as any cache, with blocks for the tokens more."""
        return super().extend(sequence, num_tokens, num_lookahead_tokens or self._ahead(num_tokens))

    def _ahead(self, num_tokens: int) -> int:
        return max(0, min(self.num_lookahead_tokens, self._max_model_len - num_tokens))


class SpeculativeScheduler(SessionScheduler):
    """A scheduler whose decodes have drafts; every sequence must have a `verifier`."""

    def __init__(self, config: SchedulerConfig, cache: LookaheadCache) -> None:
        """Begin with nothing to do; raises `ValueError` as any scheduler."""
        super().__init__(config, cache)
        self._num_spec_tokens = config.num_spec_tokens
        self._lookahead_cache = cache
        cache.num_lookahead_tokens = config.num_spec_tokens
        # Whether the prompt of a running sequence is computed in the step that is scheduled.
        self._has_prefill = False

    def _schedule_running(self, step: Step, budget: int, threshold: int, now: float) -> int:
        """Schedule what runs and return what is left of the budget."""
        extend, max_model_len = self.cache.extend, self._config.max_model_len
        block_size, num_spec_tokens = self.cache.block_size, self._num_spec_tokens
        self._has_prefill = False
        # A copy: who is preempted leaves the list.
        for sequence in self.running.copy():
            if not budget:
                break
            computed, placeholders = sequence.num_computed_tokens, sequence.num_output_placeholders
            if sequence.is_blocked or sequence.status is not _RUNNING:
                continue
            if placeholders and computed + 2 - placeholders >= sequence.limit:
                # Even if all drafts under way are rejected, the outputs that it may have are on their way.
                continue
            end, drafts = sequence.num_tokens + placeholders, sequence.num_draft_tokens
            # The token that is sampled has a place of its own, but for that of a prompt that fills the context.
            room = max_model_len - computed - (1 if drafts or placeholders else 0)
            count = min(end + drafts - computed, threshold, budget, room)
            if count <= 0:
                continue
            upto = computed + count
            is_short = upto + num_spec_tokens > sequence.num_blocks * block_size
            if (is_short or sequence.num_tokens >= sequence.names_next_at) and not extend(sequence, upto):
                budget += self._make_room(step, sequence, upto, now)
                if not sequence.num_blocks:
                    # It had to go itself; what it leaves may do for others that have more priority.
                    if self._config.policy == "priority":
                        continue
                    break
            if not drafts:
                self._has_prefill = True
            sampled = 1 + upto - end if upto >= end else 0
            budget -= count
            sequence.num_computed_tokens = upto
            sequence.num_output_placeholders += sampled
            sequence.num_draft_tokens = num_spec_tokens if sampled else 0
            step.sequences.append(sequence)
            step.num_computed.append(computed)
            step.num_tokens.append(count)
            step.num_sampled.append(sampled)
        return budget

    def _admit(self, step: Step, sequence: TokenSequence, budget: int, threshold: int) -> int | None:
        """Give a sequence blocks and schedule its first tokens; return how many, or None: it has to wait."""
        padding = self._padding(step, sequence, threshold)
        if padding >= budget:
            return None
        self._lookahead_cache.num_lookahead_tokens += padding
        count = super()._admit(step, sequence, budget, threshold)
        self._lookahead_cache.num_lookahead_tokens -= padding
        if count is None:
            return None
        if padding:
            count += padding
            step.num_tokens[-1] += padding
            step.num_sampled[-1] += padding
            sequence.num_computed_tokens += padding
            sequence.num_output_placeholders += padding
        sequence.num_draft_tokens = self._num_spec_tokens if step.num_sampled[-1] else 0
        return count

    def _padding(self, step: Step, sequence: TokenSequence, threshold: int) -> int:
        """Return how many drafts a sequence gets with its first token, which are rejected: all or none."""
        padding = self._num_spec_tokens
        if self._has_prefill or sequence.leaves_a_token or padding >= threshold:
            return 0
        if self._goes_on(sequence):
            computed = sequence.num_computed_tokens
        elif (sequence.num_tokens - 1) % self.cache.block_size:
            # Whole blocks are hit, so such a one cannot have a single token left.
            return 0
        else:
            computed = len(self.cache.find(sequence)) * self.cache.block_size
        has_decodes = len(step.sequences) > len(step.new) + len(step.resumed)
        is_alone = sequence.num_tokens - computed == 1 and (has_decodes or computed > 0)
        return padding if is_alone and computed + padding + 2 <= self._config.max_model_len else 0

    def update(self, step: Step) -> StepResult:
        """Take in the result of a step, the oldest under way, and return what it brings to whom."""
        if self._under_way.popleft() is not step:
            raise ValueError(f"the result of step {step.number} does not arrive in order")
        result = StepResult()
        sequences, counts = result.sequences, result.num_new_tokens
        for sequence, count in zip(step.sequences, step.num_sampled, strict=True):
            if not count:
                continue
            if not sequence.is_plain:
                self._deliver(result, step, sequence, count)
                continue
            brought = 1
            if count > 1:
                brought += sequence.verifier.verify(sequence.num_output_tokens, count - 1)
            num_tokens = sequence.num_tokens + brought
            if num_tokens - sequence.num_prompt_tokens >= sequence.stops_after:
                self._deliver_some(result, step, sequence, brought, count)
                continue
            placeholders = sequence.num_output_placeholders - count
            computed = sequence.num_computed_tokens - count + brought
            sequence.num_tokens = num_tokens
            sequence.num_output_placeholders = placeholders
            sequence.num_computed_tokens = computed
            if computed - placeholders >= sequence.names_next_at:
                self.cache.name_blocks(sequence, computed - placeholders)
            sequences.append(sequence)
            counts.append(brought)
        if any(news.is_finished for news in result.news.values()):
            self.running = [sequence for sequence in self.running if sequence.status is _RUNNING]
        return result

    def _deliver(self, result: StepResult, step: Step, sequence: TokenSequence, count: int) -> None:
        """Take in what a step brings to a sequence that may have more to say than tokens, `count` of these at most."""
        if sequence.status is Status.FINISHED or (step.number <= sequence.stale_through and sequence.drops_stale):
            return
        brought = 1
        if count > 1:
            # The first output after an admission is told together with that.
            if any(event.type is EventType.SCHEDULED for event in sequence.events):
                sequence.verifier.reject(count - 1)
            else:
                brought += sequence.verifier.verify(sequence.num_output_tokens, count - 1)
        self._deliver_some(result, step, sequence, brought, count)

    def _deliver_some(self, result: StepResult, step: Step, sequence: TokenSequence, brought: int, count: int) -> None:
        """Take in so many of `count` tokens, unless it ends before; the others are taken back."""
        brought = min(brought, sequence.stops_after - sequence.num_output_tokens)
        if step.number > sequence.stale_through:
            sequence.num_computed_tokens -= count - brought
            sequence.num_output_placeholders -= count - brought
        super()._deliver(result, step, sequence, brought)


def make_scheduler(
    config: SchedulerConfig,
    num_gpu_blocks: int,
    block_size: int,
    *,
    enable_prefix_caching: bool,
    enable_kv_cache_events: bool,
    connector: KvConnector | None = None,
) -> SessionScheduler:
    """Return a scheduler with a cache of its own, which knows of drafts if there are any; raises as the scheduler.

    One that knows of drafts knows of no other instances.
    """
    if not config.num_spec_tokens:
        cache = KVCache(
            num_gpu_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        return SessionScheduler(config, cache, connector)
    ahead = LookaheadCache(
        num_gpu_blocks,
        block_size,
        config.max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        enable_kv_cache_events=enable_kv_cache_events,
    )
    return SpeculativeScheduler(config, ahead)
