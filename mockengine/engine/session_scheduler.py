# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduling of streaming-input sessions: sequences that get more of their prompt after their last token.

Such a sequence does not end but is *paused*: it keeps its blocks, counts among those that take a slot, and says
nothing. With more of its prompt it waits before all others, as what it holds may be what they lack, and goes on from
what is computed, which is all but the token that it said last. What is on its way to it from before is dropped.
"""

from collections.abc import Mapping

from mockengine.engine.scheduler import Scheduler
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import Step, StepResult
from mockengine.wire.outputs import EngineCoreEvent, EventType
from mockengine.wire.stats import PrefillStats


class SessionScheduler(Scheduler):
    """A scheduler whose sequences may be resumable."""

    def go_on(self, sequence: TokenSequence, other: TokenSequence, now: float = 0.0, *, at_once: bool) -> None:
        """Let a paused sequence go on.

        Args:
            sequence: it.
            other: has the whole prompt, which begins with what is computed, and the limits.
            now: the time, in engine seconds.
            at_once: whether it was paused by the result that has just arrived, and so has not waited. That it is queued
                is then told with that result, by whoever says it.

        """
        self.num_paused -= 1
        queue = self._holding if sequence.waits_with_blocks else self._waiting
        queue.note_arrival(sequence, other.arrival_time)
        sequence.continue_as(other)
        if at_once:
            self._skipped.discard(sequence)
        else:
            sequence.events.append(EngineCoreEvent(EventType.QUEUED, now))

    def close(self, request_id: str) -> None:
        """Take note that no more of a prompt comes: a paused sequence ends now, another one with its last token."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        sequence.is_resumable = False
        if sequence.status is Status.PAUSED:
            self.abort(request_id)

    def abort(self, request_id: str) -> TokenSequence | None:
        """End a sequence, wherever it is; results on their way to it are ignored. None: there is no such sequence."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.status is Status.PAUSED:
            self.num_paused -= 1
        return super().abort(request_id)

    def _admit(self, step: Step, sequence: TokenSequence, budget: int, threshold: int) -> int | None:
        """Give a sequence blocks and schedule its first tokens; return how many, or None: it has to wait."""
        if not self._goes_on(sequence):
            return super()._admit(step, sequence, budget, threshold)
        computed = sequence.num_computed_tokens
        count = min(sequence.num_tokens - computed, threshold)
        if count > budget and not self._config.enable_chunked_prefill:
            return None
        count = min(count, budget)
        if sequence.leaves_a_token:
            count = min(count, sequence.num_tokens - computed - 1)
        missing = self.cache.blocks_for(sequence.num_tokens) - sequence.num_blocks
        if missing > self.cache.num_free_blocks or not self.cache.extend(sequence, computed + count):
            return None
        # As in vLLM, to which whatever was not preempted is new.
        step.new.append(sequence)
        sequence.num_cached_tokens = computed
        self._enter(step, sequence, computed, count)
        return count

    def _goes_on(self, sequence: TokenSequence) -> bool:
        """Tell whether a sequence that waits goes on from what is computed."""
        return sequence.waits_with_blocks and sequence.num_computed_tokens > 0

    def _finish(
        self, result: StepResult, sequence: TokenSequence, prefill_stats: PrefillStats | None
    ) -> Mapping[str, object] | None:
        """End a sequence that has said its last token, or pause it; return what another instance needs."""
        if not sequence.is_resumable:
            return super()._finish(result, sequence, prefill_stats)
        if sequence.status is Status.PREEMPTED:
            self._leave_queue(sequence)
        on_their_way = (step.number for step in self._under_way if sequence in step)
        sequence.stale_through = max(on_their_way, default=0)
        sequence.drops_stale = True
        sequence.is_plain = False
        sequence.num_output_placeholders = 0
        sequence.num_draft_tokens = 0
        sequence.num_computed_tokens = sequence.num_tokens - 1 if sequence.num_blocks else 0
        sequence.status = Status.PAUSED
        self.num_paused += 1
        if sequence.num_blocks:
            self._hold(sequence)
        else:
            self._waiting.add(sequence)
        self._skipped.add(sequence)
        return None
