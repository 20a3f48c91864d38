# SPDX-License-Identifier: Apache-2.0
"""EngineCoreRequest: the ADD message, in every layout from 0.19 on (protocol section 3.1).

Positions were only ever appended, but for `prompt_is_token_ids`, which was inserted at 10 with 0.21: up to then an int
(`client_index`) stood there, since then an array or nil does. Missing positions take their default, surplus ones are
ignored.
"""

from array import array as typed_array
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mockengine.wire.codec import WireError, unpack
from mockengine.wire.record import keyword_record
from mockengine.wire.sampling import PoolingParams, SamplingParams, read_pooling_params, read_sampling_params
from mockengine.wire.tensors import Tensor, read_tensor
from mockengine.wire.values import WAVE_MAX, array, boolean, integer, mapping, named, number, shown, string, wrong

MAX_REQUEST_ID_BYTES: Final = 65_536
"""An id is repeated in every output, so its length must be bounded; clients can choose it."""

_INT64_MIN = -(2**63)
_OLD_ITEMS_MOST: Final = 18
_INSERTED_POSITION: Final = 10
_SAMPLING_POSITION: Final = 3
_EMBEDDING_DIMENSIONS: Final = 2


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """The adapter a request wants: `[name, int_id, path, base_model, load_inplace, is_3d]`."""

    name: str
    int_id: int
    path: str
    base_model: str | None = None
    load_inplace: bool = False
    is_3d: bool = False


@dataclass(frozen=True, slots=True)
class MultiModalFeature:
    """One image, sound or video of a prompt, without its data (protocol section 3.4).

    Attributes:
        modality: `image`, `audio` …
        identifier: part of the prefix cache's key.
        offset: first of its placeholder tokens in the prompt.
        length: number of its placeholder tokens.
        mm_hash: key under which an engine may hold the data.
        has_data: False when the frontend believes that the engine holds the data.

    """

    modality: str
    identifier: str
    offset: int
    length: int
    mm_hash: str | None
    has_data: bool


@keyword_record
class EngineCoreRequest:
    """One request as a frontend sends it.

    Attributes:
        prompt_token_ids: unsigned 32-bit ids; None only with `prompt_embeds`.
        arrival_time: unix seconds, unlike every other time here.
        items: length of the array it was read from, which tells the frontend's release line.
        sampling_keys: keys of the SamplingParams map it was read from, which tell more of it.

    The other attributes are named and ordered as in vLLM.
    """

    request_id: str
    prompt_token_ids: "typed_array[int] | None" = None
    mm_features: tuple[MultiModalFeature, ...] = ()
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float = 0.0
    lora_request: LoraRequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Tensor | None = None
    prompt_is_token_ids: tuple[bool, ...] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, object] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Mapping[str, object] | None = None
    items: int = 22
    sampling_keys: AbstractSet[str] = frozenset()

    @property
    def is_from_python(self) -> bool:
        """Whether a Python frontend sent it: only that one asks for pooling, or sends stop strings, even none."""
        return self.pooling_params is not None or "stop" in self.sampling_keys

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens; a prompt of embeddings has one per row."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        return self.prompt_embeds.shape[0] if self.prompt_embeds is not None and self.prompt_embeds.shape else 0


def read_request(payload: bytes, aux_frames: Sequence[bytes] = ()) -> EngineCoreRequest:
    """Read the payload of an ADD.

    Args:
        payload: the frame after the request type.
        aux_frames: the frames after the payload, which hold tensors; the data of multimodal features is not read.

    Raises:
        WireError: not an ADD, by field and reason.

    """
    items = array(unpack(payload), "ADD")
    if not items:
        raise WireError("ADD: an empty array where an EngineCoreRequest is expected")
    values: dict[str, Any] = {}
    for (name, read), item in zip(_OLD_LAYOUT if _is_old_layout(items) else _LAYOUT, items, strict=False):
        if item is not None:
            values[name] = read(item, name, aux_frames) if name in _IN_AUX_FRAMES else read(item, name)
    if "request_id" not in values:
        raise wrong("request_id", items[0], "a str")
    sampling = items[_SAMPLING_POSITION] if len(items) > _SAMPLING_POSITION else None
    keys = sampling.keys() if isinstance(sampling, dict) else _NO_KEYS
    return EngineCoreRequest(items=len(items), sampling_keys=keys, **values)


def request_items(values: Mapping[str, object], items: int) -> list[object]:
    """Lay out an EngineCoreRequest of `items` items, for those who play the frontend.

    Args:
        values: wire values by field name; a field that is not named gets its default.
        items: length of the array, which decides the layout as in `read_request`.

    Raises:
        KeyError: a name that is no field of this layout.

    """
    fields = [name for name, _ in (_OLD_LAYOUT if items <= _OLD_ITEMS_MOST else _LAYOUT)[:items]]
    unknown = set(values) - set(fields)
    if unknown:
        raise KeyError(f"{sorted(unknown)}: no fields of a request of {items} items")
    return [values.get(name, _WIRE_DEFAULTS.get(name)) for name in fields]


def read_request_id(value: Any, place: str = "request_id") -> str:
    """Return `value` when it can be a request id: a str of bounded length.

    Raises:
        WireError: another type, or longer than `MAX_REQUEST_ID_BYTES`.

    """
    request_id = string(value, place)
    if len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise WireError(f"{place}: {len(request_id)} characters where at most {MAX_REQUEST_ID_BYTES} bytes are allowed")
    return request_id


def _is_old_layout(items: list[Any]) -> bool:
    return len(items) <= _INSERTED_POSITION or type(items[_INSERTED_POSITION]) is int


def _prompt(value: Any, place: str) -> "typed_array[int]":
    try:
        return typed_array("I", array(value, place))
    except (TypeError, OverflowError) as error:
        raise WireError(f"{place}: holds something that is no token id (an unsigned 32-bit int)") from error


def _prompt_embeds(value: Any, place: str, aux_frames: Sequence[bytes]) -> Tensor:
    tensor = read_tensor(value, aux_frames, place)
    # Without a width a few bytes could claim a prompt of any length.
    if len(tensor.shape) != _EMBEDDING_DIMENSIONS or tensor.shape[1] == 0:
        raise WireError(f"{place}: shape {list(tensor.shape)} where [rows, width] is expected")
    return tensor


def _mm_features(value: Any, place: str) -> tuple[MultiModalFeature, ...]:
    return tuple(_mm_feature(item, f"{place}[{index}]") for index, item in enumerate(array(value, place)))


def _mm_feature(value: Any, place: str) -> MultiModalFeature:
    feature = mapping(value, place)
    position = mapping(feature.get("mm_position"), f"{place}.mm_position")
    mm_hash = feature.get("mm_hash")
    return MultiModalFeature(
        modality=string(feature.get("modality"), f"{place}.modality"),
        identifier=string(feature.get("identifier"), f"{place}.identifier"),
        offset=integer(position.get("offset"), f"{place}.mm_position.offset"),
        length=integer(position.get("length"), f"{place}.mm_position.length"),
        mm_hash=None if mm_hash is None else string(mm_hash, f"{place}.mm_hash"),
        has_data=feature.get("data") is not None,
    )


def read_lora_request(value: Any, place: str) -> LoraRequest:
    """Read a LoRARequest of 6 or 7 items: up to 0.29 item 4 was `tensorizer_config_dict`, gone since.

    Raises:
        WireError: too short, or an item of the wrong type.

    """
    items = array(value, place)
    if len(items) < 3:  # noqa: PLR2004 - name, id, path
        raise WireError(f"{place}: {len(items)} items where at least a name, an id and a path are expected")
    name, int_id, path, *rest = items
    base_model = rest.pop(0) if rest else None
    if rest and not isinstance(rest[0], bool):
        rest.pop(0)
    flags = [boolean(flag, f"{place} flag") for flag in rest[:2]] + [False, False]
    return LoraRequest(
        name=string(name, f"{place}.name"),
        int_id=integer(int_id, f"{place}.int_id"),
        path=string(path, f"{place}.path"),
        base_model=None if base_model is None else string(base_model, f"{place}.base_model"),
        load_inplace=flags[0],
        is_3d=flags[1],
    )


def _flags(value: Any, place: str) -> tuple[bool, ...]:
    return tuple(boolean(item, f"{place}[{index}]") for index, item in enumerate(array(value, place)))


def _headers(value: Any, place: str) -> dict[str, str]:
    return {
        string(key, f"{place} key"): string(item, f"{place}[{shown(key)}]")
        for key, item in mapping(value, place).items()
    }


def _priority(value: Any, place: str) -> int:
    return integer(value, place, low=_INT64_MIN)


_READERS: Final[Mapping[str, Callable[..., Any]]] = {
    "request_id": read_request_id,
    "prompt_token_ids": _prompt,
    "mm_features": _mm_features,
    "sampling_params": read_sampling_params,
    "pooling_params": read_pooling_params,
    "arrival_time": number,
    "lora_request": read_lora_request,
    "cache_salt": string,
    "data_parallel_rank": integer,
    "prompt_embeds": _prompt_embeds,
    "prompt_is_token_ids": _flags,
    "client_index": integer,
    "current_wave": partial(integer, high=WAVE_MAX),
    "priority": _priority,
    "trace_headers": _headers,
    "resumable": boolean,
    "external_req_id": string,
    "reasoning_ended": boolean,
    "reasoning_parser_kwargs": named,
    "abort_immediately": boolean,
    "session_id": string,
    "kv_hints": named,
}
_IN_AUX_FRAMES: Final = frozenset({"prompt_embeds", "sampling_params"})
"""Fields whose readers need the frames after the payload."""
_LAYOUT: Final = tuple(_READERS.items())
_WIRE_DEFAULTS: Final[Mapping[str, object]] = {
    "arrival_time": 0.0,
    "client_index": 0,
    "current_wave": 0,
    "priority": 0,
    "resumable": False,
    "abort_immediately": False,
}
_NO_KEYS: Final[AbstractSet[str]] = frozenset()
_OLD_LAYOUT: Final = tuple(entry for entry in _LAYOUT if entry[0] != "prompt_is_token_ids")
