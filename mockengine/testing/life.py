# SPDX-License-Identifier: Apache-2.0
"""One request's life, as a frontend sees it (protocol sections 4.2 to 4.5): judges each output against those before.

It knows what was asked, and no other request. Where an output goes and who sends it is judged elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from mockengine.testing.rules import EngineMistakeError, Rule
from mockengine.wire.logprobs import LogprobsLists
from mockengine.wire.outputs import EngineCoreOutput, EventType, FinishReason
from mockengine.wire.stats import PrefillStats

# An engine may refuse or abort a request that it never scheduled; every other end follows from having run.
_ENDS_WITHOUT_RUNNING: Final = (None, FinishReason.ABORT, FinishReason.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a client wants of one request.

    Attributes:
        request_id: names it.
        client: who is to hear the outputs.
        rank: who is to make them.
        prompt_tokens: length of its prompt; None where only the engine can tell.
        wants_logprobs: whether every token is to be scored.
        wants_prompt_logprobs: whether the prompt is.
        is_pooling: whether a tensor is wanted instead of tokens.

    """

    request_id: str
    client: int
    rank: int
    prompt_tokens: int | None = None
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    is_pooling: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any], rank: int, client: int) -> Self:
        """Read it off the fields of an EngineCoreRequest, as wire values by name."""
        prompt, params = values.get("prompt_token_ids"), values.get("sampling_params")
        sampling = params if isinstance(params, dict) else {}
        return cls(
            request_id=values["request_id"],
            client=client,
            rank=rank,
            prompt_tokens=len(prompt) if isinstance(prompt, list) else None,
            wants_logprobs=any(sampling.get(key) is not None for key in ("logprobs", "logprob_token_ids")),
            wants_prompt_logprobs=sampling.get("prompt_logprobs") is not None,
            is_pooling=values.get("pooling_params") is not None,
        )


@dataclass(slots=True)
class Reply:
    """What has been heard of one request.

    Attributes:
        outputs: every output, in order.
        timestamps: of the envelopes they came in, engine seconds.

    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it has not."""
        return self.outputs[-1].finish_reason if self.outputs else None


class Life:
    """What one request has been through.

    Attributes:
        asked: what was wanted.
        was_aborted: whether its client has given it up.
        has_ended: whether the output with the finish reason was heard.
        was_reported: whether `finished_requests` has named it.

    """

    def __init__(self, asked: Asked, *, was_aborted: bool, needs_prefill_stats: bool) -> None:
        self.asked = asked
        self.was_aborted = was_aborted
        self.has_ended = False
        self.was_reported = False
        self._needs_prefill_stats = needs_prefill_stats and not asked.is_pooling
        self._has_prefill_stats = False
        self._has_run = False
        self._first_event_s: dict[EventType, float] = {}
        self._last_event_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether the engine has said that it is done with the request, in one way or the other."""
        return self.has_ended or self.was_reported

    def hear(self, output: EngineCoreOutput, timestamp_s: float) -> None:
        """Take its next output, of an envelope of that time; 0 is an envelope that does not tell its time.

        Raises:
            EngineMistakeError: a frontend would suffer from it.

        """
        self._judge_end(output)
        self._judge_events(output, timestamp_s)
        self._judge_pooling(output)
        self._judge_prefill_stats(output)
        self._judge_scores(output)
        self._has_run = self._has_run or _shows_running(output)
        self.has_ended = output.finish_reason is not None

    def hear_finished(self) -> None:
        """Take its place in a `finished_requests`, after the outputs beside it.

        Raises:
            EngineMistakeError: it comes too early, or for the second time.

        """
        if not self.has_ended and not self.was_aborted:
            self._fail(Rule.FINISHED_BEFORE_FINAL, "its final output has not come")
        if self.was_reported:
            self._fail(Rule.FINISHED_REPEATED, "it was named before")
        self.was_reported = True

    def _fail(self, rule: Rule, found: str) -> None:
        raise EngineMistakeError(rule, f"request {self.asked.request_id}: {found}")

    def _judge_end(self, output: EngineCoreOutput) -> None:
        if not self.has_ended:
            return
        if output.finish_reason is not None:
            self._fail(Rule.SECOND_FINAL, f"{output.finish_reason.name} after it had ended")
        self._fail(Rule.OUTPUT_AFTER_FINAL, f"{len(output.new_token_ids)} tokens after it had ended")

    def _judge_events(self, output: EngineCoreOutput, timestamp_s: float) -> None:
        for event in output.events:
            if event.timestamp < self._last_event_s:
                self._fail(Rule.EVENTS_OUT_OF_ORDER, f"{event.type.name} at {event.timestamp}, after a later event")
            if timestamp_s and event.timestamp > timestamp_s:
                found = f"{event.type.name} at {event.timestamp} in an envelope of {timestamp_s}"
                self._fail(Rule.EVENTS_OUT_OF_ORDER, found)
            self._last_event_s = event.timestamp
            self._first_event_s.setdefault(event.type, event.timestamp)
        queued_s = self._first_event_s.get(EventType.QUEUED)
        scheduled_s = self._first_event_s.get(EventType.SCHEDULED)
        if queued_s is not None and scheduled_s is not None:
            if queued_s > scheduled_s:
                self._fail(Rule.EVENTS_OUT_OF_ORDER, f"QUEUED at {queued_s}, SCHEDULED at {scheduled_s}")
        elif _shows_running(output):
            told = sorted(event.name for event in self._first_event_s)
            self._fail(Rule.EVENTS_MISSING, f"it ran; of its events came {told}")

    def _judge_pooling(self, output: EngineCoreOutput) -> None:
        tensor = output.pooling_output
        if self.asked.is_pooling and (tensor is None or tensor.is_ndarray):
            found = "no tensor" if tensor is None else f"an array of {tensor.dtype}"
            self._fail(Rule.POOLING_WITHOUT_TENSOR, found)
        if tensor is not None and not self.asked.is_pooling:
            self._fail(Rule.POOLING_NOT_ASKED, f"a tensor of shape {list(tensor.shape)}")

    def _judge_prefill_stats(self, output: EngineCoreOutput) -> None:
        stats = output.prefill_stats
        if stats is not None:
            if self._has_prefill_stats:
                self._fail(Rule.PREFILL_STATS_REPEATED, f"{stats}")
            self._has_prefill_stats = True
            if not self._adds_up(stats):
                self._fail(Rule.PREFILL_STATS_WRONG, f"{stats} of a prompt of {self.asked.prompt_tokens} tokens")
        elif self._needs_prefill_stats and not self._has_prefill_stats and _shows_running(output):
            self._fail(Rule.PREFILL_STATS_MISSING, "it ran")

    def _adds_up(self, stats: PrefillStats) -> bool:
        whole = self.asked.prompt_tokens
        return (
            stats.num_prompt_tokens == stats.num_computed_tokens + stats.num_cached_tokens
            and stats.num_cached_tokens == stats.num_local_cached_tokens + stats.num_external_cached_tokens
            and whole in (None, stats.num_prompt_tokens)
        )

    def _judge_scores(self, output: EngineCoreOutput) -> None:
        asked, tokens = self.asked, len(output.new_token_ids)
        self._judge_rows(output.new_logprobs, "logprobs", tokens, wanted=asked.wants_logprobs, as_tensors=False)
        wants_prompt = asked.wants_prompt_logprobs and not self._has_run
        # Nothing comes before the first token of a prompt that could be said to lead to it.
        rows = (asked.prompt_tokens or 1) - 1 if tokens else 0
        self._judge_rows(
            output.new_prompt_logprobs, "logprobs of the prompt", rows, wanted=wants_prompt, as_tensors=True
        )

    def _judge_rows(
        self, scores: LogprobsLists | None, what: str, rows: int, *, wanted: bool, as_tensors: bool
    ) -> None:
        if scores is None:
            if wanted and rows:
                self._fail(Rule.LOGPROBS_MISSING, f"no {what} where {rows} rows are due")
            return
        if not wanted:
            self._fail(Rule.LOGPROBS_NOT_ASKED, f"{what} of shape {list(scores.token_ids.shape)}")
        parts = (scores.token_ids, scores.logprobs, scores.ranks)
        width = scores.token_ids.shape[1:]
        shapes = [part.shape for part in parts]
        if shapes != [(rows, *width), (rows, *width), (rows,)] or len(width) != 1 or width == (0,):
            self._fail(Rule.LOGPROBS_MALFORMED, f"{what} of shapes {shapes} where {rows} rows are due")
        if any(part.is_ndarray == as_tensors for part in parts):
            self._fail(Rule.LOGPROBS_MALFORMED, f"{what} of types {[part.dtype for part in parts]}")


def _shows_running(output: EngineCoreOutput) -> bool:
    """Tell whether this output can only come of a request that was scheduled."""
    return bool(output.new_token_ids) or output.finish_reason not in _ENDS_WITHOUT_RUNNING
