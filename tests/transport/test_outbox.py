# SPDX-License-Identifier: Apache-2.0
"""What may wait for a peer that does not read."""

from collections.abc import Iterator

import pytest
import zmq

from mockengine.transport.outbox import Outbox
from mockengine.transport.sockets import OUTPUT_HIGH_WATER_MARK, make_context, make_socket

KB = 1_000
LIMIT = 100 * KB


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    """An outbox whose peer is not there: libzmq takes what its high-water mark allows."""
    context = make_context()
    socket = make_socket(context, zmq.PUSH, "inproc://peer", high_water_mark=OUTPUT_HIGH_WATER_MARK)
    socket.connect("inproc://peer")
    yield Outbox(socket, LIMIT)
    socket.close(0)
    context.term()


def test_nothing_waits_as_long_as_libzmq_takes_it(outbox: Outbox) -> None:
    for _ in range(OUTPUT_HIGH_WATER_MARK):
        outbox.send([b"x" * KB])
    assert (outbox.has_pending, outbox.is_blocked, outbox.buffered_bytes) == (False, False, 0)


def test_it_blocks_at_the_limit_and_not_before(outbox: Outbox) -> None:
    sent = 0
    while not outbox.is_blocked:
        outbox.send([b"x" * KB])
        sent += 1
    assert sent == LIMIT // KB
    assert outbox.buffered_bytes == LIMIT


def test_what_must_be_said_is_taken_all_the_same(outbox: Outbox) -> None:
    for _ in range(200):
        outbox.send([b"x" * KB])
    assert outbox.buffered_bytes == 200 * KB


def test_it_takes_more_when_half_has_left_and_loses_nothing(outbox: Outbox) -> None:
    for number in range(200):
        outbox.send([number.to_bytes(2, "big") + b"x" * KB])
    with outbox.socket.context.socket(zmq.PULL) as peer:
        peer.linger = 0
        peer.set_hwm(1)
        peer.bind("inproc://peer")
        heard: list[int] = []
        unblocked_at: int | None = None
        while len(heard) < 200:
            outbox.flush()
            if unblocked_at is None and not outbox.is_blocked:
                unblocked_at = outbox.buffered_bytes
            if peer.poll(10):
                heard.append(int.from_bytes(peer.recv()[:2], "big"))
    assert heard == list(range(200))
    assert unblocked_at is not None
    assert 0 < unblocked_at <= LIMIT // 2 + (OUTPUT_HIGH_WATER_MARK + 1) * (KB + 2)
    assert (outbox.has_pending, outbox.buffered_bytes) == (False, 0)
