# SPDX-License-Identifier: Apache-2.0
"""Leaving, losing the frontend, joining the next one."""

import time
from pathlib import Path

import pytest

from mockengine.testing.double import FrontendDouble
from mockengine.wire.messages import RequestType
from mockengine.wire.outputs import FinishReason, UtilityReply
from mockengine.wire.utility import UtilityCall
from tests.support.engine_thread import EngineThread

ENDLESS = 30_000


def test_leaving_aborts_what_runs_and_says_that_the_engine_is_gone() -> None:
    with FrontendDouble(clients=2) as frontend, EngineThread(frontend, itl_ms=1) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=ENDLESS)
        frontend.add("b", max_tokens=ENDLESS, client=1)
        frontend.listen(0)
        frontend.listen(1)
        engine.ask_to_stop()
        for client, name in ((0, "a"), (1, "b")):
            assert frontend.reply(name, client=client).finish_reason is FinishReason.ABORT
            frontend.wait_for_death(client)
        engine.wait()
        assert engine.exit_code == 0
        (leaving,) = engine.logged("engine leaving")
        assert (leaving["signal"], leaving["drain_s"]) == ("SIGTERM", 0.0)


def test_leaving_can_be_silent() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, leave_notice="none") as engine:
        frontend.handshake()
        engine.stop()
        assert engine.exit_code == 0
        assert frontend.hears_nothing()


def test_leaving_waits_for_running_requests_when_told_to() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, shutdown_timeout_s=20) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=2_000)
        frontend.listen()
        engine.ask_to_stop()
        reply = frontend.reply("a")
        assert (len(reply.tokens), reply.finish_reason) == (2_000, FinishReason.LENGTH)
        engine.wait()
        assert engine.exit_code == 0


def test_leaving_refuses_new_requests_while_draining() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, shutdown_timeout_s=20, itl_ms=1) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=ENDLESS)
        frontend.listen()
        engine.ask_to_stop()
        engine.wait_for("engine leaving")
        frontend.add("b")
        assert frontend.reply("b").finish_reason is FinishReason.ABORT
        frontend.abort("a")
        engine.wait()


def test_leaving_does_not_wait_for_requests_that_a_pause_keeps() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, shutdown_timeout_s=60, itl_ms=1) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=ENDLESS)
        frontend.listen()
        frontend.call("pause_generation", "keep", False)  # noqa: FBT003 - as on the wire
        engine.stop()
        assert frontend.reply("a").finish_reason is FinishReason.ABORT
        assert engine.exit_code == 0


def test_leaving_waits_for_a_call_that_is_under_way_when_told_to() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, shutdown_timeout_s=60, sleep_ms=300) as engine:
        frontend.handshake()
        sleep = UtilityCall(0, 7, "sleep", (1, "abort"))
        frontend.send([bytes([RequestType.UTILITY]), sleep.to_wire()])
        # Answered at once, so the call before it has arrived.
        frontend.call("handle_fault_tolerance", {"instruction": "retry"})
        engine.ask_to_stop()
        answer = frontend.listen()
        assert isinstance(answer, UtilityReply)
        assert (answer.call_id, answer.failure) == (7, None)
        engine.wait()


def test_draining_ends_when_its_time_is_up() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, shutdown_timeout_s=0.2, itl_ms=1) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=ENDLESS)
        frontend.listen()
        engine.ask_to_stop()
        assert frontend.reply("a").finish_reason is FinishReason.ABORT


def test_engine_joins_the_next_frontend_when_one_is_gone() -> None:
    with FrontendDouble() as first:
        address = first.handshake_address
        engine = EngineThread(first, itl_ms=1)
        with engine:
            first.handshake()
            first.add("a", max_tokens=ENDLESS)
            first.listen()
            first.close()
            lost = engine.wait_for("frontend lost")
            assert lost["requests_dropped"] == 1
            with FrontendDouble(handshake_address=address) as second:
                second.handshake()
                second.add("a", max_tokens=3)
                reply = second.reply("a")
                assert len(reply.tokens) == 3
        assert engine.exit_code == 0


def test_engine_ends_when_its_frontend_is_gone_and_it_is_not_to_rejoin() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, rejoin=False) as engine:
        frontend.handshake()
        frontend.close()
        engine.wait()
        assert engine.exit_code == 1
        assert engine.logged("engine left")[0]["reason"] == "the frontend is gone and rejoin is off"


def test_engine_that_fails_says_so_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("a defect")

    with FrontendDouble() as frontend, EngineThread(frontend, leave_notice="none") as engine:
        frontend.handshake()
        engine.wait_for("engine ready")
        monkeypatch.setattr("mockengine.engine.ranks.Ranks.step", fail)
        frontend.add("a")
        frontend.wait_for_death()
        engine.wait()
        assert engine.exit_code == 1
        assert engine.logged("engine failed")[0]["reason"] == "RuntimeError: a defect"


def test_frontend_that_does_not_read_holds_up_only_its_own_requests() -> None:
    with FrontendDouble(clients=2, reads_ahead=False) as frontend, EngineThread(frontend) as engine:
        frontend.handshake()
        # Nobody listens for client 0, whose stream is longer than what the sockets hold.
        frontend.add("stuck", max_tokens=8_000, client=0)
        frontend.add("free", max_tokens=8_000, client=1)
        assert len(frontend.reply("free", client=1, deadline_s=60).tokens) == 8_000
        assert [entry["request_id"] for entry in engine.logged("request finished")] == ["free"]
        # Nothing is lost when it reads again.
        assert len(frontend.reply("stuck", client=0, deadline_s=60).tokens) == 8_000


def test_frontend_that_waits_for_more_ranks_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mockengine.transport.presence._FIRST_REMINDER_S", 0.2)
    with FrontendDouble(ranks=1) as frontend, EngineThread(frontend) as engine:
        frontend.greet()
        # It has heard READY of the only rank there is, and keeps its handshake open for another.
        assert frontend.next_status()[1].status == "READY"
        assert "waits for more ranks" in engine.wait_for("frontend starting")["hint"]
        frontend._handshake.close()
        frontend.take_ready_responses()
        frontend.add("a")
        assert len(frontend.reply("a").tokens) == 4


def test_idle_engine_does_not_wake_up() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend):
        frontend.handshake()
        frontend.add("a")
        frontend.load()
        # The load is told once more when the engine falls idle.
        frontend.listen()
        before = time.process_time()
        assert frontend.hears_nothing(for_s=1.0)
        assert time.process_time() - before < 0.1


def test_paused_engine_does_not_wake_up() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, itl_ms=1) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=ENDLESS)
        frontend.listen()
        frontend.call("pause_generation", "keep", False)  # noqa: FBT003 - as on the wire
        turned_at = engine.journal.turned_at
        assert frontend.hears_nothing(for_s=1.0)
        # It may have turned once more after the call, and no more than that.
        assert engine.journal.turned_at - turned_at < 0.1


def test_hundred_frontends_in_a_row() -> None:
    with FrontendDouble() as first:
        address = first.handshake_address
        descriptors: list[int] = []
        with EngineThread(first, rejoin_grace_s=0.01, itl_ms=1) as engine:
            for number in range(100):
                frontend = first if number == 0 else FrontendDouble(handshake_address=address)
                with frontend:
                    frontend.handshake()
                    frontend.add("a", max_tokens=2)
                    frontend.add("unfinished", max_tokens=ENDLESS)
                    assert len(frontend.reply("a").tokens) == 2
                # One look after the first ten, one after all.
                if number in (9, 99):
                    engine.wait_until_logged("frontend lost", times=number + 1)
                    descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
            engine.wait_until_logged("engine ready", times=100)
        assert not engine.logged("engine failed")
        assert engine.exit_code == 0
        # The handshake of the next join may be open at one look and not yet at the other.
        assert abs(descriptors[1] - descriptors[0]) <= 8
