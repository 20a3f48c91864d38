# SPDX-License-Identifier: Apache-2.0
"""Checks that turn a decoded value of unknown shape into one of a known type, or say what is wrong with it."""

from typing import Any

from mockengine.wire.codec import WireError

_SHOWN_CHARACTERS = 40
_PLAIN_DEPTH = 128
# So few items are looked at sooner one by one.
_FEW = 16
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
WAVE_MAX = 2**31 - 1
"""An engine counts on from the highest wave it hears of; what it says then must still fit a frontend's number."""


def shown(value: object) -> str:
    """Describe a value for an error message: type and a short form, never a whole prompt."""
    if isinstance(value, (list, tuple, dict, bytes)):
        return f"{_type_name(value)} of {len(value)}"
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"str of {len(value)}"
    return f"{_type_name(value)} {value!r}" if value is not None else "nil"


def wrong(place: str, value: object, expected: str) -> WireError:
    """Make the error for a value of the wrong kind at `place`."""
    return WireError(f"{place}: {shown(value)} where {expected} is expected")


def integer(value: Any, place: str, low: int = 0, high: int = UINT64_MAX) -> int:
    """Return `value` when it is an int within `low`…`high` (a bool is none)."""
    if type(value) is not int or not low <= value <= high:
        raise wrong(place, value, f"an int of {low} to {high}")
    return value


def number(value: Any, place: str) -> float:
    """Return `value` as float when it is an int or a float."""
    if type(value) is not float and type(value) is not int:
        raise wrong(place, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise wrong(place, value, "a number") from error


def string(value: Any, place: str) -> str:
    """Return `value` when it is a str."""
    if not isinstance(value, str):
        raise wrong(place, value, "a str")
    return value


def boolean(value: Any, place: str) -> bool:
    """Return `value` when it is a bool."""
    if not isinstance(value, bool):
        raise wrong(place, value, "a bool")
    return value


def array(value: Any, place: str) -> list[Any]:
    """Return `value` when it is an array."""
    if not isinstance(value, list):
        raise wrong(place, value, "an array")
    return value


def mapping(value: Any, place: str) -> dict[Any, Any]:
    """Return `value` when it is a map."""
    if not isinstance(value, dict):
        raise wrong(place, value, "a map")
    return value


def strings(value: Any, place: str) -> tuple[str, ...]:
    """Return `value` as a tuple when it is an array of str."""
    items = array(value, place)
    if set(map(type, items)) <= {str}:
        return tuple(items)
    return tuple(string(item, f"{place}[{index}]") for index, item in enumerate(items))


def integers(value: Any, place: str, low: int = 0, high: int = UINT64_MAX) -> tuple[int, ...]:
    """Return `value` as a tuple when it is an array of int within `low`…`high`."""
    items = array(value, place)
    # Millions may come at once; of many, each is only looked at to name the culprit.
    if len(items) > _FEW and set(map(type, items)) <= {int} and low <= min(items) and max(items) <= high:
        return tuple(items)
    for index, item in enumerate(items):
        if type(item) is not int or not low <= item <= high:
            integer(item, f"{place}[{index}]", low, high)
    return tuple(items)


def plain(value: Any, place: str) -> Any:
    """Return `value` when it is made of nil, bools, numbers, strings, bytes, arrays and maps of bounded depth.

    For what travels through unread: it may be shown, hashed into a key or sent back without running into a limit.
    """
    return _plain(value, place, _PLAIN_DEPTH)


def named(value: Any, place: str) -> dict[str, Any]:
    """Return `value` when it is a map with str keys and plain values."""
    return {string(key, f"{place} key"): plain(item, place) for key, item in mapping(value, place).items()}


def _plain(value: Any, place: str, depth: int) -> Any:
    if isinstance(value, (list, dict)):
        if depth == 0:
            raise WireError(f"{place}: arrays and maps nested more than {_PLAIN_DEPTH} deep")
        for item in value if isinstance(value, list) else (*value, *value.values()):
            _plain(item, place, depth - 1)
    elif value is not None and not isinstance(value, (bool, int, float, str, bytes)):
        raise wrong(place, value, "a plain value")
    return value


def _type_name(value: object) -> str:
    name = type(value).__name__
    return {"list": "array", "tuple": "array", "dict": "map", "bytes": "bin"}.get(name, name)
