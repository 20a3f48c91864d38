# SPDX-License-Identifier: Apache-2.0
"""A whole engine that is a prefill and a decode instance: what of its settings other instances see."""

import time
from typing import Any

from mockengine.testing.double import FrontendDouble
from tests.support.engine_thread import EngineThread

SETTINGS = {"load_model": "vllm", "kv_role": "both"}
SEND = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}


def answer(frontend: FrontendDouble, request_id: str, rank: int = 0) -> dict[str, Any]:
    frontend.add(request_id, max_tokens=1, sampling=SEND, rank=rank)
    frontend.reply(request_id)
    outputs = [output for step in frontend.steps[0] for output in step.outputs if output.request_id == request_id]
    return dict(outputs[-1].kv_transfer_params or {})


def test_an_instance_is_called_and_found_as_it_is_told() -> None:
    told = {"kv_engine_id": "prefill", "nixl_side_channel_host": "10.0.0.7", "nixl_side_channel_port": 7_000}
    with FrontendDouble(ranks=2) as frontend, EngineThread(frontend, **SETTINGS, **told):
        frontend.handshake()
        params = [answer(frontend, f"r{rank}", rank) for rank in range(2)]
    assert [(each["remote_engine_id"], each["remote_host"], each["remote_port"]) for each in params] == [
        ("prefill_dp0", "10.0.0.7", 7_000),
        ("prefill_dp1", "10.0.0.7", 7_001),
    ]


def test_an_instance_without_a_name_has_one_for_as_long_as_it_lives() -> None:
    names = []
    for _ in range(2):
        with FrontendDouble() as frontend, EngineThread(frontend, **SETTINGS):
            frontend.handshake()
            names.append([answer(frontend, f"r{number}")["remote_engine_id"] for number in range(2)])
    assert all(first == second for first, second in names)
    assert names[0] != names[1]


def test_transfers_are_scaled_as_everything_that_takes_time() -> None:
    slow = {"kv_transfer_ms": 2_000.0, "kv_transfer_ms_per_token": 1_000.0, "time_scale": 0.1}
    with FrontendDouble() as frontend, EngineThread(frontend, **SETTINGS, **slow):
        frontend.handshake()
        receive = {"extra_args": {"kv_transfer_params": answer(frontend, "here")}}
        sent = time.monotonic()
        frontend.add("there", prompt=(4, 5, 6), max_tokens=1, sampling=receive)
        frontend.reply("there")
        took_s = time.monotonic() - sent
    assert 0.5 <= took_s < 2


def test_a_frontend_that_comes_back_finds_the_same_instance() -> None:
    names = []
    with FrontendDouble() as first, EngineThread(first, **SETTINGS) as engine:
        first.handshake()
        names.append(answer(first, "r")["remote_engine_id"])
        first.close()
        engine.wait_for("frontend lost")
        with FrontendDouble(handshake_address=first.handshake_address) as second:
            second.handshake()
            names.append(answer(second, "r")["remote_engine_id"])
    assert names[0] == names[1]
