# SPDX-License-Identifier: Apache-2.0
"""Whatever is paused, put to sleep, loaded and aborted at whatever moment: nobody is forgotten, and nobody lies."""

from dataclasses import replace
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import ControlConfig, LoraConfig
from mockengine.wire.outputs import FinishReason
from mockengine.wire.requests import LoraRequest
from tests.engine.test_batching import expected_tokens
from tests.support.rig import Rig, request
from tests.support.runners import RUNNERS, call, is_answered, is_due, play

MODES: Final = st.sampled_from(["abort", "wait", "keep"])
TAGS: Final = st.sampled_from([None, ["weights"], ["kv_cache"], ["scheduling"], ["weights", "kv_cache"]])
EVENTS: Final = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.sampled_from([None, 1, 2, 3])),
    st.tuples(st.just("abort"), st.integers(0, 40)),
    st.tuples(st.just("time"), st.floats(0, 0.2)),
    st.tuples(st.just("pause_generation"), MODES, st.booleans()),
    st.tuples(st.just("pause_scheduler"), MODES, st.booleans()),
    st.tuples(st.just("resume_scheduler")),
    st.tuples(st.just("sleep"), st.integers(0, 2), MODES),
    st.tuples(st.just("wake_up"), TAGS),
    st.tuples(st.just("release_kv_cache_memory")),
    st.tuples(st.just("reset_prefix_cache"), st.booleans(), st.booleans()),
    st.tuples(st.just("add_lora"), st.integers(1, 3).map(lambda number: [f"l{number}", number, f"/l{number}"])),
    st.tuples(st.just("remove_lora"), st.integers(1, 3)),
    st.tuples(st.just("is_sleeping")),
)


@settings(deadline=None, max_examples=300)
@given(
    runner=st.sampled_from(sorted(RUNNERS)),
    events=st.lists(EVENTS, min_size=1, max_size=40),
    slow=st.sampled_from([0.0, 0.05]),
    leaves=st.booleans(),
)
def test_every_call_is_answered_and_every_request_ends(
    runner: str, events: list[tuple[Any, ...]], slow: float, *, leaves: bool
) -> None:
    config = replace(
        RUNNERS[runner],
        data_parallel_size=2,
        loras=LoraConfig(max_loras=1, max_cpu_loras=2, load_s=slow),
        control=ControlConfig(sleep_s=slow, wake_up_s=slow),
    )
    rig = Rig(config)
    prompts: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    loras: dict[str, LoraRequest | None] = {}
    asked: list[int] = []
    aborted: set[str] = set()
    for event, *args in events:
        if event == "add":
            name = f"r{len(prompts)}"
            prompts[name], lengths[name] = [len(prompts)] * 20, args[0]
            number = args[1]
            loras[name] = None if number is None else LoraRequest(f"l{number}", number, f"/l{number}")
            rig.add(request(name, prompt=prompts[name], max_tokens=args[0], lora_request=loras[name]))
        elif event == "abort":
            name = f"r{args[0]}"
            rig.abort(name)
            aborted.add(name)
        elif event == "time":
            play(rig, args[0])
        else:
            asked.append(call(rig, event, *args))
    if leaves:
        rig.ranks.begin_shutdown()
        rig._hear(rig.ranks.abort_everything(rig.now))
    else:
        for method, *rest in (("wake_up", None), ("resume_scheduler",)):
            asked.append(call(rig, method, *rest))
            play(rig)
    play(rig)

    assert all(is_answered(rig, each) for each in asked)
    assert (rig.ranks.num_requests, rig.ranks.can_go_on, is_due(rig)) == (0, False, None)
    reported = [name for each in rig.to(0) for name in getattr(each, "finished_requests", ())]
    for name, prompt in prompts.items():
        said, reason = rig.tokens(name), rig.finish_reason(name)
        assert said == expected_tokens(prompt, len(said), lora_request=loras[name])
        assert reason is not None or name in aborted, f"{name} has not ended"
        assert reason is not FinishReason.LENGTH or len(said) == lengths[name]
        assert sum(output.finish_reason is not None for output in rig.outputs(name)) <= 1
        assert reported.count(name) == 1
