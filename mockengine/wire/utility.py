# SPDX-License-Identifier: Apache-2.0
"""Utility calls: a frontend's questions and orders to an engine, and their answers (protocol section 6)."""

from dataclasses import dataclass
from typing import Any, Final

from mockengine.wire.codec import WireError, pack, unpack
from mockengine.wire.values import array, integer, plain, string, wrong

_CALL_ITEMS = 4
_REPLY_ITEMS = 3
_RESULT_ITEMS = 2
_INT64_MIN = -(2**63)
MAX_METHOD_CHARACTERS: Final = 256
"""A failure repeats the method's name; the longest real one has 40 characters."""


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """`[client_index, call_id, method, args]`; the reply goes to that client under that id (up to u64).

    An id below 0 is no call's: an engine announces things of its own under -1 and -2, and a reply under -1 kills a
    Python frontend.
    """

    client_index: int
    call_id: int
    method: str
    args: tuple[Any, ...] = ()

    def to_wire(self) -> bytes:
        """Return the payload of the UTILITY message."""
        return pack([self.client_index, self.call_id, self.method, list(self.args)])


def read_utility_call(payload: bytes) -> UtilityCall:
    """Read the payload of a UTILITY message.

    Raises:
        WireError: not a call, by field and reason.

    """
    items = array(unpack(payload), "UTILITY")
    if len(items) != _CALL_ITEMS:
        raise wrong("UTILITY", items, f"an array of {_CALL_ITEMS}")
    client_index, call_id, method, args = items
    return UtilityCall(
        client_index=integer(client_index, "client_index"),
        call_id=integer(call_id, "call_id"),
        method=_read_method(method),
        args=() if args is None else tuple(plain(array(args, "args"), "args")),
    )


def _read_method(value: Any) -> str:
    method = string(value, "method")
    if len(method) > MAX_METHOD_CHARACTERS:
        raise WireError(f"method: {len(method)} characters where at most {MAX_METHOD_CHARACTERS} are allowed")
    return method


def failure_message(method: str, reason: str) -> str:
    """Return vLLM's words for a failed call; frontends show them in an HTTP 500."""
    return f"Call to {method} method failed: {reason}"


def utility_output(call_id: int, failure: str | None, result: object) -> list[Any]:
    """Build position 4 of EngineCoreOutputs. The result's type information is nil: anything else makes Python raise."""
    return [call_id, failure, None if failure is not None else [None, result]]


def read_utility_output(value: Any) -> tuple[int, str | None, Any]:
    """Read position 4 of EngineCoreOutputs as `(call_id, failure, result)`.

    Raises:
        WireError: what a frontend would die of, such as a result without its pair.

    """
    items = array(value, "utility_output")
    if len(items) != _REPLY_ITEMS:
        raise wrong("utility_output", items, f"an array of {_REPLY_ITEMS}")
    call_id = integer(items[0], "call_id", low=_INT64_MIN)
    if items[1] is not None:
        return call_id, string(items[1], "failure_message"), None
    result = array(items[2], "result")
    if len(result) != _RESULT_ITEMS or result[0] is not None:
        raise wrong("result", result, "[nil, value]")
    return call_id, None, result[1]
