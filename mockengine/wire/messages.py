# SPDX-License-Identifier: Apache-2.0
"""Whole messages from a frontend: frames to one of five values, never an exception (protocol section 2.1).

A message that cannot be read becomes `Unreadable`, with whatever could be saved of it: the id of a request or a call
is enough to answer it, so that no client waits for ever.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from mockengine.wire.codec import Flaw, WireError, has_nil_at, leading_items, pack, unpack
from mockengine.wire.record import record
from mockengine.wire.requests import EngineCoreRequest, read_request
from mockengine.wire.utility import MAX_METHOD_CHARACTERS, UtilityCall, read_utility_call
from mockengine.wire.values import UINT64_MAX, WAVE_MAX, array, integer, strings, wrong

_WAVE_ITEMS = 2
_METHOD_POSITION = 2
_SAMPLING_POSITION = 3
_POOLING_POSITION = 4
# An id that is too long to be served can still be said once, so that its client does not wait for ever.
MAX_ANSWERED_ID_BYTES: Final = 2**20
COORDINATOR_READY: Final = b"READY"
COORDINATOR_SUBSCRIBE: Final = b"\x01"


class RequestType(IntEnum):
    """The one byte of a message's first frame."""

    ADD = 0
    ABORT = 1
    START_DP_WAVE = 2
    UTILITY = 3


@record
class Add:
    """A new request."""

    request: EngineCoreRequest


@record
class Abort:
    """Requests that nobody waits for any more; ids may be unknown or finished."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartDpWave:
    """The coordinator wakes the ranks.

    Attributes:
        wave: number of the wave.
        exclude: rank that need not wake: an int, None, or (Python up to 0.32) a two-byte identity, which no engine
            takes for its index.

    """

    wave: int
    exclude: int | bytes | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that could not be read.

    Attributes:
        reason: what is wrong, where.
        request_type: name of its type, or the type byte as hex.
        frame_bytes: size of each frame.
        request_id: id of the request it would have added, when that much could be read and it is not huge.
        call: the utility call it would have made (arguments empty), when its id could be read.
        is_pooling: whether the request would have been one for pooling, as far as can be told; its final output then
            needs a tensor.
        flaw: the kind of what is wrong.

    """

    reason: str
    request_type: str
    frame_bytes: tuple[int, ...]
    request_id: str | None = None
    call: UtilityCall | None = None
    is_pooling: bool = False
    flaw: Flaw = Flaw.MALFORMED


Message = Add | Abort | StartDpWave | UtilityCall | Unreadable


def read_message(frames: Sequence[bytes], client: int) -> Message:
    """Read one message as it came from the socket of `client`, identity frame stripped.

    Frames beyond the payload hold tensors and may be of any number.
    """
    request_type: RequestType | None = None
    try:
        request_type = _request_type(frames)
        return _read_payload(request_type, frames)
    except WireError as error:
        return _unreadable(error, request_type, frames, client)


def write_message(request_type: RequestType, payload: object, aux_frames: Sequence[bytes] = ()) -> list[bytes]:
    """Return the frames of a message, for those who play the frontend."""
    return [bytes([request_type]), payload if isinstance(payload, bytes) else pack(payload), *aux_frames]


def _request_type(frames: Sequence[bytes]) -> RequestType:
    if not frames:
        raise WireError("a message without frames", Flaw.FRAMING)
    request_type = _TYPES.get(frames[0])
    if request_type is None:
        found = frames[0][:8].hex() or "empty"
        raise WireError(f"request type {found} where one byte of 00 to 03 is expected", Flaw.FRAMING)
    return request_type


def _read_payload(request_type: RequestType, frames: Sequence[bytes]) -> Message:
    if len(frames) == 1:
        raise WireError("no payload frame", Flaw.FRAMING)
    return _READERS[request_type](frames)


_TYPES: Final[Mapping[bytes, RequestType]] = {bytes([each]): each for each in RequestType}


def _read_abort(frames: Sequence[bytes]) -> Abort:
    return Abort(strings(unpack(frames[1]), "ABORT"))


def _read_start_dp_wave(frames: Sequence[bytes]) -> StartDpWave:
    items = array(unpack(frames[1]), "START_DP_WAVE")
    if len(items) != _WAVE_ITEMS:
        raise wrong("START_DP_WAVE", items, "[wave, exclude]")
    wave, exclude = items
    if exclude is not None and not isinstance(exclude, bytes):
        exclude = integer(exclude, "exclude")
    return StartDpWave(integer(wave, "wave", high=WAVE_MAX), exclude)


_READERS: Final[Mapping[RequestType, Callable[[Sequence[bytes]], Message]]] = {
    RequestType.ADD: lambda frames: Add(read_request(frames[1], frames[2:])),
    RequestType.ABORT: _read_abort,
    RequestType.START_DP_WAVE: _read_start_dp_wave,
    RequestType.UTILITY: lambda frames: read_utility_call(frames[1]),
}


def _unreadable(error: WireError, request_type: RequestType | None, frames: Sequence[bytes], client: int) -> Unreadable:
    request_id: str | None = None
    call: UtilityCall | None = None
    is_pooling = False
    if request_type is RequestType.ADD and len(frames) > 1:
        head = leading_items(frames[1], 1)
        if head and isinstance(head[0], str) and len(head[0].encode()) <= MAX_ANSWERED_ID_BYTES:
            request_id = head[0]
            has_sampling_params = has_nil_at(frames[1], _SAMPLING_POSITION) is not True
            is_pooling = not has_sampling_params and has_nil_at(frames[1], _POOLING_POSITION) is not True
    elif request_type is RequestType.UTILITY and len(frames) > 1:
        call = _salvaged_call(leading_items(frames[1], _METHOD_POSITION + 1), client)
    name = request_type.name if request_type is not None else (frames[0][:8].hex() if frames else "")
    sizes = tuple(len(frame) for frame in frames)
    return Unreadable(str(error), name, sizes, request_id, call, is_pooling, error.flaw)


def _salvaged_call(head: list[Any], client: int) -> UtilityCall | None:
    client_index, call_id, method = (head + [None] * (_METHOD_POSITION + 1))[: _METHOD_POSITION + 1]
    if type(call_id) is not int or not 0 <= call_id <= UINT64_MAX:
        return None
    return UtilityCall(
        client_index if type(client_index) is int and client_index >= 0 else client,
        call_id,
        method[:MAX_METHOD_CHARACTERS] if isinstance(method, str) else "?",
    )
