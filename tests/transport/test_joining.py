# SPDX-License-Identifier: Apache-2.0
"""The handshake: order, coordinator, either side first, disagreement, patience."""

import time

import pytest
import zmq

from mockengine.testing.double import FrontendDouble
from mockengine.wire.handshake import EngineStatus
from tests.support.engine_thread import EngineThread


def _free_address() -> str:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def test_engine_may_come_first() -> None:
    address = _free_address()
    with EngineThread(handshake_address=address) as engine:
        waiting = engine.wait_for("engine joining")
        assert (waiting["address"], waiting["ranks"]) == (address, [0])
        assert waiting["waiting_for"] == "a frontend to listen"
        with FrontendDouble(handshake_address=address) as frontend:
            frontend.handshake()
            frontend.add("r1")
            assert len(frontend.reply("r1").tokens) == 4


def test_hello_and_ready_say_what_frontends_want_to_hear() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, parallel_config_hash="ab" * 32, num_gpu_blocks=9_999):
        frontend.handshake()
        ready = {"num_gpu_blocks": 9_999, "parallel_config_hash": "ab" * 32, "dp_stats_address": None}
        assert frontend.statuses == [(0, EngineStatus("HELLO")), (0, EngineStatus("READY", extra=ready))]


def test_ready_response_carries_the_settings() -> None:
    with FrontendDouble(ranks=2) as frontend, EngineThread(frontend, max_model_len=4_096, dtype="float16"):
        frontend.handshake()
        response = frontend.ready_responses[1, 0]
        wanted = {"max_model_len": 4_096, "dtype": "float16", "data_parallel_size": 2, "data_parallel_rank": 1}
        assert wanted.items() <= response.items()
        assert len(response) == 28
        unset = {"world_size": 1, "supports_lora": False, "max_loras": 0, "weight_transfer_backend": None}
        assert unset.items() <= response.items()


def test_ready_response_tells_of_workers_and_adapters() -> None:
    settings = {"world_size": 4, "max_loras": 3, "weight_transfer_backend": "nccl"}
    with FrontendDouble() as frontend, EngineThread(frontend, **settings):
        frontend.handshake()
        wanted = {**settings, "tensor_parallel_size": 4, "supports_lora": True}
        assert wanted.items() <= frontend.ready_responses[0, 0].items()


def test_ranks_wait_for_the_coordinator_only_after_all_have_subscribed() -> None:
    with FrontendDouble(ranks=3, coordinator=True) as frontend, EngineThread(frontend) as engine:
        frontend.greet()
        # Every rank has to subscribe before the coordinator lets any of them go on.
        frontend.subscribe()
        frontend.take_ready_responses()
        assert sorted(frontend.next_status()[0] for _ in range(3)) == [0, 1, 2]
        assert {status.status for _, status in frontend.statuses[3:]} == {"READY"}
        assert engine.wait_for("engine ready")["coordinator"] is True
        response = frontend.ready_responses[0, 0]
        assert response["coordinator_input_address"] == frontend.init.coordinator_input


def test_no_rank_is_ready_before_the_coordinator_says_so() -> None:
    with FrontendDouble(ranks=2, coordinator=True) as frontend, EngineThread(frontend):
        frontend.greet()
        frontend.take_ready_responses()
        with pytest.raises(TimeoutError):
            frontend.next_status(deadline_s=0.2)
        frontend.subscribe()
        assert frontend.next_status()[1].status == "READY"


def test_wave_of_the_coordinator_reaches_the_ranks() -> None:
    with FrontendDouble(ranks=2, coordinator=True) as frontend, EngineThread(frontend):
        frontend.handshake()
        frontend.broadcast([b"READY"])
        frontend.add("r1", rank=1, max_tokens=2)
        frontend.reply("r1")
        heard = [type(frontend.listen_as_coordinator()).__name__ for _ in range(5)]
        assert heard == ["StartWave", "StepOutputs", "StepOutputs", "StepOutputs", "WaveComplete"]


def test_engine_is_not_kept_from_leaving_by_a_handshake() -> None:
    with FrontendDouble(ranks=2) as frontend:
        for stage in ("nobody listens", "INIT is due", "other ranks are due"):
            address = _free_address() if stage == "nobody listens" else frontend.handshake_address
            engine = EngineThread(handshake_address=address, engine_count=1, data_parallel_size=2)
            with engine:
                engine.wait_for("engine joining")
                if stage == "other ranks are due":
                    rank, _ = frontend.next_status()
                    assert rank == 0
                began = time.monotonic()
                engine.stop()
                assert time.monotonic() - began < 0.5
            assert engine.exit_code == 0


# Starting.


def test_engine_that_starts_slowly_is_ready_later() -> None:
    with FrontendDouble(ranks=2, coordinator=True) as frontend, EngineThread(frontend, startup_ms=300) as engine:
        frontend.greet()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            frontend.take_ready_responses(deadline_s=0.2)
        frontend.take_ready_responses()
        assert time.monotonic() - began > 0.29
        frontend.subscribe()
        # Ranks start beside one another.
        assert time.monotonic() - began < 0.55
        assert engine.wait_for("engine ready")["join_s"] > 0.29


def test_engine_that_starts_slowly_can_be_asked_to_leave() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, startup_ms=60_000) as engine:
        frontend.greet()
        began = time.monotonic()
        engine.stop()
        assert time.monotonic() - began < 0.5
        assert engine.exit_code == 0


def test_frontend_that_goes_while_the_engine_starts_is_followed_by_the_next() -> None:
    address = _free_address()
    with EngineThread(handshake_address=address, startup_ms=300) as engine:
        for _ in range(2):
            with FrontendDouble(handshake_address=address) as dying:
                dying.greet()
        with FrontendDouble(handshake_address=address) as frontend:
            frontend.handshake()
            frontend.add("r1")
            assert len(frontend.reply("r1").tokens) == 4
        assert len(engine.logged("join interrupted")) == 2


def test_starting_is_no_waiting_for_a_frontend() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, startup_ms=600, join_timeout_s=0.3) as engine:
        frontend.handshake()
        assert engine.wait_for("engine ready")["join_s"] > 0.59


def test_patience_can_be_bounded() -> None:
    with EngineThread(handshake_address=_free_address(), join_timeout_s=0.2) as engine:
        engine.wait()
    assert engine.exit_code == 1
    (left,) = engine.logged("engine left")
    assert "no frontend joined within 0.2 s" in left["reason"]


def test_frontend_that_ends_during_the_handshake_is_followed_by_the_next() -> None:
    address = _free_address()
    with EngineThread(handshake_address=address) as engine:
        for _ in range(3):
            with FrontendDouble(handshake_address=address) as dying:
                assert dying.next_status() == (0, EngineStatus("HELLO"))
        with FrontendDouble(handshake_address=address) as frontend:
            frontend.handshake()
            frontend.add("r1")
            assert len(frontend.reply("r1").tokens) == 4
        assert len(engine.logged("join interrupted")) == 3


def test_frontend_that_closes_after_some_ranks_is_explained() -> None:
    with EngineThread(handshake_address=_free_address(), engine_count=2) as engine:
        address = engine.wait_for("engine joining")["address"]
        frontend = FrontendDouble(
            ranks=1, handshake_address=address, parallel_config={"data_parallel_size": 1}, coordinator=True
        )
        with frontend:
            frontend.greet()
            # A subscription proves that INIT has arrived: what closing finds unsaid is never said.
            coordinator = frontend._coordinator_out
            assert coordinator is not None
            assert coordinator.poll(10_000)
        interrupted = engine.wait_for("join interrupted")
        assert interrupted["hint"] == "the frontend counts on 1 ranks, this engine on 2"


def test_unreadable_init_costs_nothing_but_a_warning() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend) as engine:
        frontend.next_status()
        frontend._handshake.send_multipart([b"\0\0", b"\xc1"])
        dropped = engine.wait_for("message dropped")
        assert (dropped["request_type"], dropped["frame_bytes"], dropped["engine"]) == ("INIT", [1], 0)
        frontend._handshake.send_multipart([b"\0\0", frontend.init.to_wire()])
        assert frontend.next_status()[1].status == "READY"


def test_stranger_at_the_address_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.STREAM) as stranger:
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        with EngineThread(handshake_address=f"tcp://127.0.0.1:{port}", join_timeout_s=0.5) as engine:
            identity = stranger.recv_multipart()[0]
            stranger.send_multipart([identity, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
            engine.wait()
        assert engine.exit_code == 1


def test_handshake_address_that_zmq_refuses_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = zmq.Socket.connect

    def refuse(socket: zmq.Socket[bytes], address: str) -> object:
        if address.startswith("tcp:"):
            raise zmq.ZMQError(22)
        return connect(socket, address)

    monkeypatch.setattr(zmq.Socket, "connect", refuse)
    with EngineThread(handshake_address="tcp://127.0.0.1:1") as engine:
        engine.wait_for("engine failed")
        engine.wait()
    assert engine.exit_code == 1
