# SPDX-License-Identifier: Apache-2.0
"""How engines join, as a frontend sees it (protocol section 1): judges what they say until they serve.

It knows no socket. Messages are judged in the order in which they come; ranks do not wait for each other, so one may be
READY before another says HELLO. Each rank's part is a small machine:

    state           event   next state
    AWAITS_HELLO    HELLO   AWAITS_INIT
    AWAITS_INIT     INIT    GREETED
    GREETED         READY   READY

INIT is what the frontend says; every other event in a state is a mistake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import NoneType
from typing import Any, Final

from mockengine.testing.rules import EngineMistakeError, Rule
from mockengine.wire.codec import WireError, unpack
from mockengine.wire.handshake import DTYPES, IDENTITY_BYTES, EngineStatus, Init, read_ready_response, read_status
from mockengine.wire.lines import LINES, OLDEST, Line
from mockengine.wire.values import mapping, named, shown


class RankState(Enum):
    """How far a rank has come."""

    AWAITS_HELLO = auto()
    AWAITS_INIT = auto()
    GREETED = auto()
    READY = auto()


_HEARD: Final[Mapping[tuple[RankState, str], RankState | Rule]] = {
    (RankState.AWAITS_HELLO, "HELLO"): RankState.AWAITS_INIT,
    (RankState.AWAITS_HELLO, "READY"): Rule.READY_BEFORE_INIT,
    (RankState.AWAITS_INIT, "HELLO"): Rule.HELLO_REPEATED,
    (RankState.AWAITS_INIT, "READY"): Rule.READY_BEFORE_INIT,
    (RankState.GREETED, "HELLO"): Rule.HELLO_REPEATED,
    (RankState.GREETED, "READY"): RankState.READY,
    (RankState.READY, "HELLO"): Rule.HELLO_REPEATED,
    (RankState.READY, "READY"): Rule.READY_REPEATED,
}
_READY_KEYS_OF_OLDEST: Final = ("num_gpu_blocks", "dp_stats_address")


class Joining:
    """What has been heard on the handshake socket.

    Attributes:
        states: of each rank that the frontend waits for.
        strangers: other ranks that were heard. They are judged on demand only, since a frontend that waits for its
            own ranks need not look at others before those have come.

    """

    def __init__(self, ranks: int, line: Line, *, has_coordinator: bool) -> None:
        self.states = [RankState.AWAITS_HELLO] * ranks
        self.strangers: list[int] = []
        self._line = line
        self._may_be_ready = not has_coordinator

    @property
    def awaits_hello(self) -> bool:
        """Whether some rank has not said HELLO yet."""
        return RankState.AWAITS_HELLO in self.states

    @property
    def awaits_ready(self) -> bool:
        """Whether some rank has not said READY yet."""
        return any(state is not RankState.READY for state in self.states)

    @property
    def to_greet(self) -> list[int]:
        """The ranks to which INIT is due."""
        return [rank for rank, state in enumerate(self.states) if state is RankState.AWAITS_INIT]

    def greeted(self, rank: int) -> None:
        """Note that INIT is sent to a rank that has said HELLO."""
        if rank < len(self.states) and self.states[rank] is RankState.AWAITS_INIT:
            self.states[rank] = RankState.GREETED

    def go_ahead(self) -> None:
        """Note that the coordinator lets the ranks go on."""
        self._may_be_ready = True

    def hear(self, identity: bytes, frames: Sequence[bytes]) -> tuple[int, EngineStatus]:
        """Take a message of the handshake socket; return who said what.

        Raises:
            EngineMistakeError: it is none, or not due.

        """
        rank = int.from_bytes(identity, "little")
        status = _read_status(rank, frames)
        if len(identity) != IDENTITY_BYTES or rank >= len(self.states):
            self.strangers.append(rank)
            return rank, status
        outcome = _HEARD[self.states[rank], status.status]
        if isinstance(outcome, Rule):
            raise EngineMistakeError(outcome, f"rank {rank} said {status.status}")
        if outcome is RankState.READY:
            self._judge_ready(rank, status)
        self.states[rank] = outcome
        return rank, status

    def refuse_strangers(self) -> None:
        """Judge the ranks that nobody waits for.

        Raises:
            EngineMistakeError: there was one.

        """
        if self.strangers:
            known = f"the frontend has {len(self.states)}"
            raise EngineMistakeError(Rule.STRANGER, f"rank {self.strangers[0]} said HELLO where {known}")

    def _judge_ready(self, rank: int, status: EngineStatus) -> None:
        if not self._may_be_ready:
            raise EngineMistakeError(Rule.READY_BEFORE_GO_AHEAD, f"rank {rank} said READY")
        missing = [key for key in _READY_KEYS_OF_OLDEST if key not in status.extra]
        if self._line.name == OLDEST.name and missing:
            raise EngineMistakeError(Rule.READY_LACKS_KEY, f"rank {rank} said READY without {missing}")


def _read_status(rank: int, frames: Sequence[bytes]) -> EngineStatus:
    try:
        (frame,) = frames
        status, said = read_status(frame), mapping(unpack(frame), "engine status")
    except ValueError as error:  # which a WireError is too
        raise EngineMistakeError(Rule.STATUS_UNREADABLE, f"rank {rank}: {error}") from error
    if status.status not in ("HELLO", "READY"):
        raise EngineMistakeError(Rule.STATUS_UNREADABLE, f"rank {rank} said {shown(status.status)}")
    for key, wanted, rule in (("local", False, Rule.LOCAL), ("headless", True, Rule.NOT_HEADLESS)):
        if said.get(key) is not wanted:
            raise EngineMistakeError(rule, f"{key} of rank {rank}: {shown(said.get(key))}")
    return status


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of the ready response.

    Attributes:
        types: of its value; an int is never negative.
        required_since: first line whose frontends die without it; None for none.

    """

    types: tuple[type, ...]
    required_since: str | None = None


# Up to then a frontend expects an empty frame and looks at nothing.
_FIRST_READ: Final = "0.21"
_INT_OR_NIL: Final = (int, NoneType)
_TEXT_OR_NIL: Final = (str, NoneType)
_READY_RESPONSE: Final[Mapping[str, _Key]] = {
    "max_model_len": _Key((int,), _FIRST_READ),
    "num_gpu_blocks": _Key((int,), _FIRST_READ),
    "block_size": _Key((int,), _FIRST_READ),
    "dp_stats_address": _Key(_TEXT_OR_NIL, _FIRST_READ),
    "dtype": _Key((str,), _FIRST_READ),
    "vllm_version": _Key((str,), _FIRST_READ),
    "world_size": _Key((int,), _FIRST_READ),
    "data_parallel_size": _Key((int,), _FIRST_READ),
    "tensor_parallel_size": _Key((int,), "0.26"),
    "pipeline_parallel_size": _Key((int,), "0.26"),
    "decode_context_parallel_size": _Key((int,), "0.26"),
    "data_parallel_rank": _Key((int,), "0.26"),
    "max_num_seqs": _Key((int,), "0.26"),
    "max_num_batched_tokens": _Key((int,), "0.26"),
    "instance_id": _Key((str,), "0.26"),
    "supports_lora": _Key((bool,), "0.29"),
    "max_loras": _Key((int,), "0.29"),
    "mamba_block_size": _Key(_INT_OR_NIL),
    "kv_cache_size_tokens": _Key(_INT_OR_NIL),
    "kv_cache_max_concurrency": _Key((int, float, NoneType)),
    "kv_events_config": _Key((dict, NoneType)),
    "weight_transfer_backend": _Key(_TEXT_OR_NIL),
    "enable_sleep_mode": _Key((bool,)),
    "supports_draft_weight_updates": _Key((bool,)),
    "effective_attention_block_size": _Key(_INT_OR_NIL),
    "coord_store_port": _Key((int,)),
    "coordinator_input_address": _Key(_TEXT_OR_NIL),
    "coordinator_output_address": _Key(_TEXT_OR_NIL),
}
"""Required keys of 0.24, 0.27, 0.30 and 0.33 are known; a line in between is taken for the older one beside it."""


def read_introduction(rank: int, frames: Sequence[bytes], init: Init, line: Line) -> dict[str, Any]:
    """Read what a rank says of itself on an input socket, as strictly as the strictest frontend of `line` does.

    Raises:
        EngineMistakeError: such a frontend would not start.

    """
    is_ignored = _age(line.name) < _age(_FIRST_READ)
    try:
        (frame,) = frames
        said = named(unpack(frame), "ready response")
    except ValueError as error:  # which a WireError is too
        if is_ignored:
            return {}
        raise EngineMistakeError(Rule.READY_RESPONSE_UNREADABLE, f"rank {rank}: {error}") from error
    if is_ignored:
        return said
    whose = f"ready response of rank {rank}"
    _judge_keys(whose, said, line)
    try:
        read_ready_response(frame)
    except WireError as error:
        raise EngineMistakeError(Rule.READY_RESPONSE_WRONG_VALUE, f"{whose}: {error}") from error
    _judge_values(whose, said, init)
    _judge_lora(whose, said)
    return said


def _judge_keys(whose: str, said: Mapping[str, Any], line: Line) -> None:
    for name, key in _READY_RESPONSE.items():
        is_required = key.required_since is not None and _age(key.required_since) <= _age(line.name)
        if is_required and name not in said:
            raise EngineMistakeError(Rule.READY_RESPONSE_LACKS_KEY, f"{whose}: no {name}")


def _judge_values(whose: str, said: Mapping[str, Any], init: Init) -> None:
    for name, key in _READY_RESPONSE.items():
        value = said.get(name)
        # A key may be left out although its value may not be nil.
        if name in said and (type(value) not in key.types or (type(value) is int and value < 0)):
            raise EngineMistakeError(Rule.READY_RESPONSE_WRONG_VALUE, f"{whose}: {name} is {shown(value)}")
    if said["dtype"] not in DTYPES:
        raise EngineMistakeError(Rule.READY_RESPONSE_WRONG_VALUE, f"{whose}: dtype is {shown(said['dtype'])}")
    if said["dp_stats_address"] != init.frontend_stats_publish_address:
        found = f"{whose}: dp_stats_address is {shown(said['dp_stats_address'])}"
        raise EngineMistakeError(Rule.READY_RESPONSE_WRONG_VALUE, found)


def _judge_lora(whose: str, said: Mapping[str, Any]) -> None:
    supported, most = said.get("supports_lora", False), said.get("max_loras", 0)
    if supported != (most > 0):
        found = f"{whose}: supports_lora is {supported}, max_loras is {most}"
        raise EngineMistakeError(Rule.READY_RESPONSE_LORA_CONTRADICTION, found)


def _age(line_name: str) -> int:
    """Return the place of a line among all; what several have in common is called after them, oldest first."""
    return [line.name for line in LINES].index(line_name.split("|", maxsplit=1)[0])
