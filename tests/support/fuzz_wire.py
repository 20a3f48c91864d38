# SPDX-License-Identifier: Apache-2.0
"""Feeds an engine with messages that a fuzzer makes, guided by what they reach: `make fuzz`.

Whatever comes, the engine must not raise, must say nothing that a strict frontend cannot decode, and must not grow.
"""

import resource
import sys
from collections.abc import Callable, Sequence
from typing import Final

import atheris

# Not what compares arrays: each of them is kept.
_COMPARES_ARRAYS: Final = ["mockengine.replies.logprobs", "mockengine.replies.rank_curve"]

with atheris.instrument_imports(include=["mockengine"], exclude=_COMPARES_ARRAYS, enable_loader_override=False):
    from mockengine.wire.codec import pack
    from mockengine.wire.messages import RequestType, read_message
    from tests.support.rig import CONFIG, Rig

_MOST_GROWTH_KB: Final = 64 * 1_024
_WARM: Final = 20_000
# As frontends write them; what the fuzzer says takes the place of parts.
_ADD: Final[tuple[object, ...]] = (
    *("r", [1, 2, 3], None, {"max_tokens": 4, "temperature": 0.0}, None, 0.0, None, None, None, None),
    *(0, 0, 0, None, False, None, None, None, False, None, True, None),
)
_PARAMS: Final = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("_eos_token_id", "_all_stop_token_ids", "logprobs", "prompt_logprobs", "logprob_token_ids", "logit_bias"),
    *("allowed_token_ids", "extra_args", "bad_words", "_bad_words_token_ids", "structured_outputs"),
    *("repetition_detection", "thinking_token_budget", "trace_decode_token_ids", "output_kind"),
)
_METHODS: Final = (
    *("is_sleeping", "sleep", "wake_up", "pause_scheduler", "resume_scheduler", "is_scheduler_paused", "add_lora"),
    *("remove_lora", "list_loras", "pin_lora", "reset_prefix_cache", "reset_mm_cache", "collective_rpc", "profile"),
    *("get_supported_tasks", "start_weight_update", "finish_weight_update", "update_weights", "abort_requests"),
)
_MOST_DEPTH: Final = 4


_PLAIN: Final[Sequence[Callable[[atheris.FuzzedDataProvider], object]]] = (
    lambda _: None,
    lambda said: said.ConsumeBool(),
    lambda said: said.ConsumeIntInRange(-5, 40),
    lambda said: said.ConsumeIntInRange(-(2**63), 2**64 - 1),
    lambda said: said.ConsumeFloat(),
    lambda said: said.ConsumeUnicodeNoSurrogates(12),
    lambda said: said.ConsumeBytes(12),
)


def _value(said: atheris.FuzzedDataProvider, depth: int = 0) -> object:
    """Return any value that msgpack knows."""
    kind = said.ConsumeIntInRange(0, len(_PLAIN) + (2 if depth < _MOST_DEPTH else -1))
    if kind < len(_PLAIN):
        return _PLAIN[kind](said)
    count = said.ConsumeIntInRange(0, 5)
    if kind > len(_PLAIN):
        return [_value(said, depth + 1) for _ in range(count)]
    return {said.ConsumeUnicodeNoSurrogates(6): _value(said, depth + 1) for _ in range(count)}


def _add(said: atheris.FuzzedDataProvider) -> list[object]:
    items = list(_ADD)
    items[0] = f"r{said.ConsumeIntInRange(0, 3)}"
    items[3] = {said.PickValueInList(list(_PARAMS)): _value(said) for _ in range(said.ConsumeIntInRange(0, 6))}
    for _ in range(said.ConsumeIntInRange(0, 3)):
        items[said.ConsumeIntInRange(0, len(items) - 1)] = _value(said)
    return items[: said.ConsumeIntInRange(0, len(items))] if said.ConsumeIntInRange(0, 9) == 0 else items


def _frames(said: atheris.FuzzedDataProvider) -> list[bytes]:
    """Return a message: one that is almost right, or any bytes."""
    kind = said.ConsumeIntInRange(0, 9)
    aux = [said.ConsumeBytes(16) for _ in range(said.ConsumeIntInRange(0, 1))]
    if kind <= 3:
        return [bytes([RequestType.ADD]), pack(_add(said)), *aux]
    if kind == 4:
        return [
            bytes([RequestType.ABORT]),
            pack([f"r{said.ConsumeIntInRange(0, 3)}", _value(said)][: said.ConsumeIntInRange(1, 2)]),
        ]
    if kind == 5:
        return [bytes([RequestType.START_DP_WAVE]), pack([_value(said), _value(said)])]
    if kind <= 7:
        args = [_value(said) for _ in range(said.ConsumeIntInRange(0, 3))]
        return [
            bytes([RequestType.UTILITY]),
            pack([0, said.ConsumeIntInRange(0, 9), said.PickValueInList(list(_METHODS)), args]),
        ]
    return [said.ConsumeBytes(1), said.ConsumeBytes(said.remaining_bytes()), *aux]


class _Target:
    """An engine that lives as long as the fuzzer."""

    def __init__(self) -> None:
        self._rig = Rig(CONFIG, ranks=2)
        self._runs = 0
        self._warm_kb = 0

    def __call__(self, data: bytes) -> None:
        said = atheris.FuzzedDataProvider(data)
        rig = self._rig
        client = -1 if said.ConsumeIntInRange(0, 19) == 0 else 0
        rig.receive(read_message(_frames(said), client), rank=said.ConsumeIntInRange(0, 1), client=client)
        for _ in range(8):
            if not rig.step_when_due():
                break
        if rig.ranks.num_requests > 100:
            rig.ranks.abort_everything(rig.now)
        self._forget()

    def _forget(self) -> None:
        """Keep nothing of what was heard, and see that nothing else is kept."""
        rig = self._rig
        rig.heard.clear()
        rig.sent.clear()
        for kept in (rig.watcher.started, rig.watcher.finished, rig.watcher.refused, rig.watcher.dropped):
            kept.clear()
        self._runs += 1
        used_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self._runs == _WARM:
            self._warm_kb = used_kb
        if self._runs > _WARM and used_kb > self._warm_kb + _MOST_GROWTH_KB:
            raise AssertionError(f"{used_kb} kB after {self._runs} messages, {self._warm_kb} kB after {_WARM}")


def main(argv: Sequence[str]) -> None:
    """Fuzz until something is found, or as libFuzzer's arguments say."""
    atheris.Setup([sys.argv[0], *argv], _Target())
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
