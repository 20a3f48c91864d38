# SPDX-License-Identifier: Apache-2.0
"""The engine as a process: signals, exit codes, speed of leaving."""

import signal
import time

import pytest

from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.wire.outputs import FinishReason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_waiting_for_a_frontend_ends_it_at_once(number: signal.Signals) -> None:
    with EngineProcess("--handshake-address=tcp://127.0.0.1:1") as engine:
        engine.wait_for("engine joining")
        began = time.monotonic()
        engine.send_signal(number)
        assert engine.wait() == 0
        assert time.monotonic() - began < 0.5
        assert engine.log[-1]["event"] == "engine left"


def test_signal_while_serving_says_goodbye_and_ends_with_0() -> None:
    with FrontendDouble() as frontend, EngineProcess(f"--handshake-address={frontend.handshake_address}") as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=30_000)
        frontend.listen()
        began = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - began < 1.0
        assert frontend.reply("a").finish_reason is FinishReason.ABORT
        frontend.wait_for_death()


def test_request_that_arrives_with_the_signal_is_answered() -> None:
    with FrontendDouble() as frontend, EngineProcess(f"--handshake-address={frontend.handshake_address}") as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=30_000)
        frontend.listen()
        engine.send_signal(signal.SIGSTOP)
        frontend.add("b")
        engine.send_signal(signal.SIGTERM)
        engine.send_signal(signal.SIGCONT)
        assert frontend.reply("b").finish_reason is FinishReason.ABORT
        assert engine.wait() == 0


def test_second_signal_ends_it_on_the_spot() -> None:
    arguments = ("--shutdown-timeout-s=60",)
    with (
        FrontendDouble() as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}", *arguments) as engine,
    ):
        frontend.handshake()
        frontend.add("a", max_tokens=30_000)
        frontend.listen()
        engine.send_signal(signal.SIGTERM)
        engine.wait_for("engine leaving")
        engine.send_signal(signal.SIGTERM)
        assert engine.wait() == 128 + signal.SIGTERM


def test_settings_come_from_the_environment_too() -> None:
    with FrontendDouble() as frontend:
        environment = {
            "MOCKENGINE_HANDSHAKE_ADDRESS": frontend.handshake_address,
            "MOCKENGINE_OUTPUT_TOKEN_CHUNK_SIZE": "5",
            "MOCKENGINE_LOG_REQUESTS": "false",
        }
        with EngineProcess(environment=environment) as engine:
            frontend.handshake()
            frontend.add("a", max_tokens=7)
            assert [len(output.new_token_ids) for output in frontend.reply("a").outputs] == [5, 2]
            assert not engine.logged("request started")


def test_log_of_requests_holds_neither_prompt_nor_tokens() -> None:
    with FrontendDouble() as frontend, EngineProcess(f"--handshake-address={frontend.handshake_address}") as engine:
        frontend.handshake()
        frontend.add("a", prompt=[31_337] * 50, max_tokens=3)
        tokens = frontend.reply("a").tokens
        finished = engine.wait_for("request finished")
        assert finished.keys() == {
            "timestamp",
            "level",
            "event",
            "request_id",
            "engine",
            "client",
            "prompt_tokens",
            "output_tokens",
            "finish_reason",
            "duration_ms",
        }
        assert (finished["prompt_tokens"], finished["output_tokens"], finished["finish_reason"]) == (50, 3, "length")
        assert "31337" not in engine.output
        assert not any(str(token) in engine.output for token in tokens if token > 9_999)
