# SPDX-License-Identifier: Apache-2.0
"""SamplingParams and PoolingParams: what a client asked of one request (protocol sections 3.2 and 3.3)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mockengine.wire.codec import WireError
from mockengine.wire.record import keyword_record
from mockengine.wire.tensors import Tensor, read_tensor
from mockengine.wire.values import (
    UINT32_MAX,
    array,
    boolean,
    integer,
    integers,
    mapping,
    named,
    number,
    shown,
    string,
    strings,
    wrong,
)

_INT64_MIN = -(2**63)
_POOLING_ITEMS_LEAST: Final = 5
_POOLING_ITEMS_READ: Final = 11
_LATE_INTERACTION_ITEMS_LEAST: Final = 2
_IDS_TYPE: Final = "<i4"
_IDS_DIMENSIONS: Final = 2


@keyword_record
class SamplingParams:
    """The fields an engine acts on, with vLLM's defaults; what only a frontend uses is left out.

    Names are vLLM's, without the leading underscore of `_eos_token_id`, `_all_stop_token_ids` and
    `_bad_words_token_ids`. `max_tokens` None means as many as the context allows. `prompt_logprob_token_ids` is an
    array of int32, `[rows, count]`, in which -1 fills up.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    all_stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Tensor | None = None
    prompt_logprob_start: int = 0
    logprob_token_ids: tuple[int, ...] | None = None
    structured_outputs: Mapping[str, object] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    extra_args: Mapping[str, object] | None = None
    skip_reading_prefix_cache: bool = False
    thinking_token_budget: int | None = None
    repetition_detection: Mapping[str, object] | None = None
    trace_decode_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LateInteractionParams:
    """How a request of token embeddings takes part in scoring documents against a query.

    Attributes:
        mode: `cache_query`: its embeddings are kept, `score_doc`: it is scored against those kept.
        query_key: what they are kept under.
        query_uses: how many documents will be scored against them, where the query says so.

    """

    mode: str
    query_key: str
    query_uses: int | None = None


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What the engine needs of a pooling request: its `task` (`embed`, `classify`, `token_embed` …) and its shape.

    Attributes:
        task: None or unknown is what a frontend of another release may send.
        use_activation: whether vectors are normalised and logits become probabilities; None for yes.
        dimensions: how many leading numbers of a vector are wanted; None for all.
        step_tag_id: of a value for each token, those of this token alone are wanted.
        returned_token_ids: of the numbers for each token, these alone are wanted.
        skip_reading_prefix_cache: whether nothing of the prompt may come out of the prefix cache.
        late_interaction_params: with documents that are scored by token embeddings.
        compressed_token_type_ids: where the second text of a pair begins in the prompt, if a model's tokenizer says so.
        late_chunk_size: instead of a vector for each token, the mean of the vectors of so many is wanted.

    """

    task: str | None
    use_activation: bool | None
    dimensions: int | None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    skip_reading_prefix_cache: bool = False
    late_interaction_params: LateInteractionParams | None = None
    compressed_token_type_ids: int | None = None
    late_chunk_size: int | None = None


_Reader = Callable[..., Any]
_token_ids: _Reader = partial(integers, high=UINT32_MAX)
_signed: _Reader = partial(integer, low=_INT64_MIN)


def _token_sequences(value: Any, place: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_token_ids(item, f"{place}[{index}]") for index, item in enumerate(array(value, place)))


def _logit_bias(value: Any, place: str) -> dict[int, float]:
    return {
        integer(token, f"{place} key", high=UINT32_MAX): number(bias, f"{place}[{shown(token)}]")
        for token, bias in mapping(value, place).items()
    }


def _rows_of_token_ids(value: Any, place: str, aux_frames: Sequence[bytes]) -> Tensor:
    tensor = read_tensor(value, aux_frames, place)
    if tensor.dtype != _IDS_TYPE or len(tensor.shape) != _IDS_DIMENSIONS:
        raise WireError(
            f"{place}: {tensor.dtype} of shape {list(tensor.shape)} where {_IDS_TYPE} of [rows, ids] is due"
        )
    return tensor


_READERS: Final[Mapping[str, tuple[str, _Reader]]] = {
    "max_tokens": ("max_tokens", integer),
    "min_tokens": ("min_tokens", integer),
    "_eos_token_id": ("eos_token_id", partial(integer, high=UINT32_MAX)),
    "stop_token_ids": ("stop_token_ids", _token_ids),
    "_all_stop_token_ids": ("all_stop_token_ids", _token_ids),
    "ignore_eos": ("ignore_eos", boolean),
    "bad_words": ("bad_words", strings),
    "_bad_words_token_ids": ("bad_words_token_ids", _token_sequences),
    "temperature": ("temperature", number),
    "top_p": ("top_p", number),
    "top_k": ("top_k", _signed),
    "min_p": ("min_p", number),
    "presence_penalty": ("presence_penalty", number),
    "frequency_penalty": ("frequency_penalty", number),
    "repetition_penalty": ("repetition_penalty", number),
    "seed": ("seed", _signed),
    "logprobs": ("logprobs", _signed),
    "prompt_logprobs": ("prompt_logprobs", _signed),
    "prompt_logprob_token_ids": ("prompt_logprob_token_ids", _rows_of_token_ids),
    "prompt_logprob_start": ("prompt_logprob_start", integer),
    "logprob_token_ids": ("logprob_token_ids", _token_ids),
    "structured_outputs": ("structured_outputs", named),
    "logit_bias": ("logit_bias", _logit_bias),
    "allowed_token_ids": ("allowed_token_ids", _token_ids),
    "extra_args": ("extra_args", named),
    "skip_reading_prefix_cache": ("skip_reading_prefix_cache", boolean),
    "thinking_token_budget": ("thinking_token_budget", _signed),
    "repetition_detection": ("repetition_detection", named),
    "trace_decode_token_ids": ("trace_decode_token_ids", _token_ids),
}


_IN_AUX_FRAMES: Final = frozenset({"prompt_logprob_token_ids"})
"""Fields whose readers need the frames after the payload."""


def read_sampling_params(value: Any, place: str, aux_frames: Sequence[bytes] = ()) -> SamplingParams:
    """Read a SamplingParams map; unknown keys belong to the frontend or to a later release and are passed over.

    An explicit nil means the default, except for `max_tokens`, where it means without limit.

    Args:
        value: the decoded map.
        place: where it stands, for messages.
        aux_frames: the frames after the payload, one of which may hold `prompt_logprob_token_ids`.

    Raises:
        WireError: a field of the wrong type or out of range, by name.

    """
    fields: dict[str, Any] = {}
    for key, item in mapping(value, place).items():
        known = _READERS.get(key)
        if known is None:
            continue
        name, read = known
        if item is not None:
            try:
                fields[name] = read(item, key, aux_frames) if name in _IN_AUX_FRAMES else read(item, key)
            except WireError as error:
                # Only now is it said where; most requests are in order, and have many fields.
                raise WireError(f"{place}.{error}", error.flaw) from error
        elif name == "max_tokens":
            fields[name] = None
    return SamplingParams(**fields)


def read_pooling_params(value: Any, place: str) -> PoolingParams:
    """Read a PoolingParams array of 10 or 11 items.

    Raises:
        WireError: not an array of at least the items up to `task`, or one of them of the wrong type.

    """
    items = array(value, place)
    if len(items) < _POOLING_ITEMS_LEAST:
        raise WireError(f"{place}: {len(items)} items where at least {_POOLING_ITEMS_LEAST} are expected")
    read = [*items[:_POOLING_ITEMS_READ], *[None] * (_POOLING_ITEMS_READ - len(items))]
    use_activation, dimensions, step_tag_id, returned_ids, task, _, skip_cache, late_interaction, extra, _, late = read
    return PoolingParams(
        task=None if task is None else string(task, f"{place}.task"),
        use_activation=None if use_activation is None else boolean(use_activation, f"{place}.use_activation"),
        dimensions=None if dimensions is None else integer(dimensions, f"{place}.dimensions"),
        step_tag_id=None if step_tag_id is None else integer(step_tag_id, f"{place}.step_tag_id"),
        returned_token_ids=None if returned_ids is None else _token_ids(returned_ids, f"{place}.returned_token_ids"),
        skip_reading_prefix_cache=skip_cache is not None and boolean(skip_cache, f"{place}.skip_reading_prefix_cache"),
        late_interaction_params=None if late_interaction is None else _late_interaction(late_interaction, place),
        compressed_token_type_ids=None if extra is None else _second_text(extra, f"{place}.extra_kwargs"),
        late_chunk_size=None if late is None else _late_chunking(late, f"{place}.late_chunking_params"),
    )


def _late_interaction(value: Any, place: str) -> LateInteractionParams:
    place = f"{place}.late_interaction_params"
    items = array(value, place)
    if len(items) < _LATE_INTERACTION_ITEMS_LEAST:
        raise wrong(place, items, "a mode and a query's key")
    mode, query_key, query_uses, *_ = [*items, None]
    return LateInteractionParams(
        mode=string(mode, f"{place}.mode"),
        query_key=string(query_key, f"{place}.query_key"),
        query_uses=None if query_uses is None else integer(query_uses, f"{place}.query_uses"),
    )


def _late_chunking(value: Any, place: str) -> int:
    items = array(value, place)
    if not items:
        raise wrong(place, items, "the size of a chunk")
    return integer(items[0], f"{place}.chunk_size", low=1)


def _second_text(value: Any, place: str) -> int | None:
    """Return the one argument of `extra_kwargs` that matters; the others are a model's own."""
    start = mapping(value, place).get("compressed_token_type_ids")
    return None if start is None else integer(start, f"{place}.compressed_token_type_ids")


EMPTY_POOLING_OUTPUT: Final = Tensor("float32", (0,), b"")
"""Must accompany every output of a pooling request that has no vector: without a tensor the Python frontend dies."""
