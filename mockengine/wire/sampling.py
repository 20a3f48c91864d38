# SPDX-License-Identifier: Apache-2.0
"""SamplingParams and PoolingParams: what a client asked of one request (protocol sections 3.2 and 3.3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mockengine.wire.codec import WireError
from mockengine.wire.record import keyword_record
from mockengine.wire.tensors import Tensor
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
)

_INT64_MIN = -(2**63)
_POOLING_ITEMS_LEAST: Final = 5


@keyword_record
class SamplingParams:
    """The fields an engine acts on, with vLLM's defaults; what only a frontend uses is left out.

    Names are vLLM's, without the leading underscore of `_eos_token_id`, `_all_stop_token_ids` and
    `_bad_words_token_ids`. `max_tokens` None means as many as the context allows.
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
class PoolingParams:
    """What the engine needs of a pooling request: its `task` (`embed`, `classify`, `token_embed` …) and its shape."""

    task: str | None
    use_activation: bool | None
    dimensions: int | None


_Reader = Callable[[Any, str], Any]
_token_ids: _Reader = partial(integers, high=UINT32_MAX)
_signed: _Reader = partial(integer, low=_INT64_MIN)


def _token_sequences(value: Any, place: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_token_ids(item, f"{place}[{index}]") for index, item in enumerate(array(value, place)))


def _logit_bias(value: Any, place: str) -> dict[int, float]:
    return {
        integer(token, f"{place} key", high=UINT32_MAX): number(bias, f"{place}[{shown(token)}]")
        for token, bias in mapping(value, place).items()
    }


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


def read_sampling_params(value: Any, place: str) -> SamplingParams:
    """Read a SamplingParams map; unknown keys belong to the frontend or to a later release and are passed over.

    An explicit nil means the default, except for `max_tokens`, where it means without limit.

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
                fields[name] = read(item, key)
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
    use_activation, dimensions, _, _, task = items[:_POOLING_ITEMS_LEAST]
    return PoolingParams(
        task=None if task is None else string(task, f"{place}.task"),
        use_activation=None if use_activation is None else boolean(use_activation, f"{place}.use_activation"),
        dimensions=None if dimensions is None else integer(dimensions, f"{place}.dimensions"),
    )


EMPTY_POOLING_OUTPUT: Final = Tensor("float32", (0,), b"")
"""Must accompany every output of a pooling request that has no vector: without a tensor the Python frontend dies."""
