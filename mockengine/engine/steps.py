# SPDX-License-Identifier: Apache-2.0
"""Steps of the scheduler: what one computes, what has come of it, and how many are under way at once."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mockengine.engine.sequences import TokenSequence
from mockengine.engine.timing import StepLoad
from mockengine.wire.outputs import EngineCoreEvent
from mockengine.wire.stats import PrefillStats


@dataclass(slots=True, eq=False)
class Step:
    """What one step computes.

    Attributes:
        number: counts the scheduler's steps, from 1 on.
        sequences: what it computes tokens of, in order.
        num_computed: how many had been computed before, for each of them.
        num_tokens: how many it computes, for each of them.
        num_sampled: output tokens that each gets by it; 0 while its prompt is not complete.
        new: sequences admitted for the first time.
        resumed: sequences admitted again after a preemption.
        preempted: sequences that lost their blocks since the step before.
        loading: sequences that got blocks and wait for these to be loaded from another instance.

    """

    number: int
    sequences: list[TokenSequence] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    new: list[TokenSequence] = field(default_factory=list)
    resumed: list[TokenSequence] = field(default_factory=list)
    preempted: list[TokenSequence] = field(default_factory=list)
    loading: list[TokenSequence] = field(default_factory=list)
    _members: frozenset[TokenSequence] | None = field(default=None, init=False)

    def __contains__(self, sequence: TokenSequence) -> bool:
        """Whether it computes tokens of a sequence; to be asked once it is complete."""
        if self._members is None:
            self._members = frozenset(self.sequences)
        return sequence in self._members

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Tokens computed of each request, by id and in order."""
        ids = (sequence.request_id for sequence in self.sequences)
        return dict(zip(ids, self.num_tokens, strict=True))

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens computed of all."""
        return sum(self.num_tokens)

    def load(self, tokens_per_step: int = 1) -> StepLoad:
        """Return what its duration may depend on."""
        prefill_tokens = decodes = context_tokens = 0
        for sequence, computed, count in zip(self.sequences, self.num_computed, self.num_tokens, strict=True):
            if count > tokens_per_step or computed < sequence.num_prompt_tokens:
                # Padding is drafts, which take no time of their own.
                prefill_tokens += min(count, max(1, sequence.num_tokens - computed))
            else:
                decodes += 1
                context_tokens += computed
        return StepLoad(prefill_tokens, decodes, context_tokens)

    def withdraw(self, sequence: TokenSequence) -> int:
        """Take a sequence out, if it is in, and return how many tokens are not computed therefore."""
        if sequence not in self.sequences:
            return 0
        index = self.sequences.index(sequence)
        del self.sequences[index], self.num_computed[index], self.num_sampled[index]
        return self.num_tokens.pop(index)

    def leave_a_token(self, index: int) -> None:
        """Compute of a sequence, by index, all but the last token, so that it gets no output by this step."""
        sequence = self.sequences[index]
        self.num_tokens[index] -= 1
        self.num_sampled[index] = 0
        sequence.num_computed_tokens -= 1
        sequence.num_output_placeholders = 0
        sequence.num_draft_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing."""
        return not self.sequences


@dataclass(frozen=True, slots=True)
class News:
    """What an output says beside tokens.

    Attributes:
        events: what happened to the request since its last output.
        prefill_stats: with the first output.
        is_finished: it is the last output.
        kv_transfer_params: with the last output, what another instance needs to load its blocks.

    """

    events: tuple[EngineCoreEvent, ...]
    prefill_stats: PrefillStats | None
    is_finished: bool
    kv_transfer_params: Mapping[str, object] | None = None


class Progress(NamedTuple):
    """One output: so many new tokens, and None or what else there is to say."""

    sequence: TokenSequence
    num_new_tokens: int
    news: News | None


@dataclass(slots=True, eq=False)
class StepResult:
    """What has come of a step, as columns: most sequences have nothing to say but tokens.

    Iterating gives a `Progress` for each output, in order.

    Attributes:
        sequences: those with an output.
        num_new_tokens: their new tokens, for each of them.
        news: what else there is to say, by index.
        kept: sequences that have ended and whose blocks are kept.

    """

    sequences: list[TokenSequence] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    news: dict[int, News] = field(default_factory=dict)
    kept: list[TokenSequence] = field(default_factory=list)

    def __iter__(self) -> Iterator[Progress]:
        for index, (sequence, count) in enumerate(zip(self.sequences, self.num_new_tokens, strict=True)):
            yield Progress(sequence, count, self.news.get(index))


class Steppable(Protocol):
    """What a pipeline needs of a scheduler."""

    @property
    def has_requests(self) -> bool:
        """Whether a step is to be made."""

    def schedule(self, now: float = ...) -> Step:
        """Decide on the next step."""

    def update(self, step: Step) -> StepResult:
        """Take in the result of the oldest step under way."""


class Pipeline:
    """Steps under way, at most `depth` of them: 1 waits for each result, 2 schedules a step while one is computed.

    Whoever drives it calls `start`, and then, if the result of the oldest step is to be waited for, `finish` when it
    has arrived; then again, while `is_busy`.
    """

    def __init__(self, scheduler: Steppable, depth: int) -> None:
        self._scheduler = scheduler
        self._depth = depth
        self._under_way: deque[Step] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether there is something to start or to finish."""
        return bool(self._under_way) or self._scheduler.has_requests

    @property
    def oldest(self) -> Step | None:
        """The step whose result arrives next."""
        return self._under_way[0] if self._under_way else None

    def start(self, now: float = 0.0) -> tuple[Step | None, bool]:
        """Schedule a step, if there is a reason to.

        Returns:
            The step, and whether the result of the oldest one has to be waited for before another one is started.

        """
        if not self._scheduler.has_requests:
            return None, bool(self._under_way)
        step = self._scheduler.schedule(now)
        self._under_way.append(step)
        is_full = len(self._under_way) == self._depth
        return step, is_full or (step.is_empty and not self._scheduler.has_requests)

    def finish(self) -> StepResult:
        """Take in the result of the oldest step."""
        return self._scheduler.update(self._under_way.popleft())
