# SPDX-License-Identifier: Apache-2.0
"""Every setting, once: its name, type, unit, default, bounds and one sentence.

The flag, the variable, the YAML key, `--help`, the table in the docs and the tests derive from the class `Settings`.
This module knows what a value must look like and which values cannot work together. It must not know where values come
from (`settings_sources`), nor what the engine does with them.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX: Final = "MOCKENGINE_"

# A rank is named on the wire by 2 bytes.
_MAX_RANKS: Final = 2**16
# Token ids and lengths are 32-bit integers in vLLM's own arrays.
_MAX_INT32: Final = 2**31 - 1
_MOST_AHEAD_BYTES: Final = 2**20
_MAX_SEED: Final = 2**64 - 1
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


def _either(choices: tuple[object, ...]) -> str:
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}"


def _check_block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"{value} is not one of {_either(BLOCK_SIZES)}")
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


def _check_admin_host(value: str) -> str:
    _check_host(f"[{value}]" if ":" in value else value)
    return value


def _check_path(value: str | None) -> str | None:
    if value is not None and (not 0 < len(value.encode()) <= _MAX_PATH_BYTES or "\0" in value or value.endswith("/")):
        raise ReasonError("the path is empty, too long, contains a NUL or ends like a folder's")
    return value


Seconds = Annotated[float, Unit("seconds"), Field(ge=0, le=86_400)]
Milliseconds = Annotated[float, Unit("milliseconds"), Field(ge=0, le=3_600_000)]
Tokens = Annotated[int, Unit("tokens"), Field(ge=1, le=_MAX_INT32)]
Address = Annotated[
    str,
    Allowed(f"tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH with a path of at most {_MAX_IPC_PATH_BYTES} bytes"),
    AfterValidator(_check_address),
]
BlockSize = Annotated[int, Allowed(f"{_either(BLOCK_SIZES)} tokens"), AfterValidator(_check_block_size)]
VllmVersion = Annotated[
    str,
    Allowed("auto, or a release from 0.19 on, such as 0.33 or 0.33.0"),
    Field(pattern=r"^(auto|0\.(19|[2-9][0-9]|[1-9][0-9]{2})(\.[0-9]{1,3})?)$"),
]
AdminHost = Annotated[
    str, Allowed("a host name or an IP address, IPv6 without brackets"), AfterValidator(_check_admin_host)
]
OptionalPath = Annotated[
    str | None,
    Allowed(f"path of a file, of at most {_MAX_PATH_BYTES} bytes"),
    AfterValidator(_check_path),
]
OptionalHash = Annotated[str | None, Allowed("64 digits out of 0-9 and a-f"), Field(pattern="^[0-9a-f]{64}$")]


class Settings(BaseSettings):
    """All settings of one process: immutable, and valid whenever it exists.

    `Settings(name=value)` takes what is not named from `MOCKENGINE_*` variables, then from the defaults, and raises
    pydantic's `ValidationError`. The command line reads flags and a file too and explains every problem to a person:
    `settings_sources.load`.
    """

    model_config = SettingsConfigDict(frozen=True, env_prefix=PREFIX, env_ignore_empty=True)

    # Joining the frontend, and leaving it
    handshake_address: Address = Field(
        default="tcp://127.0.0.1:29550",
        description="Address of the frontend's handshake socket.",
    )
    engine_count: Annotated[int, Unit("ranks")] = Field(
        default=1, ge=1, le=64, description="Number of data-parallel ranks that this process plays."
    )
    start_rank: int = Field(
        default=0, ge=0, le=_MAX_RANKS - 1, description="First of the consecutive ranks that this process plays."
    )
    data_parallel_size: Annotated[int | None, Unit("ranks")] = Field(
        default=None,
        ge=1,
        le=_MAX_RANKS,
        description="Number of ranks of the whole deployment; unset means start_rank + engine_count.",
    )
    join_timeout_s: Seconds = Field(
        default=0.0, description="How long to wait for a frontend before giving up; 0 waits without limit."
    )
    parallel_config_hash: OptionalHash = Field(
        default=None,
        description=(
            "Hash that a Python frontend wants to see from the ranks of a mixture-of-experts model; its error message "
            "'Configuration mismatch' states the expected one."
        ),
    )
    vllm_version: VllmVersion = Field(
        default="auto",
        description="The vLLM release whose message layouts are spoken; auto tells it from what the frontend sends.",
    )
    rejoin: bool = Field(
        default=True, description="Wait for the next frontend when the frontend goes away, instead of exiting."
    )
    rejoin_grace_s: Seconds = Field(
        default=1.0,
        description="How long a lost frontend may come back on the same connection before its requests are dropped.",
    )
    leave_notice: Literal["dead", "none"] = Field(
        default="dead",
        description=(
            "What the frontend is told when the engine leaves: dead makes it unhealthy so that it is restarted, none "
            "leaves it waiting for an engine that is gone."
        ),
    )
    shutdown_timeout_s: Seconds = Field(
        default=0.0, description="How long running requests may go on after SIGTERM; 0 aborts them at once."
    )

    state_file: OptionalPath = Field(
        default=None,
        description=(
            "File of this engine alone that remembers the frontend, in a place that outlives the process, so that an "
            "engine that was killed and starts again can tell it that its requests are lost; unset remembers nothing."
        ),
    )

    # Admin port
    admin_host: AdminHost = Field(
        default="127.0.0.1", description="Address at which the admin port listens; the container image sets 0.0.0.0."
    )
    admin_port: int = Field(
        default=0,
        ge=0,
        le=2**16 - 1,
        description="Port for health, readiness and metrics over HTTP; 0 is off, the container image sets 29555.",
    )

    # The engine that is played
    max_model_len: Tokens = Field(default=32_768, description="Longest prompt and reply together.")
    block_size: BlockSize = Field(
        default=16, description="Size of one block of the KV cache, as reported to the frontend."
    )
    num_gpu_blocks: Annotated[int, Unit("blocks")] = Field(
        default=16_384,
        ge=1,
        le=10_000_000,
        description="Number of blocks in the KV cache of each rank, as reported to the frontend.",
    )
    max_num_seqs: Annotated[int, Unit("requests")] = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Most requests at a time on each rank, as reported to the frontend; no limit is kept yet.",
    )
    max_num_batched_tokens: Tokens = Field(
        default=8_192,
        description="Most tokens in one step of a rank, as reported to the frontend; no limit is kept yet.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Number format of the model, as reported to the frontend."
    )

    # Timing
    itl_ms: Milliseconds = Field(
        default=0.0,
        description=(
            "Time from one token of a reply to the next, or from one chunk to the next; 0 is as fast as the frontend "
            "reads."
        ),
    )
    max_buffered_bytes: Annotated[int, Unit("bytes")] = Field(
        default=64 * 2**20,
        ge=2**16,
        le=2**40,
        description=(
            "What may wait for each API server that does not read before its requests wait too; without itl_ms at most "
            "a mebibyte, since nothing is gained by running further ahead."
        ),
    )

    # Replies
    output_token_chunk_size: Tokens = Field(default=1, description="Tokens of a reply that go out in one message.")
    vocab_size: Tokens = Field(default=32_000, description="Token ids of replies lie below this number.")
    seed: int = Field(
        default=0, ge=0, le=_MAX_SEED, description="Chooses the replies: the same seed gives the same replies."
    )
    seed_scope: Literal["prompt", "request_id"] = Field(
        default="prompt",
        description=(
            "What a reply depends on besides the seed: prompt gives the same reply to the same prompt, request_id "
            "gives every request a reply of its own, as vLLM's mock does."
        ),
    )
    default_output_tokens: Annotated[int, Unit("tokens")] = Field(
        default=256,
        ge=0,
        le=_MAX_INT32,
        description="Length of a reply whose client set no max_tokens; 0 lets it fill the context.",
    )

    # Logs
    log_requests: bool = Field(default=True, description="Log the start and the end of every request.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="How a log line looks: auto is console on a terminal and one JSON object a line elsewhere.",
    )

    @model_validator(mode="after")
    def _combinations_work(self) -> Self:
        problems = [f"{', '.join(names)}: {text}" for names, text in combination_problems(dict(self))]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def effective_data_parallel_size(self) -> int:
        """Number of ranks of the whole deployment, with the default filled in."""
        return self.data_parallel_size or self.start_rank + self.engine_count

    @property
    def most_bytes_ahead(self) -> int:
        """What may wait for a client: less where the engine is not timed, and would only run ahead of the frontend."""
        return self.max_buffered_bytes if self.itl_ms else min(self.max_buffered_bytes, _MOST_AHEAD_BYTES)


# A group of `--help` and of the docs starts at the setting named here.
_GROUPS: Final = {
    "handshake_address": "Joining the frontend, and leaving it",
    "admin_host": "Admin port",
    "max_model_len": "The engine that is played",
    "itl_ms": "Timing",
    "output_token_chunk_size": "Replies",
    "log_requests": "Logs",
}


def _ranks_have_an_identity(start_rank: int, engine_count: int) -> str | None:
    if start_rank + engine_count <= _MAX_RANKS:
        return None
    return (
        f"the last rank would be {start_rank + engine_count - 1}, the highest there is is {_MAX_RANKS - 1} "
        f"(use a start_rank of at most {_MAX_RANKS - engine_count})"
    )


def _ranks_fit(start_rank: int, engine_count: int, data_parallel_size: int | None) -> str | None:
    needed = start_rank + engine_count
    if data_parallel_size is None or needed <= data_parallel_size:
        return None
    return (
        f"the last rank would be {needed - 1}, the highest of {data_parallel_size} is {data_parallel_size - 1} "
        f"(use a data_parallel_size of at least {needed}, or a smaller start_rank or engine_count)"
    )


def _a_step_serves_every_request(max_num_batched_tokens: int, max_num_seqs: int) -> str | None:
    if max_num_batched_tokens >= max_num_seqs:
        return None
    return (
        "a step could not give every running request one token, so vLLM refuses this too "
        f"(use a max_num_batched_tokens of at least {max_num_seqs}, or a smaller max_num_seqs)"
    )


def _the_longest_request_fits(max_model_len: int, block_size: int, num_gpu_blocks: int) -> str | None:
    capacity = num_gpu_blocks * block_size
    if capacity >= max_model_len:
        return None
    needed = -(-max_model_len // block_size)
    return (
        f"the KV cache holds {capacity} tokens, fewer than the longest request, so vLLM refuses this too "
        f"(use a num_gpu_blocks of at least {needed}, or a max_model_len of at most {capacity})"
    )


def _two_listen_at_two_ports(handshake_address: str, admin_port: int) -> str | None:
    host, _, port = handshake_address.removeprefix("tcp://").rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or int(port) != admin_port:
        return None
    return f"the frontend's handshake socket listens at port {port} of this machine (use another admin_port)"


_COMBINATIONS: Final[tuple[tuple[tuple[str, ...], Callable[..., str | None]], ...]] = (
    (("start_rank", "engine_count"), _ranks_have_an_identity),
    (("start_rank", "engine_count", "data_parallel_size"), _ranks_fit),
    (("max_num_batched_tokens", "max_num_seqs"), _a_step_serves_every_request),
    (("max_model_len", "block_size", "num_gpu_blocks"), _the_longest_request_fits),
    (("handshake_address", "admin_port"), _two_listen_at_two_ports),
)


def combination_problems(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names and the explanation of every combination in `values` that cannot work.

    `values` holds valid values by name; a combination that lacks one of its values is not judged.
    """
    for names, explain in _COMBINATIONS:
        if all(name in values for name in names):
            problem = explain(*(values[name] for name in names))
            if problem is not None:
                yield names, problem


@dataclass(frozen=True, slots=True)
class Description:
    """All that a person needs to know about one setting, as text."""

    name: str
    group: str
    flag: str
    variable: str
    default: str
    allowed: str
    sentence: str
    is_switch: bool


def describe() -> dict[str, Description]:
    """Describe every setting, by name, in the order of the class."""
    descriptions = {}
    group = ""
    for name, field in Settings.model_fields.items():
        group = _GROUPS.get(name, group)
        descriptions[name] = Description(
            name=name,
            group=group,
            flag="--" + name.replace("_", "-"),
            variable=PREFIX + name.upper(),
            default=as_text(field.default),
            allowed=_allowed(field),
            sentence=field.description or "",
            is_switch=field.annotation is bool,
        )
    return descriptions


def as_text(value: object) -> str:
    """Return `value` as a person writes it in a flag, a variable or YAML; None is `unset`."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        return _either(get_args(field.annotation))
    facts = {type(fact): fact for fact in field.metadata}
    if Allowed in facts:
        return str(facts[Allowed].text)
    kind = "a number" if field.annotation is float else "a whole number"
    unit = f" of {facts[Unit].name}" if Unit in facts else ""
    return f"{kind}{unit} from {facts[Ge].ge} to {facts[Le].le}"
