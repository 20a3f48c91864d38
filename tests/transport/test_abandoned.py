# SPDX-License-Identifier: Apache-2.0
"""An engine that was killed: its successor tells the frontend that waits for it, and nobody else."""

import json
from pathlib import Path
from typing import Any

import pytest
import zmq

from mockengine.service import StartError
from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port
from mockengine.wire.handshake import EngineStatus
from mockengine.wire.outputs import ENGINE_CORE_DEAD
from tests.support.engine_thread import EngineThread


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def _serve_and_kill(frontend: FrontendDouble, state_file: Path, *flags: str) -> None:
    """Let an engine join, serve and die without a word."""
    arguments = (f"--handshake-address={frontend.handshake_address}", f"--state-file={state_file}", *flags)
    with EngineProcess(*arguments) as engine:
        frontend.handshake()
        frontend.add("before", max_tokens=1)
        frontend.reply("before")
        engine.kill()
    assert state_file.exists()


def _remember(state_file: Path, outputs: list[str]) -> None:
    """Write what an engine wrote that served these addresses."""
    served = {"ranks": [0], "handshake_address": "tcp://127.0.0.1:1", "outputs": outputs}
    state_file.write_text(json.dumps(served))


def test_the_abandoned_frontend_is_told_and_the_next_one_joined(state_file: Path) -> None:
    with FrontendDouble(clients=2) as frontend:
        address = frontend.handshake_address
        _serve_and_kill(frontend, state_file)
        with EngineThread(handshake_address=address, state_file=str(state_file)) as engine:
            for client in range(2):
                frontend.wait_for_death(client)
            told = engine.wait_for("abandoned frontend told")
            assert told["outputs"] == list(frontend.init.outputs)
            engine.wait_for("engine joining")
            assert not state_file.exists()
            with FrontendDouble(handshake_address=address) as successor:
                successor.handshake()
                successor.add("after", max_tokens=2)
                assert len(successor.reply("after").tokens) == 2


def test_with_the_next_frontend_waiting_nobody_is_told(state_file: Path) -> None:
    with FrontendDouble() as frontend:
        _serve_and_kill(frontend, state_file)
        with (
            FrontendDouble(handshake_address=frontend.handshake_address) as successor,
            EngineThread(successor, state_file=str(state_file)) as engine,
        ):
            successor.handshake()
            assert frontend.hears_nothing()
            assert not engine.logged("abandoned frontend told")


def test_a_frontend_that_is_gone_keeps_nobody_from_the_next_one(state_file: Path) -> None:
    with FrontendDouble() as frontend:
        _serve_and_kill(frontend, state_file)
        before = state_file.read_text()
    with FrontendDouble() as successor, EngineThread(successor, state_file=str(state_file)) as engine:
        successor.handshake()
        engine.wait_for("engine ready")
        assert not engine.logged("abandoned frontend told")
        assert state_file.read_text() != before


def test_a_frontend_that_cannot_be_reached_for_a_while_is_told_later(state_file: Path) -> None:
    address, context = f"tcp://127.0.0.1:{free_port()}", zmq.Context()
    _remember(state_file, outputs=[address])
    with EngineThread(handshake_address="tcp://127.0.0.1:1", state_file=str(state_file)) as engine:
        engine.wait_for("engine joining")
        with context, context.socket(zmq.PULL) as output:
            output.linger = 0
            output.bind(address)
            assert output.poll(10_000)
            assert output.recv_multipart() == [ENGINE_CORE_DEAD]
            engine.wait_for("abandoned frontend told")
            assert not state_file.exists()


def test_those_api_servers_that_are_left_are_told(state_file: Path) -> None:
    there, gone, context = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}", zmq.Context()
    _remember(state_file, outputs=[gone, there])
    with context, context.socket(zmq.PULL) as output:
        output.linger = 0
        output.bind(there)
        with EngineThread(handshake_address="tcp://127.0.0.1:1", state_file=str(state_file)) as engine:
            assert output.poll(10_000)
            assert output.recv_multipart() == [ENGINE_CORE_DEAD]
            engine.wait_for("abandoned frontend told")


def test_an_engine_that_is_stopped_while_it_looks_leaves_the_task_to_the_next(state_file: Path) -> None:
    _remember(state_file, outputs=["tcp://192.0.2.1:2"])
    before = state_file.read_text()
    with EngineThread(handshake_address="tcp://127.0.0.1:1", state_file=str(state_file)) as engine:
        engine.wait_for("engine joining")
        engine.stop()
        assert engine.exit_code == 0
    assert state_file.read_text() == before


@pytest.mark.parametrize(
    "other", [{"start_rank": 1, "data_parallel_size": 2}, {"leave_notice": "none"}], ids=["other ranks", "no notice"]
)
def test_it_is_not_told_by_an_engine_that(other: dict[str, Any], state_file: Path) -> None:
    with FrontendDouble() as frontend:
        _serve_and_kill(frontend, state_file)
        address = frontend.handshake_address
        with EngineThread(handshake_address=address, state_file=str(state_file), **other) as engine:
            engine.wait_for("engine joining")
            assert frontend.hears_nothing()


def test_addresses_that_are_none_do_no_harm(state_file: Path) -> None:
    _remember(state_file, outputs=["nonsense", "tcp://[::1", "tcp://h\0:1", ""])
    with EngineThread(handshake_address="tcp://127.0.0.1:1", state_file=str(state_file)) as engine:
        engine.wait_for("engine joining")


def test_the_frontend_is_remembered_before_it_can_count_on_the_engine(
    state_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_at_ready: list[bool] = []
    wire = EngineStatus.to_wire

    def note(status: EngineStatus) -> bytes:
        if status.status == "READY":
            kept_at_ready.append(state_file.exists())
        return wire(status)

    monkeypatch.setattr(EngineStatus, "to_wire", note)
    with FrontendDouble(ranks=2) as frontend, EngineThread(frontend, state_file=str(state_file)):
        frontend.handshake()
    assert kept_at_ready == [True, True]


def test_an_engine_that_leaves_with_a_word_leaves_no_state(state_file: Path) -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, state_file=str(state_file)) as engine:
        frontend.handshake()
        frontend.add("a", max_tokens=1)
        frontend.reply("a")
        kept = json.loads(state_file.read_text())
        assert kept["ranks"] == [0]
        assert kept["outputs"] == list(frontend.init.outputs)
        engine.ask_to_stop()
        frontend.wait_for_death()
        engine.wait()
        assert not state_file.exists()


def test_a_frontend_that_goes_away_leaves_no_state(state_file: Path) -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, state_file=str(state_file)) as engine:
        frontend.handshake()
        engine.wait_for("engine ready")
        frontend.close()
        engine.wait_for("frontend lost")
        engine.wait_until_logged("engine joining", times=2)
        assert not state_file.exists()


def test_state_that_cannot_be_kept_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    with FrontendDouble() as frontend, EngineThread(frontend, state_file=str(folder / "state")) as engine:
        engine.wait_for("engine joining")
        (folder / "state.lock").unlink()
        (folder / "state.requests").unlink()
        folder.rmdir()
        frontend.handshake()
        frontend.add("a", max_tokens=1)
        frontend.reply("a")
        assert engine.wait_for("state not kept")["reason"] == "No such file or directory"


def test_an_engine_does_not_start_without_the_file_that_it_is_told_to_keep(tmp_path: Path) -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, state_file=str(tmp_path / "no" / "state")) as engine:
        engine.wait()
        assert isinstance(engine.error, StartError)
        assert "cannot be used: No such file or directory" in str(engine.error)


def test_two_engines_cannot_keep_the_same_file(state_file: Path) -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, state_file=str(state_file)) as engine:
        frontend.handshake()
        engine.wait_for("engine ready")
        with EngineThread(handshake_address="tcp://127.0.0.1:1", state_file=str(state_file)) as second:
            second.wait()
            assert "is used by another engine that runs" in str(second.error)
        assert frontend.hears_nothing()
        frontend.add("a", max_tokens=1)
        frontend.reply("a")
