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

With a connector, a sequence whose prompt another instance has computed gets its blocks, and waits until these are
loaded before it runs; one that another instance goes on with keeps its blocks when it ends.

It reads no clock, sends nothing and knows token ids only as what blocks are named after.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Final, Literal

from mockengine.engine.kv_cache import DetachedBlocks, KVCache
from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.kv_transfer import FetchStage
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import News, Step, StepResult
from mockengine.engine.waiting import ArrivalQueue, PriorityQueue, WaitingQueue
from mockengine.wire.outputs import EngineCoreEvent, EventType
from mockengine.wire.stats import PrefillStats

_RUNNING: Final = Status.RUNNING
# Of one output. A sequence that preempts itself over and over, for want of blocks that others keep, says nothing
# meanwhile; a frontend is not to be sent hours of that at once.
_MOST_EVENTS: Final = 1_000


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
        max_loras: adapters of the sequences that run; None is no limit.
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
        num_paused: sequences that wait for more of their prompt.

    """

    def __init__(self, config: SchedulerConfig, cache: KVCache, connector: KvConnector | None = None) -> None:
        """Begin with nothing to do; without a connector no block comes from or goes to another instance.

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
        self.num_paused = 0
        self._config = config
        self._sequences: dict[str, TokenSequence] = {}
        self._connector = connector
        queue = PriorityQueue if config.policy == "priority" else ArrivalQueue
        self._waiting: WaitingQueue = queue()
        # They hold blocks, so they go first.
        self._holding: WaitingQueue = queue()
        self._skipped: set[TokenSequence] = set()
        self._preempted: list[TokenSequence] = []
        self._under_way: deque[Step] = deque()
        # Blocks that are free when the step of that number has ended.
        self._detached: deque[tuple[int, DetachedBlocks]] = deque()
        self._last_step = 0
        self._has_ended_some = False

    # What there is.

    @property
    def waiting(self) -> list[TokenSequence]:
        """Sequences that wait, in the order in which they are admitted."""
        return [*self._holding, *self._waiting]

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._holding) + len(self._waiting) - len(self._skipped)

    @property
    def num_skipped(self) -> int:
        """Sequences that wait for something else and were passed over."""
        return len(self._skipped)

    @property
    def has_requests(self) -> bool:
        """Whether a step is to be made; one more is after a sequence has ended."""
        return self._has_ended_some or self.has_unfinished_requests

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there are sequences that may be stepped."""
        match self.pause_state:
            case PauseState.UNPAUSED:
                return len(self.running) + len(self._waiting) + len(self._holding) > self.num_paused
            case PauseState.PAUSED_NEW:
                return len(self.running) + len(self._holding) > self.num_paused
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
        if self._connector is not None and sequence.kv_transfer is not None and sequence.kv_transfer.do_remote_prefill:
            self._connector.move(sequence, FetchStage.WAITING_TO_START)

    def abort(self, request_id: str) -> TokenSequence | None:
        """End a sequence, wherever it is; results on their way to it are ignored. None: there is no such sequence."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.status is _RUNNING:
            self.running.remove(sequence)
        transfer = sequence.kv_transfer
        # Into blocks that are being loaded somebody else writes.
        self._end(sequence, keeps_blocks=transfer is not None and transfer.stage is FetchStage.IN_PROGRESS)
        return sequence

    def end_load(self, sequence: TokenSequence) -> None:
        """Take note that the blocks of a sequence are loaded, be it that it has been aborted meanwhile."""
        if sequence.status is Status.FINISHED:
            self._free(sequence)
        elif self._connector is not None:
            self._connector.move(sequence, FetchStage.COMPLETED_WAITING)

    def release(self, sequence: TokenSequence) -> None:
        """Free the blocks of a sequence that has ended and kept them."""
        if self._connector is not None:
            self._connector.released(sequence)
        self._free(sequence)

    def limit(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Have other limits from the next step on; what runs already goes on."""
        self._config = replace(self._config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)

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
        if not threshold or len(self.running) + len(self._waiting) + len(self._holding) <= 1:
            threshold = budget
        if self.pause_state is not PauseState.PAUSED_ALL:
            num_preempted = len(self._preempted)
            budget = self._schedule_running(step, budget, threshold, now)
            if len(self._preempted) == num_preempted:
                self._schedule_waiting(step, budget, threshold, now)
        step.preempted, self._preempted = self._preempted, []
        self._has_ended_some = False
        self._under_way.append(step)
        return step

    def update(self, step: Step) -> StepResult:
        """Take in the result of a step, the oldest under way, and return what it brings to whom."""
        if self._under_way.popleft() is not step:
            raise ValueError(f"the result of step {step.number} does not arrive in order")
        while self._detached and self._detached[0][0] <= step.number:
            self.cache.free(self._detached.popleft()[1])
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
                budget += self._make_room(step, sequence, upto, now)
                if sequence.num_blocks * self.cache.block_size < upto:
                    # If it had to go itself, what it leaves may do for others that have more priority.
                    if self._config.policy == "priority" and not sequence.num_blocks:
                        continue
                    break
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

    def _make_room(self, step: Step, sequence: TokenSequence, upto: int, now: float) -> int:
        """Preempt until a sequence has blocks for so many tokens, had to go itself, or nobody can go yet.

        Returns:
            Tokens that are not computed in this step therefore.

        """
        freed = 0
        while not self.cache.extend(sequence, upto):
            if self._config.policy == "priority":
                victim = max(self.running, key=lambda each: (each.priority, each.arrival_time))
            else:
                victim = self.running[-1]
            if self._is_written(victim):
                break
            if self._config.policy == "priority":
                self.running.remove(victim)
                freed += step.withdraw(victim)
            else:
                self.running.pop()
            self._preempt(victim, now, drops_stale=self._connector is not None and self._connector.must_deliver)
            if victim is sequence:
                break
        return freed

    def _schedule_waiting(self, step: Step, budget: int, threshold: int, now: float) -> None:
        """Admit what waits, until one finds no room."""
        admitted: list[TokenSequence] = []
        loras: set[int] = set()
        if self._config.max_loras is not None:
            # Be they scheduled in this step or not: so since 0.33.
            loras = {sequence.lora_request.int_id for sequence in self.running if sequence.lora_request}
        for sequence in self._candidates():
            if not budget or len(self.running) + self.num_paused >= self._config.max_num_seqs:
                break
            if sequence.is_blocked or self._must_wait(step, sequence, loras):
                self._skipped.add(sequence)
                continue
            count = self._admit(step, sequence, budget, threshold)
            if count is None:
                break
            budget -= count
            admitted.append(sequence)
            self.running.append(sequence)
            self._note_event(sequence, EventType.SCHEDULED, now)
            if sequence.lora_request:
                loras.add(sequence.lora_request.int_id)
        for sequence in admitted:
            self._leave_queue(sequence)
            sequence.status = _RUNNING
        for sequence in step.loading:
            self._waiting.remove(sequence)
            self._hold(sequence)

    def _candidates(self) -> Iterable[TokenSequence]:
        """Return who may be admitted, in order."""
        return chain(self._holding, self._waiting) if self.pause_state is PauseState.UNPAUSED else self._holding

    def _must_wait(self, step: Step, sequence: TokenSequence, loras: set[int]) -> bool:
        """Whether it waits for something else than room, although it is not blocked."""
        if sequence.status is Status.PAUSED or (self._is_stale(sequence) and not sequence.drops_stale):
            return True
        lora, most = sequence.lora_request, self._config.max_loras
        if lora is not None and most is not None and len(loras) >= most and lora.int_id not in loras:
            return True
        return sequence.kv_transfer is not None and self._loads(step, sequence)

    def _loads(self, step: Step, sequence: TokenSequence) -> bool:
        """Tell whether blocks of a sequence are being loaded, which begins here if there is room for them."""
        transfer, connector = sequence.kv_transfer, self._connector
        if transfer is None or connector is None:
            return False
        if transfer.is_loading:
            return transfer.stage is FetchStage.IN_PROGRESS
        if not connector.loads(sequence):
            connector.move(sequence, FetchStage.NONE)
            return False
        hits = self.cache.find(sequence)
        local = len(hits) * self.cache.block_size
        external = sequence.num_prompt_tokens - local
        if not self.cache.admit_to_load(sequence, hits, local + external, self._num_reserved_blocks()):
            return False
        connector.admitted(sequence, local, external)
        connector.move(sequence, FetchStage.IN_PROGRESS)
        sequence.num_cached_tokens = local + external
        step.loading.append(sequence)
        return True

    def _num_reserved_blocks(self) -> int:
        """Return how many blocks those lack whose prompt is being computed."""
        return sum(
            self.cache.blocks_for(sequence.num_tokens) - sequence.num_blocks
            for sequence in self.running
            if sequence.num_computed_tokens < sequence.num_tokens
        )

    def _admit(self, step: Step, sequence: TokenSequence, budget: int, threshold: int) -> int | None:
        """Give a sequence blocks and schedule its first tokens; return how many, or None: it has to wait."""
        if sequence.kv_transfer is not None and sequence.kv_transfer.stage is not FetchStage.NONE:
            return self._admit_loaded(step, sequence)
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
        if self._connector is not None:
            self._connector.admitted(sequence, computed, 0)
        if sequence.status is Status.PREEMPTED:
            step.resumed.append(sequence)
        else:
            step.new.append(sequence)
            sequence.num_cached_tokens = computed
        self._enter(step, sequence, computed, count)
        return count

    def _admit_loaded(self, step: Step, sequence: TokenSequence) -> int | None:
        """Do likewise for one whose prompt has been loaded and has its blocks: its last token is computed anyway."""
        if sequence.kv_transfer is None or not sequence.kv_transfer.is_loading:
            # There was no room for what it has to load.
            return None
        self.cache.name_blocks(sequence, sequence.num_tokens)
        count = 0 if sequence.leaves_a_token else 1
        step.new.append(sequence)
        self._enter(step, sequence, sequence.num_tokens - 1, count)
        return count

    def _enter(self, step: Step, sequence: TokenSequence, computed: int, count: int) -> None:
        """Schedule the first tokens of a sequence that has its blocks."""
        sampled = 0
        if computed + count == sequence.num_tokens:
            sampled = min(self._config.tokens_per_step, sequence.limit - sequence.num_tokens)
        sequence.num_computed_tokens = computed + count
        sequence.num_output_placeholders = sampled
        step.sequences.append(sequence)
        step.num_computed.append(computed)
        step.num_tokens.append(count)
        step.num_sampled.append(sampled)

    def _preempt(self, sequence: TokenSequence, now: float, *, drops_stale: bool = False) -> None:
        """Take everything from a sequence that has left the running ones, and put it before those that wait."""
        self._free(sequence)
        # What is dropped is computed again, so what came after it is too.
        sequence.drops_stale = drops_stale or (sequence.drops_stale and self._is_stale(sequence))
        on_their_way = (step.number for step in self._under_way if sequence in step)
        sequence.stale_through = max(on_their_way, default=0)
        sequence.status = Status.PREEMPTED
        sequence.is_plain = False
        sequence.num_computed_tokens = 0
        sequence.num_output_placeholders = 0
        sequence.num_preemptions += 1
        self._note_event(sequence, EventType.PREEMPTED, now)
        self._waiting.put_back([sequence])
        self._preempted.append(sequence)

    def _note_event(self, sequence: TokenSequence, event: EventType, now: float) -> None:
        """Have the next output tell an event, unless it has too many to tell already."""
        if len(sequence.events) < _MOST_EVENTS:
            sequence.events.append(EngineCoreEvent(event, now))

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
        params = self._finish(result, sequence, prefill_stats) if is_finished else None
        if events or prefill_stats or is_finished:
            result.news[len(result.sequences)] = News(events, prefill_stats, is_finished, params)
        result.sequences.append(sequence)
        result.num_new_tokens.append(count)

    def _prefill_stats(self, sequence: TokenSequence) -> PrefillStats | None:
        """Return how the prompt was computed, once."""
        if sequence.has_said_something:
            return None
        sequence.has_said_something = True
        prompt, cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
        external = 0 if sequence.kv_transfer is None else sequence.kv_transfer.num_external_tokens
        named = min(len(sequence.named_blocks) * self.cache.block_size, prompt)
        return PrefillStats(
            num_prompt_tokens=prompt,
            num_computed_tokens=prompt - cached,
            num_cached_tokens=cached,
            num_local_cached_tokens=cached - external,
            num_external_cached_tokens=external,
            num_cache_creation_tokens=max(0, named - cached),
        )

    def _finish(
        self, result: StepResult, sequence: TokenSequence, prefill_stats: PrefillStats | None
    ) -> Mapping[str, object] | None:
        """End a sequence that has said its last token; return what another instance needs that goes on with it."""
        transfer = sequence.kv_transfer
        if self._connector is None or transfer is None:
            self._end(sequence)
            return None
        params = self._connector.finished(sequence, self.cache.block_size, prefill_stats)
        self._end(sequence, keeps_blocks=transfer.num_kept_blocks > 0)
        if transfer.num_kept_blocks:
            result.kept.append(sequence)
        return params

    def _end(self, sequence: TokenSequence, *, keeps_blocks: bool = False) -> None:
        if sequence.status is not _RUNNING:
            self._leave_queue(sequence)
        if not keeps_blocks:
            self._free(sequence)
        sequence.status = Status.FINISHED
        sequence.is_plain = False
        del self._sequences[sequence.request_id]
        self._has_ended_some = True

    def _free(self, sequence: TokenSequence) -> None:
        """Free the blocks of a sequence, as soon as nothing may be written into them any more."""
        if self._is_written(sequence):
            last = max(step.number for step in self._under_way if not step.is_empty)
            self._detached.append((last, self.cache.detach(sequence)))
        else:
            self.cache.free(sequence)

    def _is_written(self, sequence: TokenSequence) -> bool:
        """Tell whether a step under way writes into blocks of a sequence, where that matters."""
        if self._connector is None or not self._connector.must_not_overtake:
            return False
        return any(sequence in step for step in self._under_way)

    def _hold(self, sequence: TokenSequence) -> None:
        """Let a sequence wait that holds blocks."""
        self._holding.add(sequence)
        sequence.waits_with_blocks = True

    def _leave_queue(self, sequence: TokenSequence) -> None:
        queue = self._holding if sequence.waits_with_blocks else self._waiting
        queue.remove(sequence)
        sequence.waits_with_blocks = False
        if self._connector is not None:
            self._connector.move(sequence, FetchStage.NONE)
        self._skipped.discard(sequence)
