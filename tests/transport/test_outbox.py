# SPDX-License-Identifier: Apache-2.0
"""A way out, towards a real PULL socket of libzmq and towards what is none."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from mockengine.testing.processes import free_port
from mockengine.transport.connection import AddressError
from mockengine.transport.outbox import Outbox
from mockengine.transport.zmtp import GREETING, READY
from mockengine.wire.batch import Burst

KB = 1_000
LIMIT = 100 * KB
DEADLINE_S = 10.0


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def outbox(address: str) -> Iterator[Outbox]:
    made = Outbox(address, LIMIT)
    yield made
    made.close()


@contextmanager
def pull(address: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as peer:
        peer.linger = 0
        for name, value in options.items():
            setattr(peer, name, value)
        peer.bind(address)
        yield peer


def drive(outbox: Outbox, until: Callable[[], bool]) -> None:
    """Let an outbox do what is possible, as the loop does, until something is so."""
    poller = zmq.Poller()
    outbox.watch(poller)
    end = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < end, "nothing came of it"
        patience_ms = 10 if outbox.deadline is None else max(0, round(1_000 * (outbox.deadline - time.monotonic())))
        ready = dict(poller.poll(min(10, patience_ms)))
        now = time.monotonic()
        if outbox.is_in(ready) or (outbox.deadline is not None and now >= outbox.deadline):
            outbox.advance(now)


def read(outbox: Outbox, peer: zmq.Socket[bytes], count: int) -> list[list[bytes]]:
    heard: list[list[bytes]] = []

    def look() -> bool:
        with suppress(zmq.Again):
            while len(heard) < count:
                heard.append(peer.recv_multipart(zmq.NOBLOCK))
        return len(heard) == count

    outbox.advance(time.monotonic())
    drive(outbox, look)
    return heard


def test_messages_arrive_as_they_were_said(outbox: Outbox, address: str) -> None:
    said = [[b"a"], [b"b" * 255], [b"c" * 256], [b"d" * 100 * KB], [b"e", b"", b"f" * 300], [b""]]
    with pull(address) as peer:
        assert read(outbox, peer, 0) == []
        outbox.send(said[:3])
        outbox.send([[memoryview(frame) for frame in message] for message in said[3:]])
        assert read(outbox, peer, len(said)) == said


@pytest.mark.parametrize("frame_bytes", [80, 255, 256, 3 * KB])
def test_messages_of_a_burst_arrive_one_by_one(outbox: Outbox, address: str, frame_bytes: int) -> None:
    frames = [bytes([number]) * frame_bytes for number in range(200)]
    burst = Burst(bytearray(b"".join(frames)), frame_bytes)
    with pull(address, rcvhwm=1, rcvbuf=4 * KB) as peer:
        outbox.send([[b"first"]])
        assert read(outbox, peer, 1) == [[b"first"]]
        # Nothing reads now, so the first bursts fill what the kernel holds, one of them is cut off, and the last wait.
        count = 0
        while outbox.buffered_bytes < 2 * len(burst.frames):
            outbox.send(burst)
            count += 1
        assert read(outbox, peer, count * len(frames)) == [[frame] for frame in frames] * count


def test_messages_wait_for_a_peer_that_is_not_there_yet(outbox: Outbox, address: str) -> None:
    outbox.advance(time.monotonic())
    outbox.send([[b"early"], [b"bird"]])
    assert (outbox.has_pending, outbox.has_left) == (True, False)
    with pull(address) as peer:
        assert read(outbox, peer, 2) == [[b"early"], [b"bird"]]
        drive(outbox, lambda: outbox.has_left)


@pytest.mark.parametrize("form", ["ipc://{folder}/socket", "ipc://@mockengine-{port}", "tcp://localhost:{port}"])
def test_other_forms_of_addresses(form: str, tmp_path: Path) -> None:
    address = form.format(folder=tmp_path, port=free_port())
    outbox = Outbox(address, LIMIT)
    with pull(address.replace("localhost", "127.0.0.1")) as peer:
        outbox.send([[b"hello"]])
        assert read(outbox, peer, 1) == [[b"hello"]]
    outbox.close()


def test_version_6_of_ip_is_spoken_where_the_address_says_so() -> None:
    address = f"tcp://[::1]:{free_port()}"
    outbox = Outbox(address, LIMIT)
    with pull(address, ipv6=1) as peer:
        outbox.send([[b"hello"]])
        assert read(outbox, peer, 1) == [[b"hello"]]
    outbox.close()


@pytest.mark.parametrize(
    "address",
    [
        *("", "127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://h:0", "tcp://h:65536", "udp://h:1", "ipc://"),
        *("tcp://a..b:80", f"tcp://{64 * 'h'}:80"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="is neither tcp://host:port nor ipc://path"):
        Outbox(address, LIMIT)


def test_it_blocks_at_the_limit_and_not_before(outbox: Outbox) -> None:
    sent = 0
    while not outbox.is_blocked:
        outbox.send([[b"x" * (KB - 9)]])
        sent += 1
    assert sent == LIMIT // KB
    assert outbox.buffered_bytes == LIMIT


def test_what_must_be_said_is_taken_all_the_same(outbox: Outbox) -> None:
    for _ in range(200):
        outbox.send([[b"x" * (KB - 9)]])
    assert outbox.buffered_bytes == 200 * KB


def test_it_takes_more_when_half_has_left_and_loses_nothing(outbox: Outbox, address: str) -> None:
    # More than the kernel holds for a peer that does not read.
    count = 1_000
    for number in range(count):
        outbox.send([[number.to_bytes(2, "big") + b"x" * 20 * KB]])
    with pull(address, rcvhwm=1, rcvbuf=64 * KB) as peer:
        outbox.advance(time.monotonic())
        heard: list[int] = []
        unblocked_at: list[int] = []

        def look() -> bool:
            if not outbox.is_blocked and not unblocked_at:
                unblocked_at.append(outbox.buffered_bytes)
            with suppress(zmq.Again):
                while True:
                    heard.append(int.from_bytes(peer.recv(zmq.NOBLOCK)[:2], "big"))
            return len(heard) == count

        drive(outbox, look)
    assert heard == list(range(count))
    assert unblocked_at[0] <= LIMIT // 2
    assert (outbox.has_pending, outbox.buffered_bytes) == (False, 0)


def test_a_message_that_was_cut_off_is_said_again_as_a_whole(outbox: Outbox, address: str) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_server((host, int(port))) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KB)
        outbox.advance(time.monotonic())
        connection, _ = server.accept()
        with connection:
            connection.sendall(GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL")
            outbox.send([[b"y" * 20_000 * KB]])
            drive(outbox, lambda: outbox.buffered_bytes < 20_000 * KB)
            outbox.send([[b"z"]])
    with pull(address) as peer:
        assert read(outbox, peer, 2) == [[b"y" * 20_000 * KB], [b"z"]]
    assert outbox.buffered_bytes == 0


def test_what_is_said_after_a_loss_reaches_the_next_peer(outbox: Outbox, address: str) -> None:
    with pull(address) as peer:
        outbox.send([[b"one"]])
        assert read(outbox, peer, 1) == [[b"one"]]
    drive(outbox, lambda: outbox.deadline is not None)
    outbox.send([[b"two"]])
    assert outbox.has_pending
    with pull(address) as peer:
        assert read(outbox, peer, 1) == [[b"two"]]


def test_heartbeats_are_answered(outbox: Outbox, address: str) -> None:
    with pull(address, heartbeat_ivl=50, heartbeat_timeout=300) as peer:
        events = peer.get_monitor_socket(zmq.Event.DISCONNECTED)
        outbox.send([[b"first"]])
        assert read(outbox, peer, 1) == [[b"first"]]
        end = time.monotonic() + 1.0
        drive(outbox, lambda: time.monotonic() > end)
        assert not events.poll(0)
        outbox.send([[b"last"]])
        assert read(outbox, peer, 1) == [[b"last"]]
        peer.disable_monitor()
        events.close(0)


def test_a_heartbeat_before_the_peer_is_ready_keeps_nobody_busy(outbox: Outbox, address: str) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    ping, ready = b"\x04\x07\x04PING\0\0", b"\x04\x06\x05READY"
    with socket.create_server((host, int(port))) as server:
        outbox.advance(time.monotonic())
        peer, _ = server.accept()
        with peer:
            peer.settimeout(DEADLINE_S)
            peer.sendall(GREETING + ping)
            heard = peer.makefile("rb")
            drive(outbox, lambda: _is_readable(peer))
            assert heard.read(len(GREETING)) == GREETING
            drive(outbox, lambda: _is_readable(peer))
            assert heard.read(len(READY)) == READY
            poller = zmq.Poller()
            outbox.watch(poller)
            assert poller.poll(0) == []
            peer.sendall(ready)
            drive(outbox, lambda: _is_readable(peer))
            assert heard.read(7) == b"\x04\x05\x04PONG"


def test_heartbeats_of_a_peer_that_does_not_read_are_not_all_answered(outbox: Outbox, address: str) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    ping, pong, ready = b"\x04\x07\x04PING\0\0", b"\x04\x05\x04PONG", b"\x04\x06\x05READY"
    pings, size = 1_000, 32 * KB * KB
    with socket.create_server((host, int(port))) as server:
        outbox.advance(time.monotonic())
        peer, _ = server.accept()
        with peer:
            peer.settimeout(DEADLINE_S)
            outbox.send([[bytes(size)]])
            peer.sendall(GREETING + ready)
            drive(outbox, lambda: outbox.buffered_bytes < size)
            assert outbox.has_pending
            peer.sendall(pings * ping)
            quiet_after = time.monotonic() + 1.0
            drive(outbox, lambda: time.monotonic() > quiet_after)
            heard = bytearray()

            def take() -> bool:
                while _is_readable(peer):
                    heard.extend(peer.recv(KB * KB))
                return heard.endswith(pong)

            drive(outbox, take)
            assert 0 < heard.count(pong) < pings / 2


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="http"),
        pytest.param(GREETING.replace(b"NULL", b"PLAIN\0"[:4]), id="another mechanism"),
        pytest.param(GREETING[:10] + b"\x01" + GREETING[11:], id="an old version"),
        pytest.param(GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"), id="a frame without end"),
        pytest.param(GREETING + b"\x04\x08\x05ERROR\x01n", id="a refusal"),
        pytest.param(GREETING + b"\x04\x00", id="a command without a name"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_peer_that_is_none_is_left_and_tried_again(outbox: Outbox, address: str, said: bytes) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    outbox.send([[b"for whom it may concern"]])
    with socket.create_server((host, int(port))) as server:
        outbox.advance(time.monotonic())
        connection, _ = server.accept()
        with connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            drive(outbox, lambda: _is_readable(server))
    assert outbox.has_pending
    with pull(address) as peer:
        assert read(outbox, peer, 1) == [[b"for whom it may concern"]]


def test_nothing_is_watched_when_it_is_closed(outbox: Outbox, address: str) -> None:
    poller = zmq.Poller()
    with pull(address) as peer:
        outbox.send([[b"hello"]])
        assert read(outbox, peer, 1) == [[b"hello"]]
        outbox.watch(poller)
        assert len(poller.sockets) == 1
        outbox.close()
    assert poller.sockets == []
    assert outbox.deadline is None


def _is_readable(server: socket.socket) -> bool:
    poller = zmq.Poller()
    poller.register(server, zmq.POLLIN)
    return bool(poller.poll(0))
