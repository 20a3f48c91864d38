# SPDX-License-Identifier: Apache-2.0
"""The publisher of KV-cache events, towards real sockets of pyzmq and towards what is none."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from mockengine.testing.processes import ChildProcess, free_port
from mockengine.transport import kv_publisher
from mockengine.transport.kv_publisher import KvEventsError, KvEventsPlan, KvPublisher, is_bound, rank_endpoint
from mockengine.transport.sockets import Context, Socket
from mockengine.wire.codec import pack
from mockengine.wire.kv_events import (
    REPLAY_END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventForm,
    KVCacheEvent,
    KVEventBatch,
    KVEventMessage,
    event_message,
    read_event_batch,
    read_event_message,
    write_event_batch,
)
from tests.support.bare_engine import READY_RESPONSE
from tests.wire.forms import plain, recorded

DEADLINE_S = 10.0
DEADLINE_MS = 10_000
NOW = 1_000.5
CLEARED = AllBlocksCleared()
KB = 1_000
PAGE = Path(__file__).parents[2] / "docs" / "kv-events.md"


def sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def message(sequence: int, *events: KVCacheEvent, topic: str = "", rank: int = 0) -> list[bytes]:
    return event_message(topic, sequence, write_event_batch(KVEventBatch(NOW, events or (CLEARED,), rank)))


def large(sequence: int) -> BlockRemoved:
    """Make an event of 100 KB that names its batch."""
    return BlockRemoved(block_hashes=(sequence,), medium="x" * 100 * KB)


@pytest.fixture
def context() -> Iterator[Context]:
    """A context that ends, and with it the test, only if all sockets in it were closed."""
    made: Context = zmq.Context()
    yield made
    ending = threading.Thread(target=made.term, daemon=True)
    ending.start()
    ending.join(DEADLINE_S)
    assert not ending.is_alive(), "a socket is open, or does not give up what it has to send"


@contextmanager
def publishing(context: Context, plan: KvEventsPlan, rank: int = 0) -> Iterator[KvPublisher]:
    publisher = KvPublisher(context, plan, rank)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def peer(kind: int, address: str | None = None, *, topic: str = "", **options: int) -> Iterator[Socket]:
    """Make a socket of another process, as far as libzmq can tell."""
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        made.rcvtimeo = DEADLINE_MS
        for name, value in options.items():
            setattr(made, name, value)
        if kind == zmq.SUB:
            made.subscribe(topic)
        if address is not None:
            made.connect(address.replace("*", "127.0.0.1"))
        yield made


def plan(**changes: Any) -> KvEventsPlan:
    """Plan to publish and replay at any port of the loopback interface."""
    return KvEventsPlan(
        **{"endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0", "host": "127.0.0.1", **changes}
    )


def replay_address(publisher: KvPublisher) -> str:
    assert publisher.replay_endpoint is not None
    return publisher.replay_endpoint


def heard(subscriber: Socket) -> KVEventMessage:
    said = read_event_message(subscriber.recv_multipart())
    assert said is not None
    return said


def first_heard(publisher: KvPublisher, subscriber: Socket) -> int:
    """Publish until the subscription is known to be in place; return the number of the next batch."""
    end = time.monotonic() + DEADLINE_S
    while not subscriber.poll(5):
        assert time.monotonic() < end, "nothing is heard"
        publisher.publish([CLEARED], NOW)
    while heard(subscriber).sequence < publisher._next_sequence - 1:
        pass
    return publisher._next_sequence


def replayed(asker: Socket, start: int) -> list[list[bytes]]:
    """Ask for a replay; return its messages without their delimiters and without the end."""
    asker.send_multipart([b"", sequence_bytes(start)])
    return rest_of_replay(asker)


def rest_of_replay(asker: Socket) -> list[list[bytes]]:
    messages = []
    while tuple((frames := asker.recv_multipart())[1:]) != REPLAY_END:
        assert frames[0] == b""
        messages.append(frames[1:])
    return messages


def sequences(messages: Sequence[Sequence[bytes]]) -> list[int]:
    return [int.from_bytes(frames[1], "big") for frames in messages]


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.005)


def free_ports(count: int) -> int:
    """Return the first of several free ports in a row."""
    while True:
        first = free_port()
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first


# What is said.


def test_bytes_of_a_real_engine_are_published_and_replayed(context: Context) -> None:
    records = recorded("kv_events")
    with (
        publishing(context, plan(topic="kv")) as publisher,
        peer(zmq.SUB, publisher.endpoint, topic="kv") as subscriber,
        peer(zmq.DEALER, publisher.replay_endpoint) as asker,
    ):
        begin = first_heard(publisher, subscriber)
        for record in records:
            batch = read_event_batch(pack(record["said"]))
            publisher.publish(batch.events, batch.ts)
        live = [subscriber.recv_multipart() for _ in records]
        assert replayed(asker, begin) == live
    assert sequences(live) == [begin + record["sequence"] for record in records]
    for record, (topic, _, payload) in zip(records, live, strict=True):
        assert topic == record["topic"].encode() == b"kv"
        known = bytes.fromhex(record["payload"])
        # The recording cuts long payloads off.
        assert (payload if record["is_whole"] else payload[: len(known)]) == known
        assert plain(payload) == record["said"]


def test_numbers_begin_at_0_and_steps_without_events_have_none(context: Context) -> None:
    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        publisher.publish([], NOW)
        publisher.publish([CLEARED], NOW)
        publisher.publish((), NOW)
        publisher.publish([BlockRemoved(block_hashes=(7,)), CLEARED], NOW)
        assert replayed(asker, 0) == [message(0), message(1, BlockRemoved(block_hashes=(7,)), CLEARED)]


def test_older_lines_get_events_as_arrays(context: Context) -> None:
    stored = BlockStored(block_hashes=(1,), parent_block_hash=None, token_ids=(5, 6), block_size=2)
    with (
        publishing(context, plan(form=EventForm.ARRAY), rank=2) as publisher,
        peer(zmq.DEALER, publisher.replay_endpoint) as asker,
    ):
        publisher.publish([stored, CLEARED], NOW)
        ((_, _, payload),) = replayed(asker, 0)
    assert plain(payload) == [
        NOW,
        [["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, None], ["AllBlocksCleared"]],
        2,
    ]


def test_a_topic_is_heard_only_by_who_chose_it(context: Context) -> None:
    with (
        publishing(context, plan(topic="kv-events")) as publisher,
        peer(zmq.SUB, publisher.endpoint, topic="other") as stranger,
        peer(zmq.SUB, publisher.endpoint, topic="kv") as subscriber,
    ):
        first_heard(publisher, subscriber)
        assert not stranger.poll(0)


# Where.


def test_each_rank_has_ports_of_its_own(context: Context) -> None:
    port = free_ports(6)
    planned = plan(endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://127.0.0.1:{port + 3}")
    for rank in range(3):
        with (
            publishing(context, planned, rank) as publisher,
            peer(zmq.SUB, f"tcp://127.0.0.1:{port + rank}") as subscriber,
            peer(zmq.DEALER, f"tcp://127.0.0.1:{port + 3 + rank}") as asker,
        ):
            assert publisher.endpoint == f"tcp://*:{port + rank}"
            assert publisher.replay_endpoint == f"tcp://127.0.0.1:{port + 3 + rank}"
            begin = first_heard(publisher, subscriber)
            publisher.publish([CLEARED], NOW)
            assert subscriber.recv_multipart() == message(begin, rank=rank)
            assert replayed(asker, begin) == [message(begin, rank=rank)]


def test_any_free_port_is_named_in_the_ready_response(context: Context) -> None:
    planned = plan(replay_endpoint="tcp://*:0", topic="t", buffer_steps=7, hwm=8, max_queue_size=9)
    with (
        publishing(context, planned, rank=1) as publisher,
        publishing(context, planned, rank=2) as other,
    ):
        response = replace(READY_RESPONSE, kv_events_config=publisher.config())
        assert plain(response.to_wire())["kv_events_config"] == publisher.config()
        assert publisher.config() == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": 7,
            "hwm": 8,
            "max_queue_size": 9,
            "topic": "t",
        }
        addresses = {publisher.endpoint, publisher.replay_endpoint, other.endpoint, other.replay_endpoint}
        assert len(addresses) == 4
        assert all(re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", str(address)) for address in addresses)


def test_without_a_replay_endpoint_nothing_is_kept(context: Context) -> None:
    with publishing(context, plan(replay_endpoint=None)) as publisher:
        publisher.publish([CLEARED], NOW)
        assert publisher.replay_endpoint is None
        assert publisher.config()["replay_endpoint"] is None
        assert "kv-replays" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("comes_first", ["subscriber", "publisher"])
def test_publisher_connects_to_a_subscriber_that_binds(context: Context, comes_first: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with peer(zmq.SUB) as subscriber:
        if comes_first == "subscriber":
            subscriber.bind(address)
        with publishing(context, plan(endpoint=address)) as publisher:
            if comes_first == "publisher":
                publisher.publish([CLEARED], NOW)
                subscriber.bind(address)
            begin = first_heard(publisher, subscriber)
            publisher.publish([CLEARED], NOW)
            assert subscriber.recv_multipart() == message(begin)
            assert publisher.endpoint == address


@pytest.mark.parametrize("scheme", ["ipc", "inproc"])
def test_publisher_binds_addresses_of_the_same_machine(context: Context, tmp_path: Path, scheme: str) -> None:
    endpoint = f"ipc://{tmp_path}/kv" if scheme == "ipc" else "inproc://kv"
    with publishing(context, plan(endpoint=endpoint)) as publisher, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe("")
        subscriber.connect(endpoint)
        begin = first_heard(publisher, subscriber)
        publisher.publish([CLEARED], NOW)
        assert subscriber.recv_multipart() == message(begin)
        assert publisher.endpoint == endpoint


def test_publisher_binds_ipv6(context: Context) -> None:
    with (
        publishing(context, plan(host="::1")) as publisher,
        peer(zmq.SUB, publisher.endpoint, ipv6=1) as subscriber,
    ):
        assert publisher.endpoint.startswith("tcp://[::1]:")
        first_heard(publisher, subscriber)


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::]:5557", 3, "tcp://[::]:5560"),
        ("tcp://router:5557", 1, "tcp://router:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://kv", 0, "inproc://kv"),
        ("inproc://kv", 2, "inproc://kv_dp2"),
        ("ipc:///tmp/kv", 0, "ipc:///tmp/kv"),
    ],
)
def test_a_rank_has_its_address(endpoint: str, rank: int, expected: str) -> None:
    assert rank_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:1", True),
        ("tcp://[::]:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://router:1", False),
    ],
)
def test_some_addresses_are_bound_and_others_connected_to(endpoint: str, bound: bool) -> None:  # noqa: FBT001 - a table
    assert is_bound(endpoint) is bound


@pytest.mark.parametrize(
    ("changes", "rank", "text"),
    [
        ({"endpoint": "kv"}, 0, "kv: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"),
        ({"endpoint": "tcp://*"}, 1, "tcp://*: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"),
        ({"endpoint": "udp://*:5"}, 0, "udp://*:5: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"),
        ({"endpoint": "ipc:///tmp/kv"}, 1, "ipc:///tmp/kv: rank 1 would have the address of rank 0 (use tcp://)"),
        ({"endpoint": "tcp://*:65535"}, 1, "tcp://*:65535: the port of rank 1 would be 65536, the highest is 65535"),
        (
            {"endpoint": "tcp://router:0"},
            0,
            "tcp://router:0: there is no port 0 to connect to (use tcp://*:0 for any free port)",
        ),
        (
            {"replay_endpoint": "tcp://192.0.2.1:1"},
            0,
            "tcp://192.0.2.1:1: cannot bind: Cannot assign requested address",
        ),
        (
            {"endpoint": "ipc:///no/such/folder/kv"},
            0,
            "ipc:///no/such/folder/kv: cannot bind: No such file or directory",
        ),
        ({"replay_endpoint": "tcp://x"}, 0, "tcp://x: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"),
        ({"endpoint": "tcp://a b;c:5"}, 0, "tcp://a b;c:5: cannot connect: Invalid argument"),
    ],
)
def test_an_impossible_address_is_named_with_the_reason(
    context: Context, changes: dict[str, Any], rank: int, text: str
) -> None:
    with pytest.raises(KvEventsError) as caught:
        KvPublisher(context, plan(**changes), rank)
    assert str(caught.value) == f"KV events: {text}"


def test_a_port_that_is_taken_is_named_and_the_other_one_is_freed(context: Context) -> None:
    publish_port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(KvEventsError) as caught:
            KvPublisher(context, plan(endpoint=f"tcp://*:{publish_port}", replay_endpoint=taken), 0)
    assert str(caught.value) == f"KV events: {taken}: cannot bind: Address already in use"
    with socket.create_server(("127.0.0.1", publish_port)):
        pass


def test_a_machine_without_an_address_is_told_to_name_a_port(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "_ELSEWHERE", ())
    with pytest.raises(KvEventsError) as caught:
        KvPublisher(context, plan(host=None), 0)
    assert str(caught.value) == "KV events: tcp://*:0: this machine has no address for others (use tcp://*:PORT)"


# Replays.


@pytest.mark.parametrize(
    ("request_frames", "expected"),
    [
        ([b"", sequence_bytes(0)], [2, 3, 4]),
        ([b"", sequence_bytes(2)], [2, 3, 4]),
        ([b"", sequence_bytes(4)], [4]),
        ([b"", sequence_bytes(5)], []),
        ([b"", sequence_bytes(10**9)], []),
        ([b"", b"\xff" * 8], []),
        # What vLLM makes of what is no request, checked against 0.32.
        ([b"", b""], [2, 3, 4]),
        ([b"", b"\x03"], [3, 4]),
        ([b"", b"\x00" * 20 + b"\x03"], [3, 4]),
        ([b"", b"garbage!"], []),
        ([b"", b"x" * 5_000], []),
        ([b"no delimiter", sequence_bytes(4)], [4]),
    ],
)
def test_replay_begins_with_what_was_asked_for_or_the_oldest_that_is_kept(
    context: Context, request_frames: list[bytes], expected: list[int]
) -> None:
    with (
        publishing(context, plan(buffer_steps=3, topic="t")) as publisher,
        peer(zmq.DEALER, publisher.replay_endpoint) as asker,
    ):
        for _ in range(5):
            publisher.publish([CLEARED], NOW)
        asker.send_multipart(request_frames)
        assert rest_of_replay(asker) == [message(sequence, topic="t") for sequence in expected]


def test_replay_before_anything_was_published_is_empty(context: Context) -> None:
    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        assert replayed(asker, 0) == []


def test_a_req_socket_gets_the_first_message_of_a_replay(context: Context) -> None:
    with publishing(context, plan()) as publisher, peer(zmq.REQ, publisher.replay_endpoint) as asker:
        publisher.publish([CLEARED], NOW)
        publisher.publish([CLEARED], NOW)
        asker.send(sequence_bytes(1))
        assert asker.recv_multipart() == message(1)
        asker.send(sequence_bytes(2))
        assert tuple(asker.recv_multipart()) == REPLAY_END


@pytest.mark.parametrize("frames", [[b""], [sequence_bytes(0)], [b"", sequence_bytes(0), b""], [b""] * 200])
def test_what_is_no_request_is_dropped_with_a_reason(context: Context, frames: list[bytes]) -> None:
    reasons: list[str] = []
    publisher = KvPublisher(context, plan(), 0, reasons.append)
    with peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        publisher.publish([CLEARED], NOW)
        asker.send_multipart(frames)
        assert replayed(asker, 0) == [message(0)]
    publisher.close()
    assert reasons == [f"{len(frames)} frames where an empty one and a sequence are expected"]


def test_what_is_no_zmq_disturbs_nobody_else(context: Context) -> None:
    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        publisher.publish([CLEARED], NOW)
        for address in (publisher.endpoint, replay_address(publisher)):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), DEADLINE_S) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                assert replayed(asker, 0) == [message(0)]


def test_who_sends_too_large_a_request_is_disconnected(context: Context) -> None:
    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        publisher.publish([CLEARED], NOW)
        with peer(zmq.DEALER, reconnect_ivl=-1) as other:
            monitor = other.get_monitor_socket(zmq.Event.DISCONNECTED)
            other.connect(replay_address(publisher))
            other.send_multipart([b"", bytes(1_000 * KB)])
            assert monitor.poll(DEADLINE_MS), "it is still connected"
            other.disable_monitor()
            monitor.close(0)
        assert replayed(asker, 0) == [message(0)]


def test_a_long_replay_is_whole_however_late_it_is_read(context: Context) -> None:
    count = 4_000
    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        events = [BlockRemoved(block_hashes=(1,), medium="x" * 4 * KB)]
        for _ in range(count):
            publisher.publish(events, NOW)
        asker.rcvhwm = 1
        asker.send_multipart([b"", sequence_bytes(0)])
        assert asker.poll(DEADLINE_MS)
        with peer(zmq.DEALER, publisher.replay_endpoint) as other:
            # Once this has its answer, all of the first one has been sent as far as it is taken.
            assert sequences(replayed(other, count - 1)) == [count - 1]
        assert sequences(rest_of_replay(asker)) == list(range(count))


def test_who_asks_without_reading_gets_no_more_than_can_wait_for_it(context: Context) -> None:
    reasons: list[str] = []
    publisher = KvPublisher(context, plan(buffer_steps=40), 0, reasons.append)
    for sequence in range(40):
        publisher.publish([large(sequence)], NOW)
    with (
        peer(zmq.DEALER, publisher.replay_endpoint, rcvhwm=1, rcvbuf=10 * KB) as asker,
        peer(zmq.DEALER, publisher.replay_endpoint) as other,
    ):
        for _ in range(30):
            asker.send_multipart([b"", sequence_bytes(0)])
        wait_for(lambda: reasons, "refusal")
        assert reasons[0] == "whoever asked does not read the replays that it asked for"
        assert sequences(replayed(other, 39)) == [39]
        assert sequences(rest_of_replay(asker)) == list(range(40))
    publisher.close()


def test_who_leaves_in_the_middle_of_its_replay_disturbs_nobody_else(context: Context) -> None:
    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        for sequence in range(300):
            publisher.publish([large(sequence)], NOW)
        with peer(zmq.DEALER, publisher.replay_endpoint, rcvhwm=1) as other:
            other.send_multipart([b"", sequence_bytes(0)])
            assert other.poll(DEADLINE_MS)
        assert sequences(replayed(asker, 290)) == list(range(290, 300))


def test_replays_go_on_while_batches_are_published(context: Context) -> None:
    with publishing(context, plan(buffer_steps=500)) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        next_wanted = 0
        for burst in range(30):
            for _ in range(100):
                publisher.publish([CLEARED], NOW)
            asker.send_multipart([b"", sequence_bytes(next_wanted)])
            for _ in range(100):
                publisher.publish([CLEARED], NOW)
            got = sequences(rest_of_replay(asker))
            assert got == list(range(next_wanted, next_wanted + len(got)))
            next_wanted += len(got)
            # All that was published before it asked.
            assert next_wanted >= 200 * burst + 100


def test_the_subscriber_of_the_docs_joins_late_and_follows_without_gap_or_double(
    context: Context, tmp_path: Path
) -> None:
    ports = free_ports(2)
    planned = plan(endpoint=f"tcp://*:{ports}", replay_endpoint=f"tcp://*:{ports + 1}", topic="kv")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "router.py"
    script.write_text(
        example
        + f"for number, events in batches('tcp://127.0.0.1:{ports}', 'tcp://127.0.0.1:{ports + 1}', 'kv'):\n"
        + "    print(number, events[0]['block_hashes'][0], flush=True)\n"
    )

    def publish_until(router: ChildProcess, publisher: KvPublisher, lines: int) -> None:
        def goes_on() -> bool:
            for _ in range(10):
                publisher.publish([BlockRemoved(block_hashes=(10 + publisher._next_sequence,))], NOW)
            return len(router.lines) >= lines

        router.wait_until(goes_on, "batches of the router")

    with publishing(context, planned) as publisher, ChildProcess([sys.executable, str(script)]) as router:
        publish_until(router, publisher, 100)
        before = publisher._next_sequence
        router.wait_until(lambda: len(router.lines) == before, "last batch")
        publisher.close()
        # The next engine, of which nothing is known.
        with publishing(context, planned) as successor:
            publish_until(router, successor, before + 100)
        lines = router.lines
    assert lines[:before] == [f"{number} {10 + number}" for number in range(before)]
    assert lines[before:] == [f"{number} {10 + number}" for number in range(len(lines) - before)]


# Who does not read.


def test_a_subscriber_that_does_not_read_misses_batches_and_costs_bounded_memory(context: Context) -> None:
    with (
        publishing(context, plan(hwm=100, replay_endpoint=None)) as publisher,
        peer(zmq.SUB, rcvhwm=1, rcvbuf=100 * KB) as sleeper,
        peer(zmq.SUB) as reader,
    ):
        sleeper.connect(publisher.endpoint)
        reader.connect(publisher.endpoint)
        begin = max(first_heard(publisher, sleeper), first_heard(publisher, reader))
        before = resident_bytes()
        for sequence in range(begin, begin + 1_000):
            publisher.publish([large(sequence)], NOW)
            # Who reads misses nothing.
            assert heard(reader).sequence == sequence
        # 100 MB were published.
        assert resident_bytes() - before < 40_000 * KB
        got = [heard(sleeper).sequence]
        while sleeper.poll(100):
            got.append(heard(sleeper).sequence)
        assert len(got) < 500
        assert got == sorted(set(got))
        publisher.publish([CLEARED], NOW)
        assert heard(sleeper).sequence == begin + 1_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# The end.


def test_the_same_port_can_be_bound_again_at_once(context: Context) -> None:
    ports = free_ports(2)
    planned = plan(endpoint=f"tcp://*:{ports}", replay_endpoint=f"tcp://*:{ports + 1}")
    with (
        peer(zmq.SUB, f"tcp://127.0.0.1:{ports}", reconnect_ivl=1) as subscriber,
        peer(zmq.DEALER, f"tcp://127.0.0.1:{ports + 1}", reconnect_ivl=1) as asker,
    ):
        for _ in range(20):
            with publishing(context, planned) as publisher:
                publisher.publish([CLEARED], NOW)
        with publishing(context, planned) as publisher:
            publisher.publish([CLEARED], NOW)
            first_heard(publisher, subscriber)
            assert replayed(asker, 0)[0] == message(0)


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path would be opened for each

    before = descriptors()
    context: Context = zmq.Context()
    publisher = KvPublisher(context, plan(), 0)
    with (
        peer(zmq.SUB, publisher.endpoint, rcvhwm=1) as subscriber,
        peer(zmq.DEALER, publisher.replay_endpoint, rcvhwm=1) as asker,
    ):
        first_heard(publisher, subscriber)
        for sequence in range(300):
            publisher.publish([large(sequence)], NOW)
        asker.send_multipart([b"", sequence_bytes(0)])
        assert asker.poll(DEADLINE_MS)
        # In the middle of a replay, and with batches that nobody reads.
        publisher.close()
        publisher.close()
        context.term()
    assert "kv-replays" not in {thread.name for thread in threading.enumerate()}
    wait_for(lambda: descriptors() == before, "end of the descriptors")


def test_closing_does_not_wait_for_the_end_of_a_replay(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    # A replay as slow as if the machine were.
    monkeypatch.setattr(kv_publisher, "_BURST_S", 0)
    monkeypatch.setattr(kv_publisher, "_REST_S", 0.02)
    publisher = KvPublisher(context, plan(), 0)
    with peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        for _ in range(2_000):
            publisher.publish([CLEARED], NOW)
        asker.send_multipart([b"", sequence_bytes(0)])
        assert asker.poll(DEADLINE_MS)
        begin = time.monotonic()
        publisher.close()
        # The whole replay would take four times as long.
        assert time.monotonic() - begin < DEADLINE_S


def test_what_was_published_last_leaves_if_there_is_time() -> None:
    context: Context = zmq.Context()
    publisher = KvPublisher(context, plan(), 0)
    with peer(zmq.SUB, publisher.endpoint) as subscriber:
        begin = first_heard(publisher, subscriber)
        for _ in range(1_000):
            publisher.publish([CLEARED], NOW)
        publisher.close(DEADLINE_MS)
        context.term()
        assert [heard(subscriber).sequence for _ in range(1_000)] == list(range(begin, begin + 1_000))


def test_replays_end_with_the_context_although_nobody_closed_them(context: Context) -> None:
    publisher = KvPublisher(context, plan(), 0)
    replays = publisher._replays
    assert replays is not None
    ending = threading.Thread(target=context.term)
    ending.start()
    replays._thread.join(DEADLINE_S)
    assert not replays._thread.is_alive()
    publisher.close()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()


def test_nothing_wakes_up_while_nobody_asks(context: Context) -> None:
    def wakeups(thread: threading.Thread) -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return sum(int(count) for count in re.findall(r"ctxt_switches:\s+(\d+)", status))

    def is_asleep(thread: threading.Thread) -> bool:
        earlier = wakeups(thread)
        time.sleep(0.02)
        return wakeups(thread) == earlier

    with publishing(context, plan()) as publisher, peer(zmq.DEALER, publisher.replay_endpoint) as asker:
        assert replayed(asker, 0) == []
        assert publisher._replays is not None
        thread = publisher._replays._thread
        wait_for(lambda: is_asleep(thread), "sleep")
        before = wakeups(thread)
        for _ in range(100):
            publisher.publish([CLEARED], NOW)
        # A period to observe; what is asserted does not depend on how long it lasts.
        time.sleep(0.3)
        assert wakeups(thread) == before
        assert len(replayed(asker, 0)) == 100
