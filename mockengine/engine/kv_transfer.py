# SPDX-License-Identifier: Apache-2.0
"""What a request asks of prefill/decode disaggregation: `kv_transfer_params` in its `extra_args`.

A router has one instance compute a prompt and keep its blocks (`do_remote_decode`), takes what that one answers, and
has another instance load them (`do_remote_prefill`). Requests are read here and nothing is done about them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from mockengine.wire.values import shown

_KEY: Final = "kv_transfer_params"
_ADDRESS: Final[Mapping[str, tuple[type, ...]]] = {
    "remote_engine_id": (str,),
    "remote_request_id": (str,),
    "remote_host": (str,),
    "remote_port": (int, str),
}


class FetchStage(Enum):
    """How far a request is whose prompt another instance has computed; NONE is every other request."""

    NONE = auto()
    WAITING_TO_START = auto()
    IN_PROGRESS = auto()
    COMPLETED_WAITING = auto()


@dataclass(slots=True, eq=False)
class KvTransfer:
    """A request's part in disaggregation.

    Attributes:
        do_remote_prefill: its prompt is to be loaded; False once that has been tried, as it is only once.
        do_remote_decode: its blocks are to be kept for another instance.
        stage: how far the loading is.
        num_external_tokens: prompt tokens that were loaded.
        num_kept_blocks: blocks that are kept.
        own_numbers: numbers of those that no other sequence can hold.

    """

    do_remote_prefill: bool
    do_remote_decode: bool
    stage: FetchStage = field(default=FetchStage.NONE, init=False)
    num_external_tokens: int = field(default=0, init=False)
    num_kept_blocks: int = field(default=0, init=False)
    own_numbers: tuple[int, ...] = field(default=(), init=False)

    @property
    def is_loading(self) -> bool:
        """Whether it holds blocks although it waits."""
        return self.stage in (FetchStage.IN_PROGRESS, FetchStage.COMPLETED_WAITING)


# Tokens of a block, at most, wherever it is.
_LARGEST_BLOCK: Final = 256


def has_kv_transfer_params(extra_args: Mapping[str, object] | None) -> bool:
    """Tell whether a request asks for a transfer at all."""
    return extra_args is not None and extra_args.get(_KEY) is not None


def read_kv_transfer(
    extra_args: Mapping[str, object] | None, num_prompt_tokens: int, block_size: int
) -> tuple[KvTransfer | None, str | None]:
    """Return a request's part in disaggregation, and what is wrong with what it asks.

    Args:
        extra_args: of its sampling parameters.
        num_prompt_tokens: length of its prompt.
        block_size: tokens of a block here, and in the other instance if that does not say how many tokens it has.

    Returns:
        None is no part: its prompt is computed here, and its blocks are free when it ends.

    """
    params = extra_args.get(_KEY) if extra_args else None
    if params is None:
        return None, None
    if not isinstance(params, Mapping):
        return None, f"{_KEY}: {shown(params)} where a map is expected"
    problem = None
    do_remote_prefill, do_remote_decode = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if do_remote_prefill:
        problem = _address_problem(params) or _blocks_problem(params, num_prompt_tokens, block_size)
        do_remote_prefill = problem is None
    if not (do_remote_prefill or do_remote_decode):
        return None, problem
    return KvTransfer(do_remote_prefill, do_remote_decode), problem


def _address_problem(params: Mapping[object, object]) -> str | None:
    for name, kinds in _ADDRESS.items():
        if type(params.get(name)) not in kinds:
            expected = " or ".join(f"a{'n' if kind is int else ''} {kind.__name__}" for kind in kinds)
            return f"{_KEY}.{name}: {shown(params.get(name))} where {expected} is expected"
    return None


def _blocks_problem(params: Mapping[object, object], num_prompt_tokens: int, block_size: int) -> str | None:
    num_blocks = _num_blocks(params.get("remote_block_ids"))
    if not num_blocks:
        found = shown(params.get("remote_block_ids"))
        return f"{_KEY}.remote_block_ids: {found} where block numbers are expected, as the other instance has said them"
    num_tokens = params.get("remote_num_tokens")
    if num_tokens is not None and type(num_tokens) is not int:
        return f"{_KEY}.remote_num_tokens: {shown(num_tokens)} where an int is expected"
    held = num_blocks * block_size if num_tokens is None else min(num_tokens, num_blocks * _LARGEST_BLOCK)
    if held < num_prompt_tokens:
        return f"{_KEY}: the other instance holds {held} tokens of a prompt of {num_prompt_tokens}"
    return None


def _num_blocks(block_ids: object) -> int:
    """Return the length of a list of numbers, or of the longest of several, one for each group of layers; 0: neither.

    Releases differ in which of both it is.
    """
    if not isinstance(block_ids, list):
        return 0
    groups = block_ids if all(isinstance(group, list) for group in block_ids) else [block_ids]
    if any(set(map(type, group)) - {int} for group in groups):
        return 0
    return max(map(len, groups), default=0)
