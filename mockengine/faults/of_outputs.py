# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the messages about a request (protocol sections 0 and 4).

Several of these end a frontend for good, which is what they are for: section 0 has the rules that they break.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from mockengine.faults.edits import STATS, UTILITY, RequestEdit, SaidEnvelope
from mockengine.faults.fault import OutputFault

_ENVELOPE_ITEMS = 9
_NO_CALL = -2


class Drop(OutputFault):
    """Nothing of what the engine says of the request leaves, although the engine believes that it has.

    A message that was lost between processes, an output handler that swallowed an exception.
    """

    fault: Literal["drop"] = "drop"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what takes all outputs of a request away."""
        return _Dropping(request_id)


class _Dropping(RequestEdit):
    def apply(self, envelope: SaidEnvelope) -> None:
        output = envelope.output(self.request_id)
        if output is not None:
            self.is_done = envelope.ends(self.request_id)
            envelope.outputs.remove(output)
            envelope.is_changed = True


class WrongCounts(OutputFault):
    """The last output has more tokens than were asked for, and more of the prompt was cached than there is of it.

    An off-by-one of a scheduler, drafts that were counted twice.
    """

    fault: Literal["wrong_counts"] = "wrong_counts"
    surplus: Annotated[int, Field(ge=1, le=10_000)] = Field(default=3, description="By how many tokens.")

    def edit(self, request_id: str) -> RequestEdit:
        """Return what makes counts of a request wrong."""
        return _Miscounting(request_id, self.surplus)


class _Miscounting(RequestEdit):
    def __init__(self, request_id: str, surplus: int) -> None:
        super().__init__(request_id)
        self._surplus = surplus

    def apply(self, envelope: SaidEnvelope) -> None:
        output = envelope.output(self.request_id)
        if output is None:
            return
        prefill = envelope.field(output, "prefill_stats")
        if prefill is not None:
            prefill["num_cached_tokens"] = prefill["num_prompt_tokens"] + self._surplus
            envelope.is_changed = True
        if envelope.ends(self.request_id):
            output[1] = [*output[1], *(output[1][-1:] or [0]) * self._surplus]
            envelope.is_changed = self.is_done = True


class DuplicateFinalOutput(OutputFault):
    """The last output is said twice.

    A message that was sent again after a connection broke.
    """

    fault: Literal["duplicate_final_output"] = "duplicate_final_output"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what repeats the end of a request."""
        return _Repeating(request_id)


class _Repeating(RequestEdit):
    def apply(self, envelope: SaidEnvelope) -> None:
        if envelope.ends(self.request_id):
            envelope.add_message([envelope.output(self.request_id)])
            self.is_done = True


class UnknownId(OutputFault):
    """An output of a request that nobody has made comes with one of the request.

    An engine that goes on with what a frontend has aborted or, restarted, never asked for.
    """

    fault: Literal["unknown_id"] = "unknown_id"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what adds an output of another id."""
        return _Stranger(request_id)


class _Stranger(RequestEdit):
    def apply(self, envelope: SaidEnvelope) -> None:
        if envelope.output(self.request_id) is not None:
            envelope.outputs.append([f"nobody-asked-for-{self.request_id}", [1]])
            envelope.is_changed = self.is_done = True


class _Breaking(RequestEdit):
    """Makes the first message wrong that says something of a request."""

    def apply(self, envelope: SaidEnvelope) -> None:
        output = envelope.output(self.request_id)
        if output is not None:
            self.is_done = self.has_broken(envelope, output)
            envelope.is_changed = envelope.is_changed or self.is_done

    def has_broken(self, envelope: SaidEnvelope, output: list[Any]) -> bool:
        """Make it wrong, and tell whether that could be done."""
        raise NotImplementedError


class UndecodableFrame(OutputFault):
    """A message about the request is cut off in the middle.

    A buffer that was used again before it was sent, memory that is damaged.
    """

    fault: Literal["undecodable_frame"] = "undecodable_frame"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what cuts a message off."""
        return _CuttingOff(request_id)


class _CuttingOff(_Breaking):
    def has_broken(self, envelope: SaidEnvelope, output: list[Any]) -> bool:  # noqa: ARG002 - all of it breaks
        whole = next(iter(envelope.messages()))[0]
        envelope.replacement = whole[: len(whole) // 2]
        return True


class EnvelopeTooLong(OutputFault):
    """A message about the request has an item more than its layout.

    An engine of a later release than its frontend.
    """

    fault: Literal["envelope_too_long"] = "envelope_too_long"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what makes an envelope longer."""
        return _LongEnvelope(request_id)


class _LongEnvelope(_Breaking):
    def has_broken(self, envelope: SaidEnvelope, output: list[Any]) -> bool:  # noqa: ARG002 - all of it breaks
        envelope.put(_ENVELOPE_ITEMS, 0)
        return True


class OutputTooLong(OutputFault):
    """An output of the request has an item more than its layout.

    An engine of a later release than its frontend.
    """

    fault: Literal["output_too_long"] = "output_too_long"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what makes an output longer."""
        return _LongOutput(request_id)


class _LongOutput(_Breaking):
    def has_broken(self, envelope: SaidEnvelope, output: list[Any]) -> bool:
        fields = envelope.line.output_fields
        # Counts are never nil.
        filling = [0 if name.startswith("num_") else None for name in fields[len(output) :]]
        output += [*filling, 0]
        return True


class MixedEnvelope(OutputFault):
    """A message about the request answers a utility call too, which none may.

    Two threads that fill one message.
    """

    fault: Literal["mixed_envelope"] = "mixed_envelope"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what mixes two kinds of envelopes."""
        return _Mixing(request_id)


class _Mixing(_Breaking):
    def has_broken(self, envelope: SaidEnvelope, output: list[Any]) -> bool:  # noqa: ARG002 - all of it breaks
        envelope.put(UTILITY, [_NO_CALL, None, [None, None]])
        return True


class NegativeCounter(OutputFault):
    """More tokens of the prompt are said to be cached than it has, so that a count is below 0.

    Just that: a difference of two counts that were taken at different moments.
    """

    fault: Literal["negative_counter"] = "negative_counter"

    def edit(self, request_id: str) -> RequestEdit:
        """Return what makes counts of the prompt negative."""
        return _Negative(request_id)


class _Negative(_Breaking):
    def has_broken(self, envelope: SaidEnvelope, output: list[Any]) -> bool:
        prefill = envelope.field(output, "prefill_stats")
        if prefill is not None:
            prefill["num_computed_tokens"] = prefill["num_cache_creation_tokens"] = -1
        return prefill is not None


class MissingStatsKey(OutputFault):
    """The statistics that come with an output of the request lack a key.

    An engine of an earlier release than its frontend.
    """

    fault: Literal["missing_stats_key"] = "missing_stats_key"
    key: str = Field(default="kv_cache_usage", min_length=1, max_length=100, description="The key that is left out.")

    def edit(self, request_id: str) -> RequestEdit:
        """Return what takes a key out of the statistics."""
        return _LackingKey(request_id, self.key)


class _LackingKey(RequestEdit):
    """Waits for statistics, which a message to one client brings for all."""

    def __init__(self, request_id: str, key: str) -> None:
        super().__init__(request_id)
        self._key = key

    def apply(self, envelope: SaidEnvelope) -> None:
        stats = envelope.item(STATS)
        if stats is not None:
            envelope.is_changed = stats.pop(self._key, None) is not None or envelope.is_changed
            self.is_done = True
