# SPDX-License-Identifier: Apache-2.0
"""EngineCoreOutputs: everything an engine says on an output socket (protocol sections 0, 2.2 and 4).

The rules that keep a frontend alive are built in: an envelope is exactly one of four values, never a mixture; counts
are never negative; no array is longer than the frontend's line allows, trailing defaults are cut off.
"""

from array import array as typed_array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

from mockengine.wire.codec import WireError, pack, unpack
from mockengine.wire.lines import NEWEST, Line
from mockengine.wire.logprobs import LogprobsLists, read_logprobs
from mockengine.wire.record import keyword_record, record
from mockengine.wire.stats import (
    PrefillStats,
    SchedulerStats,
    read_prefill_stats,
    read_scheduler_stats,
)
from mockengine.wire.tensors import Tensor, read_tensor
from mockengine.wire.utility import read_utility_output, utility_output
from mockengine.wire.values import UINT32_MAX, array, integer, integers, mapping, number, string, strings, wrong

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
"""Sole frame that tells a frontend that its engine is lost for good."""


class FinishReason(IntEnum):
    """Why a request ended. After STOP frontends drop the text of that output's last token, the stop token."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EventType(IntEnum):
    """What happened to a request in the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@record
class EngineCoreEvent:
    """A scheduler event; `timestamp` is in seconds of the engine's monotonic clock."""

    type: EventType
    timestamp: float


@dataclass(frozen=True, slots=True)
class RequestError:
    """Details of a finish ERROR, known to 0.33: `retryable` is a 503, `code` "validation_error" a 400, else a 500."""

    code: str
    message: str
    retryable: bool = False


@keyword_record
class SpecDecodeMetrics:
    """The drafts of one reply, known from 0.29 on.

    Attributes:
        num_spec_tokens: most drafts of an output.
        histogram: outputs that had drafts, by how many of these were accepted, from 0 to `num_spec_tokens`.
        num_draft_tokens: all drafts.
        per_step_accepted: accepted drafts of each of these outputs in order; may be left out.
        per_step_drafted: their drafts, likewise.

    """

    num_spec_tokens: int
    histogram: tuple[int, ...]
    num_draft_tokens: int
    per_step_accepted: tuple[int, ...] = ()
    per_step_drafted: tuple[int, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """Return the map; raises ValueError on a negative count."""
        values = asdict(self)
        for name, value in values.items():
            if min((value,) if isinstance(value, int) else value, default=0) < 0:
                raise ValueError(f"{name}: a count is negative, which every frontend dies of")
        return values


@keyword_record
class EngineCoreOutput:
    """What one step has to say of one request.

    Attributes:
        new_token_ids: the tokens since the last output, may be none.
        new_logprobs: only when asked for; one row per token.
        new_prompt_logprobs: only when asked for, with the first output.
        prompt_token_id_logprobs: only when asked for, with the first output: `[rows, count]`, float32.
        pooling_output: in every output of a pooling request, even a failed one.
        finish_reason: set in the last output, together with the last token.
        stop_reason: the stop token's id (not for EOS) or `"repetition_detected"`.
        events: with the first output QUEUED and SCHEDULED.
        prefill_stats: with the first output of a request only.
        trace_headers: those of the request.
        mm_cache_miss_hashes: with ERROR, items that were named without data and are not known here; left out where the
            frontend's line does not know it.
        spec_decode_metrics: in the last output; left out where the frontend's line does not know it.
        error: with ERROR; left out where the frontend's line does not know it.

    """

    request_id: str
    new_token_ids: Sequence[int] = ()
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    pooling_output: Tensor | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: tuple[EngineCoreEvent, ...] = ()
    kv_transfer_params: Mapping[str, object] | None = None
    prompt_token_id_logprobs: Tensor | None = None
    trace_headers: Mapping[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    mm_cache_miss_hashes: Sequence[str] = ()
    spec_decode_metrics: SpecDecodeMetrics | None = None
    error: RequestError | None = None


@keyword_record
class StepOutputs:
    """One step's results for one client.

    Attributes:
        engine_index: the rank, which must be one that the frontend manages.
        timestamp: seconds of the engine's monotonic clock, not before any event within.
        outputs: of the requests of this client that made progress.
        scheduler_stats: to one client per step.
        finished_requests: ids finished or aborted; never before their final output.
        weight_version: label of the weights; left out where the frontend's line does not know it.

    """

    engine_index: int
    timestamp: float
    outputs: Sequence[EngineCoreOutput] = ()
    scheduler_stats: SchedulerStats | None = None
    finished_requests: Sequence[str] = ()
    weight_version: str | None = None


@dataclass(frozen=True, slots=True)
class UtilityReply:
    """The answer to one utility call: a failure's text, or a result."""

    engine_index: int
    timestamp: float
    call_id: int
    result: Any = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class StartWave:
    """To the coordinator only: an idle rank of a mixture of experts got work."""

    engine_index: int
    timestamp: float
    wave: int


@dataclass(frozen=True, slots=True)
class WaveComplete:
    """To the coordinator only: all ranks are idle."""

    engine_index: int
    timestamp: float
    wave: int


Envelope = StepOutputs | UtilityReply | StartWave | WaveComplete


def write_envelope(envelope: Envelope, line: Line = NEWEST) -> list[bytes]:
    """Encode an envelope as the frames of one message for a frontend of `line`.

    Raises:
        ValueError: what would kill the frontend: an envelope that says nothing, a negative count or id, scores of
            another shape than the tokens', a tensor where an array is due or the reverse.

    """
    head = [unsigned(envelope.engine_index, "engine_index")]
    aux_frames: list[bytes] = []
    match envelope:
        case StepOutputs():
            items = [*head, *_step_items(envelope, line, aux_frames)]
        case UtilityReply():
            reply = utility_output(envelope.call_id, envelope.failure, envelope.result)
            items = [*head, [], None, envelope.timestamp, reply]
        case WaveComplete():
            items = [*head, [], None, envelope.timestamp, None, None, unsigned(envelope.wave, "wave_complete")]
        case StartWave():
            wave = unsigned(envelope.wave, "start_wave")
            items = [*head, [], None, envelope.timestamp, None, None, None, wave]
    return [pack(items), *aux_frames]


def _step_items(step: StepOutputs, line: Line, aux_frames: list[bytes]) -> list[Any]:
    if not (step.outputs or step.scheduler_stats or step.finished_requests):
        raise ValueError("an envelope without outputs, statistics and finished requests kills a Rust frontend")
    stats = step.scheduler_stats
    return [
        [output_items(output, line, aux_frames) for output in step.outputs],
        stats and stats.to_wire(with_encoder_cache_usage=line.stats_have_encoder_cache_usage),
        *step_tail_items(step, line),
    ]


def step_tail_items(step: StepOutputs, line: Line) -> list[Any]:
    """Return what follows outputs and statistics in a step's array."""
    items: list[Any] = [step.timestamp]
    label = step.weight_version if line.has_weight_version else None
    if step.finished_requests or label is not None:
        items += [None, list(step.finished_requests) or None]
    if label is not None:
        items += [None, None, label]
    return items


def output_items(output: EngineCoreOutput, line: Line, aux_frames: list[bytes]) -> list[Any]:
    """Return the items of one output's array, the last of them something.

    Args:
        output: what is said.
        line: the frontend's.
        aux_frames: of the message, to which the data of large tensors is added.

    Raises:
        ValueError: as `write_envelope`.

    """
    items: list[Any] = [output.request_id, _token_ids(output.new_token_ids)]
    positions = line.output_positions
    for name, value in _said(output, aux_frames):
        position = positions.get(name)
        if position is None:
            continue
        # A position in between takes its default.
        while len(items) <= position:
            items.append(0 if line.output_fields[len(items)] in _COUNTS else None)
        items[position] = value
    return items


def _said(output: EngineCoreOutput, aux_frames: list[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield what an output says besides its tokens, by field name of any line."""
    if output.finish_reason is not None:
        yield "finish_reason", output.finish_reason
    if output.events:
        yield "events", [{"type": event.type, "timestamp": event.timestamp} for event in output.events]
    prefill = output.prefill_stats
    if prefill is not None:
        yield "prefill_stats", prefill.to_wire()
        yield "num_cached_tokens", prefill.num_cached_tokens
        yield "num_external_computed_tokens", prefill.num_external_cached_tokens
    if output.trace_headers is not None:
        yield "trace_headers", dict(output.trace_headers)
    if output.spec_decode_metrics is not None:
        yield "spec_decode_metrics", output.spec_decode_metrics.to_wire()
    yield from _said_of_scores(output)
    yield from _said_seldom(output, aux_frames)


def _said_of_scores(output: EngineCoreOutput) -> Iterator[tuple[str, Any]]:
    """Yield how likely tokens were."""
    scores, prompt_scores = output.new_logprobs, output.new_prompt_logprobs
    if scores is not None:
        if scores.rows != len(output.new_token_ids):
            raise ValueError(f"new_logprobs: {scores.rows} rows where {len(output.new_token_ids)} tokens are scored")
        yield "new_logprobs", scores.to_wire(as_tensors=False)
    if prompt_scores is not None:
        yield "new_prompt_logprobs_tensors", prompt_scores.to_wire(as_tensors=True)
    if output.prompt_token_id_logprobs is not None:
        yield "prompt_token_id_logprobs", output.prompt_token_id_logprobs.to_wire()


def _said_seldom(output: EngineCoreOutput, aux_frames: list[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield what few outputs say."""
    if output.pooling_output is not None:
        if output.pooling_output.is_ndarray:
            raise ValueError("pooling_output: an array where a tensor is due, which a Python frontend dies of")
        yield "pooling_output", output.pooling_output.to_wire(aux_frames)
    if output.stop_reason is not None:
        if isinstance(output.stop_reason, int):
            unsigned(output.stop_reason, "stop_reason")
        yield "stop_reason", output.stop_reason
    if output.kv_transfer_params is not None:
        yield "kv_transfer_params", dict(output.kv_transfer_params)
    if output.mm_cache_miss_hashes:
        yield "mm_cache_miss_hashes", list(output.mm_cache_miss_hashes)
    if output.error is not None:
        yield "error", asdict(output.error)


def _token_ids(token_ids: Sequence[int]) -> list[int]:
    try:
        return typed_array("I", token_ids).tolist()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"new_token_ids: {error}, where unsigned 32-bit ids are expected") from error


def unsigned(value: int, name: str) -> int:
    """Return `value`; raises ValueError unless it is an unsigned 32-bit int."""
    if not 0 <= value <= UINT32_MAX:
        raise ValueError(f"{name}: {value} is no unsigned 32-bit int")
    return value


class EngineCoreDead(Exception):  # noqa: N818 - it is news from the wire, not a fault of the reader
    """The sole frame `ENGINE_CORE_DEAD` arrived."""


def read_envelope(frames: Sequence[bytes], line: Line = NEWEST) -> Envelope:
    """Decode one message of an engine as strictly as a Rust frontend of `line` does.

    Raises:
        EngineCoreDead: the engine says that it is lost.
        WireError: what such a frontend dies of, by place and reason.

    """
    if not frames:
        raise WireError("EngineCoreOutputs: a message without frames")
    if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
        raise EngineCoreDead
    items = array(unpack(frames[0]), "EngineCoreOutputs")
    most = _ENVELOPE_ITEMS if line.has_weight_version else _ENVELOPE_ITEMS - 1
    if not 1 <= len(items) <= most:
        raise wrong("EngineCoreOutputs", items, f"an array of at most {most} for {line.name}")
    items += _ENVELOPE_DEFAULTS[len(items) :]
    index, outputs, stats, timestamp, utility, finished, wave_complete, start_wave, weight_version = items
    rank = integer(index, "engine_index")
    now = number(timestamp, "timestamp")
    read_outputs = [read_output(item, frames[1:], line) for item in array(outputs, "outputs")]
    is_step = bool(read_outputs) or stats is not None or finished is not None
    if [is_step, utility is not None, wave_complete is not None, start_wave is not None].count(True) != 1:
        raise WireError("EngineCoreOutputs: exactly one of step outputs, utility reply and wave message is expected")
    if utility is not None:
        call_id, failure, result = read_utility_output(utility)
        return UtilityReply(rank, now, call_id, result, failure)
    if wave_complete is not None:
        return WaveComplete(rank, now, integer(wave_complete, "wave_complete"))
    if start_wave is not None:
        return StartWave(rank, now, integer(start_wave, "start_wave"))
    return StepOutputs(
        engine_index=rank,
        timestamp=now,
        outputs=tuple(read_outputs),
        scheduler_stats=None if stats is None else read_scheduler_stats(stats),
        finished_requests=() if finished is None else strings(finished, "finished_requests"),
        weight_version=None if weight_version is None else string(weight_version, "weight_version"),
    )


_ENVELOPE_DEFAULTS: Final[tuple[Any, ...]] = (0, [], None, 0.0, None, None, None, None, None)
"""What a missing position stands for; only where that is nil may a nil be said."""
_ENVELOPE_ITEMS: Final = len(_ENVELOPE_DEFAULTS)
_OUTPUT_ITEMS_LEAST: Final = 2
_COUNTS: Final = ("num_nans_in_logits", "num_cached_tokens", "num_external_computed_tokens")
"""Fields of one line or another that are never nil."""


def read_output(value: Any, aux_frames: Sequence[bytes], line: Line) -> EngineCoreOutput:
    """Decode one EngineCoreOutput, which may be shorter than its layout but never longer.

    Raises:
        WireError: by field and reason.

    """
    items = array(value, "output")
    if not _OUTPUT_ITEMS_LEAST <= len(items) <= len(line.output_fields):
        raise wrong("output", items, f"an array of {_OUTPUT_ITEMS_LEAST} to {len(line.output_fields)} for {line.name}")
    said = dict(zip(line.output_fields, items, strict=False))
    for name in _COUNTS:
        integer(said.get(name, 0), name)
    present = {name: item for name, item in said.items() if item is not None}
    fields: dict[str, Any] = {
        _ATTRIBUTES.get(name, name): _OUTPUT_READERS[name](item, aux_frames)
        for name, item in present.items()
        if name in _OUTPUT_READERS
    }
    return EngineCoreOutput(
        request_id=string(said["request_id"], "request_id"),
        new_token_ids=integers(said["new_token_ids"], "new_token_ids", high=UINT32_MAX),
        **fields,
    )


def _read_events(value: Any) -> tuple[EngineCoreEvent, ...]:
    events = [mapping(item, "event") for item in array(value, "events")]
    return tuple(
        EngineCoreEvent(
            EventType(integer(event.get("type"), "event.type", low=1, high=max(EventType))),
            number(event.get("timestamp"), "event.timestamp"),
        )
        for event in events
    )


def _read_error(value: Any) -> RequestError:
    error = mapping(value, "error")
    return RequestError(
        string(error.get("code"), "error.code"),
        string(error.get("message"), "error.message"),
        error.get("retryable") is True,
    )


def _read_spec_decode_metrics(value: Any) -> SpecDecodeMetrics:
    metrics = mapping(value, "spec_decode_metrics")
    lists = ("histogram", "per_step_accepted", "per_step_drafted")
    return SpecDecodeMetrics(
        num_spec_tokens=integer(metrics.get("num_spec_tokens"), "spec_decode_metrics.num_spec_tokens"),
        num_draft_tokens=integer(metrics.get("num_draft_tokens"), "spec_decode_metrics.num_draft_tokens"),
        **{name: integers(metrics.get(name), f"spec_decode_metrics.{name}") for name in lists},
    )


def _read_stop_reason(value: Any) -> int | str:
    return value if isinstance(value, str) else integer(value, "stop_reason")


_ATTRIBUTES: Final = {"new_prompt_logprobs_tensors": "new_prompt_logprobs"}
_OUTPUT_READERS: Final[Mapping[str, Callable[[Any, Sequence[bytes]], Any]]] = {
    "new_logprobs": lambda value, aux: read_logprobs(value, aux, "new_logprobs"),
    "new_prompt_logprobs_tensors": lambda value, aux: read_logprobs(value, aux, "new_prompt_logprobs_tensors"),
    "pooling_output": lambda value, aux: read_tensor(value, aux, "pooling_output"),
    "finish_reason": lambda value, _aux: FinishReason(integer(value, "finish_reason", high=max(FinishReason))),
    "stop_reason": lambda value, _aux: _read_stop_reason(value),
    "events": lambda value, _aux: _read_events(value),
    "prompt_token_id_logprobs": lambda value, aux: read_tensor(value, aux, "prompt_token_id_logprobs"),
    "kv_transfer_params": lambda value, _aux: mapping(value, "kv_transfer_params"),
    "trace_headers": lambda value, _aux: mapping(value, "trace_headers"),
    "prefill_stats": lambda value, _aux: read_prefill_stats(value),
    "mm_cache_miss_hashes": lambda value, _aux: strings(value, "mm_cache_miss_hashes"),
    "spec_decode_metrics": lambda value, _aux: _read_spec_decode_metrics(value),
    "error": lambda value, _aux: _read_error(value),
}
