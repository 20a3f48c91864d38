# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between two processes: frontends that die at the wrong moment, peers that stall, floods."""

import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise
from socket import create_server

import msgpack
import pytest
import zmq

from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port
from mockengine.wire.handshake import Init, engine_identity, read_status
from mockengine.wire.messages import COORDINATOR_SUBSCRIBE, RequestType, write_message
from mockengine.wire.outputs import FinishReason
from tests.support.engine_thread import EngineThread

ENDLESS = 30_000


def _address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("dead_for_s", [0.0, 0.3])
def test_ready_that_a_dead_frontend_did_not_hear_is_not_said_to_the_next(dead_for_s: float) -> None:
    address = _address()
    with EngineThread(handshake_address=address):
        for _ in range(3):
            with FrontendDouble(handshake_address=address) as dying:
                dying.greet()
            threading.Event().wait(dead_for_s)
        with FrontendDouble(handshake_address=address) as frontend:
            frontend.handshake()
            frontend.add("r1")
            assert len(frontend.reply("r1").tokens) == 4


def _greet_from_nowhere(address: str) -> None:
    """Play a frontend that ends after READY, before its API servers have bound the sockets INIT names."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as handshake:
        handshake.linger = 0
        handshake.bind(address)
        identity, _ = handshake.recv_multipart()
        init = Init(inputs=(_address(),), outputs=(_address(),))
        handshake.send_multipart([identity, init.to_wire()])
        handshake.recv_multipart()


def test_frontend_that_ends_before_its_api_servers_are_up_is_followed_by_the_next() -> None:
    address = _address()
    with EngineThread(handshake_address=address) as engine:
        _greet_from_nowhere(address)
        engine.wait_for("engine ready")
        with FrontendDouble(handshake_address=address) as frontend:
            frontend.handshake()
            frontend.add("r1")
            assert len(frontend.reply("r1").tokens) == 4
        assert engine.logged("frontend lost")[0]["reason"] == "another frontend waits at the handshake address"


def test_inputs_that_cannot_be_reached_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mockengine.transport.presence._FIRST_REMINDER_S", 0.2)
    address = _address()
    with EngineThread(handshake_address=address) as engine:
        _greet_from_nowhere(address)
        assert "its input sockets cannot be reached (yet): tcp://" in engine.wait_for("frontend starting")["hint"]
        began = time.monotonic()
        engine.stop()
        assert time.monotonic() - began < 0.5


def test_failure_while_the_handshake_address_is_probed_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    address = _address()
    with EngineThread(handshake_address=address) as engine:
        _greet_from_nowhere(address)
        engine.wait_for("engine ready")

        def fail(*_args: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr("mockengine.engine.ranks.Ranks.next_deadline", fail)
        # Wakes the loop.
        engine.ask_to_stop()
        engine.wait_for("engine failed")
        engine.wait()
        assert engine.exit_code == 1


def test_inputs_that_are_never_reached_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_FIRST_REMINDER_S", 0.1), ("_REMINDER_S", 0.1), ("_STARTUP_LIMIT_S", 0.3)):
        monkeypatch.setattr(f"mockengine.transport.presence.{name}", seconds)
    address = _address()
    with EngineThread(handshake_address=address) as engine:
        _greet_from_nowhere(address)
        assert "were never reached within 0.3 s" in engine.wait_for("frontend lost")["reason"]


def test_frontend_replaced_on_the_same_addresses_before_its_loss_was_noticed_is_greeted() -> None:
    """As with sockets of fixed names: the inputs connect again, but the new frontend waits for HELLO."""
    address, outputs, inputs = _address(), _address(), _address()

    def play() -> None:
        with zmq.Context() as context:
            sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL)]
            for socket, at in zip(sockets, (address, inputs, outputs), strict=True):
                socket.linger = 0
                socket.bind(at)
            handshake, requests, _ = sockets
            # Some HELLO comes, in whatever time. Meanwhile the inputs are looked after, as a frontend does, so that a
            # connection that has ended does not keep its name from the next one.
            end = time.monotonic() + 10
            while not handshake.poll(20):
                assert time.monotonic() < end
                requests.poll(0)
            identity, hello = handshake.recv_multipart()
            assert msgpack.unpackb(hello)["status"] == "HELLO"
            handshake.send_multipart([identity, Init(inputs=(inputs,), outputs=(outputs,)).to_wire()])
            assert requests.poll(10_000)
            handshake.recv_multipart()
            handshake.close(0)
            assert requests.recv_multipart()[0] == engine_identity(0)
            for socket in sockets:
                socket.close(0)

    with EngineThread(handshake_address=address, rejoin_grace_s=30):
        for _ in range(3):
            play()


def test_coordinator_that_stalled_hears_on_when_it_reads_again() -> None:
    with zmq.Context() as context:
        pull = context.socket(zmq.PULL)
        pull.set_hwm(1)
        pull.setsockopt(zmq.RCVBUF, 4_096)
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        with FrontendDouble(coordinator=True) as frontend:
            frontend.init = Init(
                inputs=frontend.init.inputs,
                outputs=frontend.init.outputs,
                coordinator_input=frontend.init.coordinator_input,
                coordinator_output=f"tcp://127.0.0.1:{port}",
            )
            with EngineProcess(
                f"--handshake-address={frontend.handshake_address}", "--log-level=error", "--default-output-tokens=0"
            ):
                frontend.handshake()
                requests = 3_000
                for number in range(requests):
                    frontend.add(f"r{number}", max_tokens=2)
                    frontend.reply(f"r{number}")
                # Three counts and two wave messages for each request, now and for what comes later.
                for _ in range(5 * requests):
                    assert pull.poll(10_000), "the coordinator hears nothing any more"
                    pull.recv()
                frontend.add("later", max_tokens=1)
                assert pull.poll(10_000)
        pull.close(0)


def test_abort_and_notice_reach_a_frontend_that_reads_again_while_the_engine_leaves() -> None:
    with (
        FrontendDouble(reads_ahead=False) as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}") as engine,
    ):
        frontend.handshake()
        for number in range(20):
            frontend.add(f"r{number}", max_tokens=ENDLESS)
        _wait_until_idle(engine)
        engine.send_signal(signal.SIGTERM)
        engine.wait_for("engine leaving")
        for number in range(20):
            assert frontend.reply(f"r{number}", deadline_s=60.0).finish_reason is FinishReason.ABORT
        frontend.wait_for_death()
        assert engine.wait() == 0
        assert engine.wait_for("engine left")["reason"] == "asked to stop"


def test_frontend_that_never_reads_does_not_keep_the_engine_from_leaving() -> None:
    with (
        FrontendDouble(reads_ahead=False) as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}") as engine,
    ):
        frontend.handshake()
        for number in range(20):
            frontend.add(f"r{number}", max_tokens=ENDLESS)
        _wait_until_idle(engine)
        assert engine.stop() == 0
        assert "did not read the last of it" in engine.wait_for("engine left")["reason"]


def test_every_request_queued_at_the_signal_is_answered() -> None:
    with (
        FrontendDouble() as frontend,
        EngineProcess(
            f"--handshake-address={frontend.handshake_address}", "--leave-notice=none", "--log-level=warning"
        ) as engine,
    ):
        frontend.handshake()
        engine.send_signal(signal.SIGSTOP)
        for number in range(2_000):
            frontend.add(f"r{number}", max_tokens=ENDLESS)
        engine.send_signal(signal.SIGTERM)
        engine.send_signal(signal.SIGCONT)
        for number in range(2_000):
            assert frontend.reply(f"r{number}").finish_reason is FinishReason.ABORT
        assert engine.wait() == 0


@pytest.mark.parametrize("which", ["inputs", "outputs"])
@pytest.mark.parametrize("address", ["tcp://*:5", "nonsense", "ipc:///" + "x" * 200])
def test_init_with_an_address_that_cannot_be_one_costs_a_warning(address: str, which: str) -> None:
    good = _address()
    with FrontendDouble() as frontend, EngineThread(frontend) as engine:
        frontend.next_status()
        frontend._handshake.send_multipart(
            [
                engine_identity(0),
                Init(
                    inputs=(address if which == "inputs" else good,),
                    outputs=(address if which == "outputs" else good,),
                ).to_wire(),
            ]
        )
        assert engine.wait_for("message dropped")["request_type"] == "INIT"
        frontend._handshake.send_multipart([engine_identity(0), frontend.init.to_wire()])
        assert frontend.next_status()[1].status == "READY"


def test_what_listens_instead_of_a_client_is_named() -> None:
    with FrontendDouble() as frontend, create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        frontend.init = replace(frontend.init, outputs=(f"tcp://127.0.0.1:{port}",))
        with EngineThread(frontend) as engine:
            frontend.handshake()
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                refused = engine.wait_for("output refused")
    assert refused["client"] == 0
    assert refused["reason"] == f"tcp://127.0.0.1:{port}: it does not speak ZMTP: it began with b'HTTP/1.1 400 Bad'"


def test_many_ranks_and_clients_find_room() -> None:
    with FrontendDouble(ranks=40, clients=30) as frontend, EngineThread(frontend):
        frontend.handshake(deadline_s=30)
        frontend.add("r1", rank=39, client=29)
        assert len(frontend.reply("r1", client=29).tokens) == 4


def test_api_servers_that_are_left_hear_of_the_end_when_one_is_lost() -> None:
    with FrontendDouble(clients=2) as frontend, EngineThread(frontend, itl_ms=1) as engine:
        frontend.handshake()
        frontend.add("kept waiting", max_tokens=ENDLESS, client=1)
        frontend.listen(1)
        frontend._inputs[0].close()
        frontend._outputs[0].close()
        assert frontend.reply("kept waiting", client=1).finish_reason is FinishReason.ABORT
        frontend.wait_for_death(1)
        assert engine.wait_for("frontend lost")["requests_dropped"] == 1


def test_frontend_that_refuses_a_rank_hears_that_the_others_are_gone() -> None:
    address = _address()
    with EngineThread(handshake_address=address, engine_count=2), zmq.Context() as context:
        handshake, requests, outputs = (context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL))
        handshake.bind(address)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (requests, outputs)]
        inputs_at, outputs_at = (f"tcp://127.0.0.1:{port}" for port in ports)
        # HELLO of both ranks and READY of the first, in whatever order; the second is never answered.
        for _ in range(3):
            identity, said = handshake.recv_multipart()
            if identity == engine_identity(0) and read_status(said).status == "HELLO":
                handshake.send_multipart([identity, Init(inputs=(inputs_at,), outputs=(outputs_at,)).to_wire()])
        assert requests.poll(10_000)
        handshake.close(0)
        assert outputs.poll(10_000)
        assert outputs.recv_multipart() == [b"ENGINE_CORE_DEAD"]
        for socket in (requests, outputs):
            socket.close(0)


def test_what_is_not_due_in_a_handshake_costs_no_cpu() -> None:
    with (
        FrontendDouble(ranks=2, coordinator=True) as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}", "--engine-count=2") as engine,
    ):
        rank, _ = frontend.next_status()
        for _ in range(2):
            frontend._handshake.send_multipart([engine_identity(rank), frontend.init.to_wire()])
        socket = frontend._coordinator_out
        assert socket is not None
        assert socket.poll(10_000)
        assert socket.recv() == COORDINATOR_SUBSCRIBE
        for _ in range(2):
            socket.send(b"READY")
        before = _cpu_s(engine.process.pid)
        threading.Event().wait(1)
        assert _cpu_s(engine.process.pid) - before < 0.3


def test_flood_of_long_prompts_lets_a_stream_of_another_client_go_on() -> None:
    with (
        FrontendDouble(clients=2) as frontend,
        EngineProcess(
            f"--handshake-address={frontend.handshake_address}",
            "--max-model-len=200000",
            "--itl-ms=1",
            "--log-level=error",
        ),
    ):
        frontend.handshake()
        frontend.add("stream", max_tokens=150_000, client=1)
        frontend.listen(1)
        items = ["long", [1] * 128_000, None, {"max_tokens": 0, "stop": []}, None, 0.0] + [None] * 16
        flood = write_message(RequestType.ADD, items)
        began = time.monotonic()
        for _ in range(150):
            frontend.send(flood)
        # It arrived last, so it is answered last.
        frontend.call("is_sleeping")
        flood_s = time.monotonic() - began
        frontend.abort("stream", client=1)
        frontend.load(1)
        heard_at = [at for at in frontend.heard("stream").timestamps if began <= at <= began + flood_s]
        gaps_s = [later - earlier for earlier, later in pairwise([began, *heard_at, began + flood_s])]
        assert max(gaps_s) < flood_s / 4


def _wait_until_idle(engine: EngineProcess) -> None:
    """Wait until the engine does nothing for a while although it has work: nobody takes its output."""
    last = -1.0

    def is_idle() -> bool:
        nonlocal last
        before, last = last, _cpu_s(engine.process.pid)
        threading.Event().wait(0.2)
        return before == last == _cpu_s(engine.process.pid)

    engine.wait_until(is_idle, "end of its work", deadline_s=60)


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - a kernel interface, not a path of ours
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
