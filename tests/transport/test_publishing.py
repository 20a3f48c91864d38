# SPDX-License-Identifier: Apache-2.0
"""A whole engine that publishes what happens to its KV cache, and subscribers that listen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from mockengine.testing.double import FrontendDouble
from mockengine.testing.processes import free_port
from tests.support.engine_thread import EngineThread

DEADLINE_MS = 10_000


@contextmanager
def subscriber(port: int, topic: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """Listen from the first message on: the publisher is bound before any request comes."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        events = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        socket.subscribe(topic)
        socket.connect(f"tcp://127.0.0.1:{port}")
        assert events.poll(DEADLINE_MS)
        socket.disable_monitor()
        events.close(0)
        yield socket


def batch(socket: zmq.Socket[bytes]) -> tuple[bytes, int, list[dict[str, Any]], int]:
    assert socket.poll(DEADLINE_MS), "nothing was published"
    topic, sequence, payload = socket.recv_multipart()
    _, events, rank = msgpack.unpackb(payload)
    return topic, int.from_bytes(sequence, "big"), events, rank


def settings(port: int, **more: Any) -> dict[str, Any]:
    return {"load_model": "vllm", "kv_events_endpoint": f"tcp://*:{port}", **more}


def test_blocks_are_told_of_by_the_rank_that_has_them() -> None:
    port = free_port()
    with FrontendDouble(ranks=2) as frontend, EngineThread(frontend, **settings(port, kv_events_topic="kv")):
        frontend.handshake()
        config = frontend.ready_responses[1, 0]["kv_events_config"]
        assert (config["endpoint"], config["topic"]) == (f"tcp://*:{port + 1}", "kv")
        with subscriber(port + 1, b"kv") as heard:
            frontend.add("a", prompt=list(range(40)), max_tokens=2, rank=1)
            frontend.reply("a")
            topic, sequence, events, rank = batch(heard)
            assert (topic, sequence, rank) == (b"kv", 0, 1)
            assert [(event["type"], len(event["block_hashes"])) for event in events] == [("BlockStored", 2)]
            assert events[0]["token_ids"] == list(range(32))
            frontend.call("reset_prefix_cache", rank=1)
            frontend.add("b", prompt=list(range(20)), max_tokens=2, rank=1)
            frontend.reply("b")
            told = [event["type"] for event in batch(heard)[2]]
            assert told[0] == "AllBlocksCleared"


def test_the_next_frontend_has_an_empty_cache_and_subscribers_hear_of_it() -> None:
    port = free_port()
    with FrontendDouble() as first:
        address = first.handshake_address
        with EngineThread(first, **settings(port)) as engine:
            first.handshake()
            with subscriber(port) as heard:
                first.add("a", prompt=list(range(40)), max_tokens=2)
                first.reply("a")
                assert batch(heard)[1] == 0
                first.close()
                engine.wait_for("frontend lost")
                with FrontendDouble(handshake_address=address) as second:
                    second.handshake()
                    _, sequence, events, _ = batch(heard)
                    assert (sequence, [event["type"] for event in events]) == (1, ["AllBlocksCleared"])


def test_a_port_that_is_taken_keeps_the_engine_from_starting() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://*")
        with EngineThread(handshake_address="tcp://127.0.0.1:1", **settings(port)) as engine:
            engine.wait()
            told = str(engine.error)
            assert told.startswith(f"KV events: tcp://*:{port}: cannot bind: Address already in use (see to kv_events")


def test_a_profile_that_is_none_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("step_base_ms: 5\n")
    fitted: dict[str, Any] = {"load_model": "vllm", "timing": "fitted", "timing_profile": str(profile)}
    with EngineThread(handshake_address="tcp://127.0.0.1:1", **fitted) as engine:
        engine.wait()
        assert "step_ms_per_prefill_token: missing" in str(engine.error)
