# SPDX-License-Identifier: Apache-2.0
"""Utility calls: which there are, what each is asked with, and who answers it (protocol section 6).

What has a state has a file of its own: `pausing`, `sleeping`, `weights`, `adapters`. Where there is nothing to have a
state of, answers are those of vLLM's own mock engine, or what keeps a frontend's routes from failing where a real
engine's would not. A method that is not here fails with vLLM's words: nothing is silently nil.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mockengine.engine.adapters import Adapters
from mockengine.engine.answers import Answering, UtilityError
from mockengine.engine.dialect import Dialect
from mockengine.engine.mm_cache import MmCache
from mockengine.engine.pausing import RESET_FAILED, Pausing
from mockengine.engine.runner import Runner
from mockengine.engine.sleeping import Sleeping
from mockengine.engine.weights import Weights
from mockengine.wire.utility import UtilityCall
from mockengine.wire.values import shown

SHUTTING_DOWN: Final = "Server shutting down"
FAULT_TOLERANCE: Final = "handle_fault_tolerance"
"""A real engine answers it at once, whatever else it does."""
_LORA_DISABLED: Final = "LoRA is not enabled. Use --enable-lora to enable LoRA."
_NOTHING_PREPARED: Final = "No prepared Elastic EP reconfiguration is ready"
_CANNOT_SCALE: Final = "this engine cannot change how many ranks it is one of: start a deployment of the size wanted"
_BAD_PREFIX: Final = (
    "profile_prefix must be 1-128 ASCII characters, start with a letter or number, and contain only letters, numbers, "
    "'.', '_', or '-'"
)
_PREFIX_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One rank's answers to utility calls.

    Attributes:
        rank: whose.
        block_size: tokens per KV-cache block.
        has_waves: whether it is a rank of a mixture of experts, which knows more methods.
        dialect: the frontend's line, on which the form of some answers depends.
        runner: its requests.
        pausing: whether they go on.
        sleeping: what memory is there.
        weights: what is in it.
        supported_tasks: what may be asked of it.
        mm_cache: data of multimodal items that frontends believe to be here.
        adapters: and what besides, if there may be any.

    """

    rank: int
    block_size: int
    has_waves: bool
    dialect: Dialect
    runner: Runner
    pausing: Pausing
    sleeping: Sleeping
    weights: Weights
    supported_tasks: Sequence[str]
    mm_cache: MmCache
    adapters: Adapters | None

    def answer(self, call: UtilityCall, now: float) -> Any:
        """Return the result of a call that came at `now`, in engine seconds, or an `Answering` that will.

        Raises:
            UtilityError: the call fails; unknown method, wrong number of arguments, or as a real engine would.

        """
        method = _METHODS.get(call.method)
        if method is None or (method.needs_waves and not self.has_waves):
            owner = "DPEngineCoreProc" if self.has_waves else "EngineCoreProc"
            raise UtilityError(f"{owner!r} object has no attribute {call.method!r}")
        if method.required is not None and not call.args:
            owner = "DPEngineCoreProc" if method.needs_waves else "EngineCore"
            missing = f"missing 1 required positional argument: {method.required!r}"
            raise UtilityError(f"{owner}.{call.method}() {missing}")
        if len(call.args) > method.most_arguments:
            # A real engine's text is empty here too.
            raise UtilityError("")
        return method.answer(self, _Arguments(call.args, now))


class _Arguments:
    """The arguments of a call, of which those left out are nil, and the time."""

    def __init__(self, values: tuple[Any, ...], now: float) -> None:
        self.now = now
        self._values = values

    def __getitem__(self, index: int) -> Any:
        return self._values[index] if index < len(self._values) else None

    def get(self, index: int, default: object) -> Any:
        """Return an argument, or what a real engine takes if it is left out."""
        return self._values[index] if index < len(self._values) else default


_Answer = Callable[[Control, _Arguments], Any]


def _constant(value: Any) -> _Answer:
    return lambda _control, _args: value


def _failing(reason: str) -> _Answer:
    def answer(_control: Control, _args: _Arguments) -> Any:
        raise UtilityError(reason)

    return answer


# Requests.


def _pause_scheduler(control: Control, args: _Arguments) -> Answering:
    return control.pausing.pause(args.get(0, "abort"), args.get(1, default=True), args.now)


def _pause_generation(control: Control, args: _Arguments) -> Answering:
    return control.pausing.pause_generation(args.get(0, "abort"), args.get(1, default=True), args.now)


def _sleep(control: Control, args: _Arguments) -> Answering:
    return control.sleeping.sleep(args.get(0, 1), args.get(1, "abort"), args.now)


def _wake_up(control: Control, args: _Arguments) -> Answering:
    is_awake = yield from control.sleeping.wake_up(args[0], args.now)
    return is_awake if control.dialect.line.wake_up_returns_bool else None


def _reset_prefix_cache(control: Control, args: _Arguments) -> bool:
    reset_running, reset_connector = bool(args[0]), bool(args[1])
    is_reset = control.runner.reset_prefix_cache(args.now, reset_running=reset_running, reset_connector=reset_connector)
    if reset_running and not is_reset:
        raise UtilityError(RESET_FAILED)
    return is_reset


# Workers.


def _profile(_control: Control, args: _Arguments) -> None:
    prefix = args[1]
    if not args.get(0, default=True) or prefix is None:
        return
    is_allowed = (
        isinstance(prefix, str)
        and 0 < len(prefix) <= _PREFIX_CHARACTERS
        and prefix.isascii()
        and prefix[0].isalnum()
        and all(character.isalnum() or character in "._-" for character in prefix)
    )
    if not is_allowed:
        raise UtilityError(_BAD_PREFIX)


def _collective_rpc(control: Control, args: _Arguments) -> list[Any]:
    method, positional, named = args[0], args[2] or [], args[3] or {}
    if not isinstance(method, str) or not isinstance(positional, list | tuple) or not isinstance(named, dict):
        found = ", ".join(map(shown, (method, positional, named)))
        raise UtilityError(f"collective_rpc takes a method's name, a list and a map, not {found}")
    return control.weights.call_workers(method, positional, named)


def _save_sharded_state(control: Control, _args: _Arguments) -> None:
    control.weights.save()


# Adapters.


def _adapters(control: Control) -> Adapters:
    if control.adapters is None:
        raise UtilityError(_LORA_DISABLED)
    return control.adapters


# What an engine tells of itself.


def _kv_cache_groups(control: Control, _args: _Arguments) -> list[dict[str, Any]]:
    return [{"group_idx": 0, "kind": "full_attention", "block_size": control.block_size, "sliding_window": None}]


def _fault_tolerance(control: Control, args: _Arguments) -> dict[str, Any]:
    request = args[0] if isinstance(args[0], dict) else {}
    instruction = str(request.get("instruction"))[:_PREFIX_CHARACTERS]
    return {
        "request_id": request.get("request_id", ""),
        "success": False,
        "reason": f"[FT] Rejecting {instruction} on engine {control.rank}: status is HEALTHY",
    }


@dataclass(frozen=True, slots=True)
class _Method:
    answer: _Answer
    most_arguments: int = 0
    required: str | None = None
    needs_waves: bool = False


_nothing = _constant(None)
_METHODS: Final[Mapping[str, _Method]] = {
    "get_supported_tasks": _Method(lambda control, _args: list(control.supported_tasks)),
    "pause_generation": _Method(_pause_generation, 2),
    "pause_scheduler": _Method(_pause_scheduler, 2),
    "resume_scheduler": _Method(lambda control, args: control.pausing.resume(args.now)),
    "is_scheduler_paused": _Method(lambda control, _args: control.pausing.is_paused),
    "sleep": _Method(_sleep, 2),
    "wake_up": _Method(_wake_up, 1),
    "is_sleeping": _Method(lambda control, _args: control.sleeping.is_sleeping),
    "release_kv_cache_memory": _Method(lambda control, args: control.sleeping.release_kv_cache_memory(args.now)),
    "reset_prefix_cache": _Method(_reset_prefix_cache, 2),
    "reset_mm_cache": _Method(lambda control, _args: control.mm_cache.reset()),
    "reset_encoder_cache": _Method(_nothing),
    "profile": _Method(_profile, 5),
    "execute_dummy_batch": _Method(_nothing),
    "collective_rpc": _Method(_collective_rpc, 4, "method"),
    "compute_weight_checksums": _Method(lambda control, _args: control.weights.checksums()),
    "save_sharded_state": _Method(_save_sharded_state, 3, "path"),
    "get_weight_version": _Method(lambda control, _args: control.weights.version),
    "set_weight_version": _Method(lambda control, args: control.weights.set_version(args[0]), 1, "weight_version"),
    "list_loras": _Method(lambda control, _args: _adapters(control).ids()),
    "add_lora": _Method(lambda control, args: _adapters(control).add(args[0]), 1, "lora_request"),
    "remove_lora": _Method(lambda control, args: _adapters(control).remove(args[0]), 1, "lora_id"),
    "pin_lora": _Method(lambda control, args: _adapters(control).pin(args[0]), 1, "lora_id"),
    "get_kv_cache_group_metadata": _Method(_kv_cache_groups),
    FAULT_TOLERANCE: _Method(_fault_tolerance, 1),
    "reinitialize_distributed": _Method(_failing(_CANNOT_SCALE), 1, "reconfig_request", needs_waves=True),
    "commit_prepared_elastic_ep": _Method(_failing(_NOTHING_PREPARED), needs_waves=True),
}
