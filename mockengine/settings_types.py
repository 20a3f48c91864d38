# SPDX-License-Identifier: Apache-2.0
"""What the value of a setting must look like, and the words that tell it to a person."""

import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from mockengine.durations import ALLOWED_DURATIONS, LONGEST_MS, duration_ms
from mockengine.lengths import FORMS as LENGTH_FORMS
from mockengine.lengths import REASONING_FORMS, LengthError, read_output_length, read_reasoning_length

MAX_RANKS: Final = 2**16
"""A rank is named on the wire by 2 bytes."""
MAX_INT32: Final = 2**31 - 1
"""Token ids and lengths are 32-bit integers in vLLM's own arrays."""
MOST_SPEC_TOKENS: Final = 128
"""As many drafts of an output vLLM's rejection sampler takes."""
USUAL_ACCEPTANCE_RATE: Final = 0.7
"""The share of accepted drafts where nobody says another one."""
GENERATION_TASKS: Final = ("generate", "transcription", "realtime")
"""Tasks that are answered with tokens, as vLLM names them."""
TASKS: Final = (*GENERATION_TASKS, "embed", "classify", "score", "token_embed", "token_classify")
"""These, and those that are answered with numbers; score is what vLLM's older releases had instead of classify."""
BLOCK_SIZES: Final = (1, 8, 16, 32, 64, 128, 256)
"""Sizes that vLLM allows for a block of the KV cache, in tokens."""
# What the kernel allows for the path of a Unix socket, without its closing NUL.
_MAX_IPC_PATH_BYTES: Final = 107
_MAX_HOST_NAME: Final = 253
# What the kernel allows for a path, without its closing NUL.
_MAX_PATH_BYTES: Final = 4_095
# Not RFC 1123 alone: docker compose makes names with an underscore.
_LABEL: Final = re.compile("[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_ZONE: Final = re.compile("[A-Za-z0-9._-]+")


class ReasonError(ValueError):
    """Why a value is not allowed where the words for what is allowed leave that open; never quotes the value."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts."""

    name: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """The words that tell a person which values are allowed, where type and bounds do not say it."""

    text: str


def either(choices: tuple[object, ...]) -> str:
    """Return choices as words, two or more of them."""
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}"


def _check_block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"{value} is not one of {either(BLOCK_SIZES)}")
    return value


def _check_address(value: str) -> str:
    """Refuse what ZMQ refuses, and what it takes and then tries in vain for ever."""
    scheme, _, rest = value.partition("://")
    if scheme == "tcp":
        host, colon, port = rest.rpartition(":")
        if not colon or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) < 2**16:
            raise ReasonError("it does not end with a port from 1 to 65535")
        _check_host(host)
    elif scheme == "ipc":
        if not 0 < len(rest.encode()) <= _MAX_IPC_PATH_BYTES or "\0" in rest:
            raise ReasonError("the path is empty, too long or contains a NUL")
    else:
        raise ReasonError("it does not begin with tcp:// or ipc://")
    return value


def _check_endpoint(value: str | None) -> str | None:
    """Refuse what no KV events can be published at: as an address, but any host and, with it, any port will do."""
    if value is None or not value.startswith("tcp://*:"):
        return None if value is None else _check_address(value)
    if not re.fullmatch("[0-9]{1,5}", value[8:]) or not int(value[8:]) < 2**16:
        raise ReasonError("it does not end with a port from 0 to 65535")
    return value


def _check_host(host: str) -> None:
    if host.startswith("[") and host.endswith("]"):
        address, percent, zone = host[1:-1].partition("%")
        if not _is_ip(ipaddress.IPv6Address, address) or (percent and not _ZONE.fullmatch(zone)):
            raise ReasonError("what the brackets hold is no IPv6 address")
    elif ":" in host:
        raise ReasonError("an IPv6 address stands in brackets")
    elif re.fullmatch("[0-9.]+", host):
        if not _is_ip(ipaddress.IPv4Address, host):
            raise ReasonError("the host is no IPv4 address")
    elif not _is_host_name(host.removesuffix(".")):
        raise ReasonError("the host is neither a host name nor an IP address")


def _is_host_name(host: str) -> bool:
    # ZMQ raises an error at a name that begins with an underscore.
    labels = host.split(".")
    return len(host) <= _MAX_HOST_NAME and not host.startswith("_") and all(map(_LABEL.fullmatch, labels))


def _is_ip(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _check_bare_host(value: str) -> str:
    _check_host(f"[{value}]" if ":" in value else value)
    return value


def acceptance_rates(text: str) -> float | tuple[float, ...]:
    """Read how many drafts are accepted: one rate, or a list of them as JSON or with commas.

    Raises:
        ReasonError: it is neither, or the rates are none.

    """
    is_list = text.startswith("[") or "," in text
    try:
        found = json.loads(text if text.startswith("[") else f"[{text}]")
    except (ValueError, RecursionError) as error:
        raise ReasonError("it is neither a number nor a list of numbers") from error
    if not all(isinstance(rate, int | float) and not isinstance(rate, bool) for rate in found) or not found:
        raise ReasonError("it is neither a number nor a list of numbers")
    if not all(0 <= rate <= 1 for rate in found):
        raise ReasonError("a rate is between 0 and 1")
    if any(later > earlier for earlier, later in pairwise(found)):
        raise ReasonError("a draft is accepted with all before it, so no rate can be greater than the one before it")
    return tuple(map(float, found)) if is_list else float(found[0])


def _check_rates(value: str | None) -> str | None:
    if value is not None:
        acceptance_rates(value)
    return value


def task_names(text: str) -> tuple[str, ...]:
    """Read a list of tasks, with commas or as JSON.

    Raises:
        ReasonError: it is none, or names something else or something twice.

    """
    try:
        found = json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",")]
    except (ValueError, RecursionError) as error:
        raise ReasonError("it is no list") from error
    if not found or not all(isinstance(task, str) and task in TASKS for task in found):
        raise ReasonError("it names something that is no task, or nothing")
    if len(set(found)) < len(found):
        raise ReasonError("it names a task twice")
    return tuple(found)


def _check_tasks(value: str) -> str:
    task_names(value)
    return value


def _check_output_length(value: str) -> str:
    try:
        read_output_length(value)
    except LengthError as error:
        raise ReasonError(str(error)) from error
    return value


def _check_reasoning_length(value: str) -> str:
    try:
        read_reasoning_length(value)
    except LengthError as error:
        raise ReasonError(str(error)) from error
    return value


def _check_model_path(value: str | None) -> str | None:
    return _check_path(value.rstrip("/") or value) if value else _check_path(value)


def _check_path(value: str | None) -> str | None:
    if value is not None and (not 0 < len(value.encode()) <= _MAX_PATH_BYTES or "\0" in value or value.endswith("/")):
        raise ReasonError("the path is empty, too long, contains a NUL or ends like a folder's")
    return value


def _check_rules(value: str | None) -> str | None:
    is_json = value is not None and value.lstrip()[:1] in ("[", "{")
    return value if is_json else _check_path(value)


Seconds = Annotated[float, Unit("seconds"), Field(ge=0, le=86_400)]
Milliseconds = Annotated[
    float,
    Unit("milliseconds"),
    Allowed(ALLOWED_DURATIONS),
    Field(ge=0, le=LONGEST_MS),
    BeforeValidator(duration_ms),
]
Tokens = Annotated[int, Unit("tokens"), Field(ge=1, le=MAX_INT32)]
Address = Annotated[
    str,
    Allowed(f"tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH with a path of at most {_MAX_IPC_PATH_BYTES} bytes"),
    AfterValidator(_check_address),
]
OptionalEndpoint = Annotated[
    str | None,
    Allowed("tcp://*:PORT, tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH; port 0 of * is any free one"),
    AfterValidator(_check_endpoint),
]
OptionalTopic = Annotated[str | None, Allowed("text of 1 to 1024 characters"), Field(min_length=1, max_length=1_024)]
BlockSize = Annotated[int, Allowed(f"{either(BLOCK_SIZES)} tokens"), AfterValidator(_check_block_size)]
VllmVersion = Annotated[
    str,
    Allowed("auto, or a release from 0.19 on, such as 0.33 or 0.33.0"),
    Field(pattern=r"^(auto|0\.(19|[2-9][0-9]|[1-9][0-9]{2})(\.[0-9]{1,3})?)$"),
]
Host = Annotated[str, Allowed("a host name or an IP address, IPv6 without brackets"), AfterValidator(_check_bare_host)]
OptionalName = Annotated[str | None, Allowed("text of 1 to 256 characters"), Field(min_length=1, max_length=256)]
OptionalPath = Annotated[
    str | None,
    Allowed(f"path of a file, of at most {_MAX_PATH_BYTES} bytes"),
    AfterValidator(_check_path),
]
OptionalToken = Annotated[
    SecretStr | None, Allowed("text of 8 to 1024 characters"), Field(min_length=8, max_length=1_024)
]
OptionalRules = Annotated[
    str | None,
    Allowed(f"JSON of a list of rules, or path of a file of them, of at most {_MAX_PATH_BYTES} bytes"),
    AfterValidator(_check_rules),
]
FormName = Annotated[
    str,
    Allowed("a name, docs/replies.md lists them, or the path of a file, *.toml"),
    AfterValidator(_check_path),
]
OptionalModel = Annotated[
    str | None,
    Allowed(f"path of a folder or a file, of at most {_MAX_PATH_BYTES} bytes"),
    AfterValidator(_check_model_path),
]
OptionalRates = Annotated[
    str | None,
    Allowed("a number from 0 to 1, or as many as spec_tokens, none greater than the one before it: 0.8,0.6,0.5"),
    Field(coerce_numbers_to_str=True),
    AfterValidator(_check_rates),
]
SupportedTasks = Annotated[
    str, Allowed(f"a list of {', '.join(TASKS)}, such as embed,token_embed"), AfterValidator(_check_tasks)
]
OutputLength = Annotated[
    str, Allowed(LENGTH_FORMS), Field(coerce_numbers_to_str=True), AfterValidator(_check_output_length)
]
ReasoningLength = Annotated[
    str, Allowed(REASONING_FORMS), Field(coerce_numbers_to_str=True), AfterValidator(_check_reasoning_length)
]
OptionalHash = Annotated[str | None, Allowed("64 digits out of 0-9 and a-f"), Field(pattern="^[0-9a-f]{64}$")]
