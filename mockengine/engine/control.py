# SPDX-License-Identifier: Apache-2.0
"""Utility calls: what an engine without weights or adapters answers (protocol section 6).

Constants are those of vLLM's own mock engine, plus what keeps a frontend's routes from failing where a real engine's
would not. A method that is not here fails with vLLM's words: nothing is silently nil.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mockengine.engine.dialect import Dialect
from mockengine.engine.mm_cache import MmCache
from mockengine.engine.runner import Runner
from mockengine.wire.utility import UtilityCall, failure_message, unknown_method
from mockengine.wire.values import shown

SHUTTING_DOWN: Final = "Server shutting down"
_DEFAULT_WEIGHT_VERSION: Final = "default"
_WORLD_SIZE: Final = 1
_LORA_DISABLED: Final = "LoRA is not enabled. Use --enable-lora to enable LoRA."
# What a caller sent is said again in part only.
_ECHOED_CHARACTERS: Final = 256
_NOT_PAUSED: Final = "release_kv_cache_memory() requires a completed pause first"


class UtilityError(Exception):
    """A call fails; the text goes to the frontend, which shows it."""


class Control:
    """One rank's answers to utility calls.

    Attributes:
        block_size: tokens per KV-cache block.
        dialect: the frontend's line, on which the form of some answers depends.
        runner: what some calls are about.
        mm_cache: what others are about.
        supported_tasks: what may be asked of the engine.
        weight_version: label of the weights, as last set.
        now: when the call came that is answered.

    """

    def __init__(
        self, block_size: int, dialect: Dialect, runner: Runner, mm_cache: MmCache, supported_tasks: Sequence[str]
    ) -> None:
        self.block_size = block_size
        self.dialect = dialect
        self.runner = runner
        self.mm_cache = mm_cache
        self.supported_tasks = supported_tasks
        self.weight_version = _DEFAULT_WEIGHT_VERSION
        self.now = 0.0

    def answer(self, call: UtilityCall, now: float) -> Any:
        """Return the result of a call that came at `now`, in engine seconds.

        Raises:
            UtilityError: the call fails; unknown method, wrong number of arguments, or as a real engine would.

        """
        self.now = now
        method = _METHODS.get(call.method)
        if method is None:
            raise UtilityError(unknown_method(call.method))
        if not method.arguments_least <= len(call.args) <= method.arguments_most:
            # A real engine's text is empty here too.
            raise UtilityError(failure_message(call.method, ""))
        try:
            return method.answer(self, call.args)
        except UtilityError as error:
            raise UtilityError(failure_message(call.method, str(error))) from error


_Answer = Callable[[Control, tuple[Any, ...]], Any]


def _constant(value: Any) -> _Answer:
    return lambda _control, _args: value


def _failing(reason: str) -> _Answer:
    def answer(_control: Control, _args: tuple[Any, ...]) -> Any:
        raise UtilityError(reason)

    return answer


def _wake_up(control: Control, _args: tuple[Any, ...]) -> bool | None:
    return True if control.dialect.line.wake_up_returns_bool else None


def _pause(_control: Control, args: tuple[Any, ...]) -> None:
    mode = args[0] if args else "abort"
    if mode not in ("abort", "wait", "keep"):
        raise UtilityError(f"Invalid pause mode: {str(mode)[:_ECHOED_CHARACTERS]}")


def _reset_prefix_cache(control: Control, args: tuple[Any, ...]) -> bool:
    return control.runner.reset_prefix_cache(control.now, reset_running=bool(args and args[0]))


def _set_weight_version(control: Control, args: tuple[Any, ...]) -> None:
    # It labels every output, so it must not be long.
    if not isinstance(args[0], str) or len(args[0]) > _ECHOED_CHARACTERS:
        raise UtilityError(f"{shown(args[0])} is no weight version (a str of at most {_ECHOED_CHARACTERS} characters)")
    control.weight_version = args[0]


def _collective_rpc(_control: Control, args: tuple[Any, ...]) -> list[Any]:
    # Rust asks for checksums this way and wants a map per worker; nil does for any other method.
    return [{} if args[0] == "compute_weight_checksums" else None] * _WORLD_SIZE


def _kv_cache_groups(control: Control, _args: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [{"group_idx": 0, "kind": "full_attention", "block_size": control.block_size, "sliding_window": None}]


def _fault_tolerance(_control: Control, args: tuple[Any, ...]) -> dict[str, Any]:
    request = args[0] if isinstance(args[0], dict) else {}
    return {"request_id": request.get("request_id"), "success": False, "reason": "status is HEALTHY"}


@dataclass(frozen=True, slots=True)
class _Method:
    answer: _Answer
    arguments_least: int = 0
    arguments_most: int = 0


_nothing = _constant(None)
_no = _constant(value=False)
_METHODS: Final[Mapping[str, _Method]] = {
    "get_supported_tasks": _Method(lambda control, _args: list(control.supported_tasks)),
    "is_sleeping": _Method(_no),
    "sleep": _Method(_nothing, 0, 2),
    "wake_up": _Method(_wake_up, 0, 1),
    "release_kv_cache_memory": _Method(_failing(_NOT_PAUSED)),
    "is_scheduler_paused": _Method(_no),
    "pause_generation": _Method(_pause, 0, 2),
    "pause_scheduler": _Method(_pause, 0, 2),
    "resume_scheduler": _Method(_nothing),
    "reset_prefix_cache": _Method(_reset_prefix_cache, 0, 2),
    "reset_mm_cache": _Method(lambda control, _args: control.mm_cache.reset()),
    "reset_encoder_cache": _Method(_nothing),
    "profile": _Method(_nothing, 0, 5),
    "execute_dummy_batch": _Method(_nothing),
    "collective_rpc": _Method(_collective_rpc, 1, 4),
    "compute_weight_checksums": _Method(_constant([{}] * _WORLD_SIZE)),
    "get_weight_version": _Method(lambda control, _args: control.weight_version),
    "set_weight_version": _Method(_set_weight_version, 1, 1),
    "list_loras": _Method(_constant([])),
    "add_lora": _Method(_failing(_LORA_DISABLED), 1, 1),
    "remove_lora": _Method(_no, 1, 1),
    "pin_lora": _Method(_no, 1, 1),
    "get_kv_cache_group_metadata": _Method(_kv_cache_groups),
    "handle_fault_tolerance": _Method(_fault_tolerance, 1, 1),
}
