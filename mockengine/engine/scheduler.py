# SPDX-License-Identifier: Apache-2.0
"""vLLM's continuous batching: which tokens of which requests the next step computes.

Every step goes twice through the requests, with one budget of tokens for all. First those that run, in order, each up
to its known end: a decode wants one token, a prefill what is left of it. One that finds no free block preempts the last
to run, which loses all it has and waits to begin anew. Then, if nobody had to go, those that wait, until one finds no
room: it is admitted only if all its tokens fit, even if only the first of them are computed in this step.

`schedule` counts tokens as computed at once and leaves placeholders for the outputs to come, so that the next step can
be scheduled before the result of this one has arrived. `update` takes the result in. Results arrive in order. Those on
their way to a sequence that has been preempted meanwhile are *stale*: its tokens are delivered all the same, and it
waits for them, unless it was preempted by a reset of the cache, which drops them.

It reads no clock, sends nothing and knows token ids only as what blocks are named after.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from mockengine.engine.kv_cache import KVCache
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import News, Step, StepResult
from mockengine.engine.waiting import ArrivalQueue, PriorityQueue, WaitingQueue
from mockengine.wire.outputs import EngineCoreEvent, EventType
from mockengine.wire.stats import PrefillStats

_RUNNING: Final = Status.RUNNING


class PauseState(Enum):
    """What a pause stops: nothing, the admission of requests, or everything."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step, under vLLM's names.

    Attributes:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens that a step computes.
        max_model_len: tokens that a sequence has at most, outputs included.
        policy: who is admitted first and preempted last: by arrival, or by the smallest priority.
        long_prefill_token_threshold: tokens that a step computes of one sequence, if there are others; 0 is no limit.
        enable_chunked_prefill: whether a prompt may be computed in several steps.
        max_loras: adapters in one step; None is no limit.
        tokens_per_step: output tokens that a sequence gets by a step, the last ones perhaps fewer. The next step
            computes all of them.
        num_spec_tokens: drafts that a decode has, for a scheduler that knows of them.

    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    max_loras: int | None = None
    tokens_per_step: int = 1
    num_spec_tokens: int = 0


class Scheduler:
    """The requests of one engine, and whose turn it is.

    Attributes:
        cache: the blocks.
        running: sequences that hold blocks, in the order of their admission.
        pause_state: what is paused.

    """

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        """Begin with nothing to do.

        Raises:
            ValueError: a sequence of `max_model_len` tokens could never be computed and would wait for ever.

        """
        if cache.blocks_for(config.max_model_len) > cache.num_usable_blocks:
            raise ValueError(
                f"num_gpu_blocks: {cache.num_gpu_blocks} blocks of {cache.block_size} tokens, of which one is never "
                f"used, cannot hold max_model_len = {config.max_model_len} tokens"
            )
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens: {config.max_num_batched_tokens} is less than max_model_len = "
                f"{config.max_model_len}, which takes enable_chunked_prefill"
            )
        self.cache = cache
        self.running: list[TokenSequence] = []
        self.pause_state = PauseState.UNPAUSED
        self._config = config
        self._sequences: dict[str, TokenSequence] = {}
        self._waiting: WaitingQueue = PriorityQueue() if config.policy == "priority" else ArrivalQueue()
        self._skipped: set[TokenSequence] = set()
        self._preempted: list[TokenSequence] = []
        self._under_way: deque[Step] = deque()
        self._last_step = 0
        self._has_ended_some = False

    # What there is.

    @property
    def waiting(self) -> list[TokenSequence]:
        """Sequences that wait, in the order in which they are admitted."""
        return list(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._waiting) - len(self._skipped)

    @property
    def num_skipped(self) -> int:
        """Sequences that wait for something else and were passed over."""
        return len(self._skipped)

    @property
    def has_requests(self) -> bool:
        """Whether a step is to be made; one more is after a sequence has ended."""
        if self._has_ended_some:
            return True
        match self.pause_state:
            case PauseState.UNPAUSED:
                return bool(self.running or self._waiting)
            case PauseState.PAUSED_NEW:
                return bool(self.running)
            case PauseState.PAUSED_ALL:
                return False

    # What comes in.

    def add(self, sequence: TokenSequence, now: float = 0.0) -> None:
        """Let a sequence wait for its admission.

        Raises:
            ValueError: there is one of the same id.

        """
        if sequence.request_id in self._sequences:
            raise ValueError(f"request_id: {sequence.request_id} is here already")
        self._sequences[sequence.request_id] = sequence
        sequence.events.append(EngineCoreEvent(EventType.QUEUED, now))
        self._waiting.add(sequence)
        if sequence.is_blocked:
            self._skipped.add(sequence)

    def abort(self, request_id: str) -> TokenSequence | None:
        """End a sequence, wherever it is; results on their way to it are ignored. None: there is no such sequence."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.status is _RUNNING:
            self.running.remove(sequence)
        self._end(sequence)
        return sequence

    def reset_prefix_cache(self, reset_running: bool = False, now: float = 0.0) -> bool:  # noqa: FBT001, FBT002 - vLLM's
        """Forget what is cached.

        Args:
            reset_running: preempt whatever runs, whose blocks cannot be forgotten, first.
            now: the time, in engine seconds.

        Returns:
            Whether it was possible.

        """
        while reset_running and self.running:
            self._preempt(self.running.pop(), now, drops_stale=True)
        return self.cache.reset()

    # Steps.

    def schedule(self, now: float = 0.0) -> Step:
        """Decide what the next step computes, which may be nothing."""
        self._last_step += 1
        step = Step(self._last_step)
        budget = self._config.max_num_batched_tokens
        threshold = self._config.long_prefill_token_threshold
        if not threshold or len(self.running) + len(self._waiting) <= 1:
            threshold = budget
        if self.pause_state is not PauseState.PAUSED_ALL:
            num_preempted = len(self._preempted)
            budget = self._schedule_running(step, budget, threshold, now)
            if self.pause_state is PauseState.UNPAUSED and len(self._preempted) == num_preempted:
                self._schedule_waiting(step, budget, threshold, now)
        step.preempted, self._preempted = self._preempted, []
        self._has_ended_some = False
        self._under_way.append(step)
        return step

    def update(self, step: Step) -> StepResult:
        """Take in the result of a step, the oldest under way, and return what it brings to whom."""
        if self._under_way.popleft() is not step:
            raise ValueError(f"the result of step {step.number} does not arrive in order")
        result = StepResult()
        sequences, counts = result.sequences, result.num_new_tokens
        for sequence, count in zip(step.sequences, step.num_sampled, strict=True):
            if not count:
                continue
            if sequence.is_plain:
                num_tokens = sequence.num_tokens + count
                if num_tokens - sequence.num_prompt_tokens < sequence.stops_after:
                    placeholders = sequence.num_output_placeholders - count
                    sequence.num_tokens = num_tokens
                    sequence.num_output_placeholders = placeholders
                    if sequence.num_computed_tokens - placeholders >= sequence.names_next_at:
                        self.cache.name_blocks(sequence, sequence.num_computed_tokens - placeholders)
                    sequences.append(sequence)
                    counts.append(count)
                    continue
            self._deliver(result, step, sequence, count)
        if any(news.is_finished for news in result.news.values()):
            self.running = [sequence for sequence in self.running if sequence.status is _RUNNING]
        return result

    # How a step is made.

    def _schedule_running(self, step: Step, budget: int, threshold: int, now: float) -> int:
        """Schedule what runs and return what is left of the budget."""
        per_step, extend = self._config.tokens_per_step, self.cache.extend
        sequences, num_computed = step.sequences, step.num_computed
        num_tokens, num_sampled = step.num_tokens, step.num_sampled
        # A copy: who is preempted leaves the list.
        for sequence in self.running.copy():
            if not budget:
                break
            end = sequence.num_tokens + sequence.num_output_placeholders
            room = sequence.limit - end
            if not room or sequence.is_blocked or sequence.status is not _RUNNING:
                # All outputs that it may have are on their way, or it must not go on, or it was preempted just now.
                continue
            computed = sequence.num_computed_tokens
            count = end - computed
            if count > threshold or count > budget:
                count = min(threshold, budget)
            upto = computed + count
            if upto >= sequence.needs_cache_at and not extend(sequence, upto):
                freed = self._make_room(step, sequence, upto, now)
                if freed is None:
                    if self._config.policy == "priority":
                        # Those after it are of a higher priority, and it has left its blocks to them.
                        continue
                    break
                budget += freed
            sampled = per_step if upto == end else 0
            if sampled > room:  # noqa: PLR1730 - calling min() costs more than anything else here
                sampled = room
            budget -= count
            sequence.num_computed_tokens = upto
            sequence.num_output_placeholders += sampled
            sequences.append(sequence)
            num_computed.append(computed)
            num_tokens.append(count)
            num_sampled.append(sampled)
        return budget

    def _make_room(self, step: Step, sequence: TokenSequence, upto: int, now: float) -> int | None:
        """Preempt until a sequence has blocks for so many tokens.

        Returns:
            Tokens that are not computed in this step therefore, or None: it had to go itself.

        """
        freed = 0
        while not self.cache.extend(sequence, upto):
            if self._config.policy == "priority":
                victim = max(self.running, key=lambda each: (each.priority, each.arrival_time))
                self.running.remove(victim)
                freed += step.withdraw(victim)
            else:
                victim = self.running.pop()
            self._preempt(victim, now)
            if victim is sequence:
                return None
        return freed

    def _schedule_waiting(self, step: Step, budget: int, threshold: int, now: float) -> None:
        """Admit what waits, until one finds no room."""
        admitted: list[TokenSequence] = []
        loras: set[int] = set()
        if self._config.max_loras is not None:
            loras = {sequence.lora_request.int_id for sequence in step.sequences if sequence.lora_request}
        for sequence in self._waiting:
            if not budget or len(self.running) >= self._config.max_num_seqs:
                break
            if sequence.is_blocked or self._must_wait(sequence, loras):
                self._skipped.add(sequence)
                continue
            count = self._admit(step, sequence, budget, threshold)
            if count is None:
                break
            budget -= count
            admitted.append(sequence)
            self.running.append(sequence)
            sequence.events.append(EngineCoreEvent(EventType.SCHEDULED, now))
            if sequence.lora_request:
                loras.add(sequence.lora_request.int_id)
        for sequence in admitted:
            self._leave_queue(sequence)
            sequence.status = _RUNNING

    def _must_wait(self, sequence: TokenSequence, loras: set[int]) -> bool:
        """Whether it waits for something else than room, although it is not blocked."""
        if self._is_stale(sequence) and not sequence.drops_stale:
            return True
        lora, most = sequence.lora_request, self._config.max_loras
        return lora is not None and most is not None and len(loras) >= most and lora.int_id not in loras

    def _admit(self, step: Step, sequence: TokenSequence, budget: int, threshold: int) -> int | None:
        """Give a sequence blocks and schedule its first tokens; return how many, or None: it has to wait."""
        hits = self.cache.find(sequence)
        computed = len(hits) * self.cache.block_size
        count = min(sequence.num_tokens - computed, threshold)
        if count > budget and not self._config.enable_chunked_prefill:
            return None
        count = min(count, budget)
        if sequence.leaves_a_token:
            count = min(count, sequence.num_tokens - computed - 1)
        if not self.cache.admit(sequence, hits, computed + count):
            return None
        if sequence.status is Status.PREEMPTED:
            step.resumed.append(sequence)
        else:
            step.new.append(sequence)
            sequence.num_cached_tokens = computed
        sampled = 0
        if computed + count == sequence.num_tokens:
            sampled = min(self._config.tokens_per_step, sequence.limit - sequence.num_tokens)
        sequence.num_computed_tokens = computed + count
        sequence.num_output_placeholders = sampled
        step.sequences.append(sequence)
        step.num_computed.append(computed)
        step.num_tokens.append(count)
        step.num_sampled.append(sampled)
        return count

    def _preempt(self, sequence: TokenSequence, now: float, *, drops_stale: bool = False) -> None:
        """Take everything from a sequence that has left the running ones, and put it before those that wait."""
        self.cache.free(sequence)
        # What is dropped is computed again, so what came after it is too.
        sequence.drops_stale = drops_stale or (sequence.drops_stale and self._is_stale(sequence))
        on_their_way = (step.number for step in self._under_way if sequence in step)
        sequence.stale_through = max(on_their_way, default=0)
        sequence.status = Status.PREEMPTED
        sequence.is_plain = False
        sequence.num_computed_tokens = 0
        sequence.num_output_placeholders = 0
        sequence.num_preemptions += 1
        sequence.events.append(EngineCoreEvent(EventType.PREEMPTED, now))
        self._waiting.put_back([sequence])
        self._preempted.append(sequence)

    def _is_stale(self, sequence: TokenSequence) -> bool:
        """Whether results from before its preemption are still on their way to it."""
        return bool(self._under_way) and self._under_way[0].number <= sequence.stale_through

    # How a result is taken in.

    def _deliver(self, result: StepResult, step: Step, sequence: TokenSequence, count: int) -> None:
        """Take in what a step brings to a sequence that may have more to say than tokens."""
        is_stale = step.number <= sequence.stale_through
        if sequence.status is Status.FINISHED or (is_stale and sequence.drops_stale):
            return
        count = min(count, sequence.stops_after - sequence.num_output_tokens)
        sequence.num_tokens += count
        if not is_stale:
            sequence.num_output_placeholders -= count
        sequence.is_plain = sequence.status is _RUNNING
        if sequence.is_plain:
            self.cache.name_blocks(sequence, sequence.num_computed_tokens - sequence.num_output_placeholders)
        is_finished = sequence.num_output_tokens >= sequence.stops_after
        events, sequence.events = tuple(sequence.events), []
        prefill_stats = self._prefill_stats(sequence)
        if is_finished:
            self._end(sequence)
        if events or prefill_stats or is_finished:
            result.news[len(result.sequences)] = News(events, prefill_stats, is_finished)
        result.sequences.append(sequence)
        result.num_new_tokens.append(count)

    def _prefill_stats(self, sequence: TokenSequence) -> PrefillStats | None:
        """Return how the prompt was computed, once."""
        if sequence.has_said_something:
            return None
        sequence.has_said_something = True
        prompt, cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
        named = min(len(sequence.named_blocks) * self.cache.block_size, prompt)
        return PrefillStats(
            num_prompt_tokens=prompt,
            num_computed_tokens=prompt - cached,
            num_cached_tokens=cached,
            num_local_cached_tokens=cached,
            num_cache_creation_tokens=max(0, named - cached),
        )

    def _end(self, sequence: TokenSequence) -> None:
        if sequence.status is not _RUNNING:
            self._leave_queue(sequence)
        self.cache.free(sequence)
        sequence.status = Status.FINISHED
        sequence.is_plain = False
        del self._sequences[sequence.request_id]
        self._has_ended_some = True

    def _leave_queue(self, sequence: TokenSequence) -> None:
        self._waiting.remove(sequence)
        self._skipped.discard(sequence)
