# SPDX-License-Identifier: Apache-2.0
"""Utility calls."""

from dataclasses import replace
from typing import Any

import pytest

from mockengine.engine.config import KvTransferConfig
from mockengine.wire.lines import LINES, NEWEST, line_of_release
from mockengine.wire.messages import Add
from mockengine.wire.outputs import FinishReason, StepOutputs, UtilityReply
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig, request
from tests.support.runners import ITL_S, RUNNERS, call, play, reply

BIG_CALL_ID = 2**63 + 12_345
MISSING = "missing 1 required positional argument"
RPC = "Call to collective_rpc method failed: "
BAD_PREFIX = (
    "Call to profile method failed: profile_prefix must be 1-128 ASCII characters, start with a letter or number, and "
    "contain only letters, numbers, '.', '_', or '-'"
)
SCALING = "Call to reinitialize_distributed method failed: "
CANNOT_SCALE = f"{SCALING}this engine cannot change how many ranks it is one of: start a deployment of the size wanted"
CALLS_OF_A_MIXTURE_OF_EXPERTS: list[tuple[str, tuple[Any, ...]]] = [
    ("no_such", ()),
    ("commit_prepared_elastic_ep", ()),
    ("reinitialize_distributed", ({},)),
    ("reinitialize_distributed", ()),
]


def _call(rig: Rig, method: str, *args: Any) -> UtilityReply:
    (reply,) = rig.receive(UtilityCall(0, BIG_CALL_ID, method, args))
    assert isinstance(reply, UtilityReply)
    assert reply.call_id == BIG_CALL_ID
    return reply


@pytest.mark.parametrize(
    ("method", "args", "result"),
    [
        ("get_supported_tasks", (), ["generate"]),
        ("is_sleeping", (), False),
        ("sleep", (1, "abort"), None),
        ("sleep", (), None),
        ("profile", (True, None, None, None), None),
        ("profile", (False, None), None),
        ("profile", (True, "run-1_a.b", 2, 3, {"with_stack": True}), None),
        ("reset_prefix_cache", (False, False), True),
        ("reset_mm_cache", (), None),
        ("reset_encoder_cache", (), None),
        ("execute_dummy_batch", (), None),
        ("is_scheduler_paused", (), False),
        ("pause_generation", ("abort", True), None),
        ("pause_scheduler", ("keep", False), None),
        ("resume_scheduler", (), None),
        ("get_weight_version", (), "default"),
        ("collective_rpc", ("foo", 5.0, [1, "a"], {"k": 2}), [None]),
        ("collective_rpc", ("foo",), [None]),
        (
            "get_kv_cache_group_metadata",
            (),
            [{"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}],
        ),
        (
            "handle_fault_tolerance",
            ({"instruction": "retry", "params": {}, "request_id": "x"},),
            {
                "request_id": "x",
                "success": False,
                "reason": "[FT] Rejecting retry on engine 0: status is HEALTHY",
            },
        ),
    ],
)
def test_call_succeeds(method: str, args: tuple[Any, ...], result: Any) -> None:
    reply = _call(Rig(), method, *args)
    assert (reply.failure, reply.result) == (None, result)


def test_tasks_are_those_of_the_engine() -> None:
    assert _call(Rig(replace(CONFIG, supported_tasks=("embed", "token_embed"))), "get_supported_tasks").result == [
        "embed",
        "token_embed",
    ]


@pytest.mark.parametrize(
    ("method", "args", "failure"),
    [
        ("no_such", (), "Call to no_such method failed: 'EngineCoreProc' object has no attribute 'no_such'"),
        ("reset_prefix_cache", (1, 2, 3, 4), "Call to reset_prefix_cache method failed: "),
        *(
            (method, (), f"Call to {method} method failed: EngineCore.{method}() {MISSING}: '{argument}'")
            for method, argument in (("add_lora", "lora_request"), ("collective_rpc", "method"))
        ),
        *(
            (
                method,
                ({},) if method == "reinitialize_distributed" else (),
                f"Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'",
            )
            for method in (
                "reinitialize_distributed",
                "commit_prepared_elastic_ep",
                "eep_handle_engine_core_notification",
            )
        ),
        (
            "collective_rpc",
            (7, None, "x", None),
            f"{RPC}collective_rpc takes a method's name, a list and a map, not int 7, str 'x', map of 0",
        ),
        *(
            (
                "profile",
                (True, prefix),
                BAD_PREFIX,
            )
            for prefix in ("", "../up", "-a", "a" * 129, 7)
        ),
        ("pause_generation", ("bogus", True), "Call to pause_generation method failed: Invalid pause mode: bogus"),
        (
            "add_lora",
            (["l1", 1, "/path", None, False, False],),
            "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA.",
        ),
        (
            "release_kv_cache_memory",
            (),
            "Call to release_kv_cache_memory method failed: release_kv_cache_memory() requires a completed pause first",
        ),
    ],
)
def test_call_fails_with_the_words_of_vllm(method: str, args: tuple[Any, ...], failure: str) -> None:
    assert _call(Rig(), method, *args).failure == failure


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_wake_up_answers_in_the_shape_of_the_line(line: Any) -> None:
    expected = True if line.name in ("0.31", "0.32", "0.33") else None
    assert _call(Rig(line=line), "wake_up", None).result is expected


def test_weight_version_labels_outputs_once_set() -> None:
    rig = Rig()
    assert _call(rig, "set_weight_version", "v7").failure is None
    assert _call(rig, "get_weight_version").result == "v7"
    rig.add(request())
    envelope = rig.step()[0]
    assert isinstance(envelope, StepOutputs)
    assert envelope.weight_version == "v7"


@pytest.mark.parametrize("version", ["v" * 257, 7, None, ["v"]])
def test_weight_version_is_a_short_text(version: object) -> None:
    rig = Rig()
    failure = _call(rig, "set_weight_version", version).failure
    assert failure is not None
    assert "is no weight version" in failure
    assert _call(rig, "get_weight_version").result == "default"


def test_rank_of_a_mixture_of_experts_knows_more_methods_and_is_called_otherwise() -> None:
    rig = Rig(replace(CONFIG, has_waves=True, has_coordinator=True))
    assert [_call(rig, method, *args).failure for method, args in CALLS_OF_A_MIXTURE_OF_EXPERTS] == [
        "Call to no_such method failed: 'DPEngineCoreProc' object has no attribute 'no_such'",
        "Call to commit_prepared_elastic_ep method failed: No prepared Elastic EP reconfiguration is ready",
        CANNOT_SCALE,
        f"{SCALING}DPEngineCoreProc.reinitialize_distributed() {MISSING}: 'reconfig_request'",
    ]


def test_cache_in_use_is_not_reset_and_one_whose_requests_are_preempted_is() -> None:
    rig = Rig(RUNNERS["steps"])
    rig.add(request(max_tokens=20))
    play(rig, 3 * ITL_S)
    results = []
    for reset_running in (False, True):
        asked = call(rig, "reset_prefix_cache", reset_running, False)  # noqa: FBT003 - as on the wire
        play(rig, ITL_S)
        results.append(reply(rig, asked).result)
    assert results == [False, True]
    play(rig)
    assert rig.finish_reason("r1") is FinishReason.LENGTH


def test_reset_of_what_other_instances_have_is_told_once() -> None:
    transfer = KvTransferConfig(engine_id="here")
    rig = Rig(replace(RUNNERS["steps"], kv_transfer=transfer))
    assert _call(rig, "reset_prefix_cache", False, True).result is True  # noqa: FBT003 - as on the wire
    rig.add(request(max_tokens=2))
    play(rig)
    told = [
        (stats.prefix_cache_stats.reset, stats.connector_prefix_cache_stats.reset)
        for envelope in rig.to(0)
        if isinstance(envelope, StepOutputs) and (stats := envelope.scheduler_stats) is not None
        if stats.connector_prefix_cache_stats is not None
    ]
    assert told[0] == (True, True)
    assert set(told[1:]) == {(False, False)}


def test_what_a_caller_sent_is_echoed_in_part_only() -> None:
    failure = _call(Rig(), "pause_generation", "x" * 1_000_000).failure
    assert failure is not None
    assert len(failure) < 400


def test_answer_goes_to_the_client_of_the_call() -> None:
    rig = Rig(replace(CONFIG, clients=2))
    rig.receive(UtilityCall(1, 1, "is_sleeping"), client=0)
    rig.receive(UtilityCall(9, 2, "is_sleeping"), client=0)
    assert [destination for destination, _ in rig.heard] == [1, 0]


def test_until_a_frontend_has_shown_its_line_nothing_is_said_that_some_line_does_not_understand() -> None:
    spoken = Rig().dialect.line
    for line in LINES:
        assert line.output_fields[: len(spoken.output_fields)] == spoken.output_fields
    assert not spoken.has_weight_version


@pytest.mark.parametrize(
    ("items", "keys", "spoken"),
    [
        (17, {"max_tokens"}, "0.19"),
        (18, {"max_tokens"}, "0.20"),
        (20, {"max_tokens"}, "0.21|0.26"),
        (20, {"max_tokens", "stop"}, "0.21|0.26"),
        (21, {"max_tokens"}, "0.28"),
        (21, {"max_tokens", "routed_experts_prompt_start"}, "0.29"),
        (21, {"max_tokens", "stop"}, "0.29"),
        (22, {"max_tokens"}, "0.31|0.32|0.33"),
        (22, {"max_tokens", "stop"}, "0.33"),
        (30, {"max_tokens", "stop"}, "0.33"),
    ],
)
def test_line_is_told_from_the_first_request(items: int, keys: set[str], spoken: str) -> None:
    rig = Rig()
    rig.receive(Add(request("a", items=items, sampling_keys=frozenset(keys))))
    assert rig.dialect.line.name == spoken
    rig.receive(Add(request("b", items=17, sampling_keys=frozenset())))
    assert rig.dialect.line.name == spoken


@pytest.mark.parametrize("first", ["request", "call"])
def test_call_that_only_one_line_makes_settles_what_requests_leave_open(first: str) -> None:
    rig = Rig()
    if first == "request":
        rig.add(request(sampling_keys=frozenset({"max_tokens"})))
        assert not rig.dialect.line.has_weight_version
    _call(rig, "pause_generation", "keep", False)  # noqa: FBT003 - as on the wire
    assert rig.dialect.line is NEWEST
    rig.add(request("other", sampling_keys=frozenset({"max_tokens"})))
    assert rig.dialect.line is NEWEST


def test_setting_outweighs_what_a_frontend_shows_and_the_contradiction_is_reported_once() -> None:
    line = line_of_release("0.27.1")
    rig = Rig(line=line)
    _call(rig, "pause_generation", "keep")
    rig.add(request("a", items=22), request("b", items=22))
    assert rig.dialect.line is line
    assert rig.watcher.contradicted == [("0.33", 22)]


@pytest.mark.parametrize(("release", "items"), [("0.33.0", 22), ("0.31.0", 22), ("0.27.1", 20), ("0.24.0", 20)])
def test_setting_that_fits_what_a_frontend_shows_is_not_reported(release: str, items: int) -> None:
    rig = Rig(line=line_of_release(release))
    rig.add(request(items=items, sampling_keys=frozenset({"max_tokens"})))
    assert rig.watcher.contradicted == []
    assert rig.dialect.line is line_of_release(release)


@pytest.mark.parametrize("release", ["0.31.0", "0.32.0", "0.33.0"])
def test_setting_that_a_python_frontend_may_be_of_is_not_reported(release: str) -> None:
    rig = Rig(line=line_of_release(release))
    rig.add(request(items=22))
    assert request().is_from_python
    assert rig.watcher.contradicted == []
    assert rig.dialect.line is line_of_release(release)
