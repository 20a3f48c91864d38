# SPDX-License-Identifier: Apache-2.0
"""What ties the ranks to a frontend, when there is none."""

import time

import zmq

from mockengine.testing.processes import free_port
from mockengine.transport.session import Session
from mockengine.wire.handshake import Init


class _Nobody:
    def turned(self, now: float) -> None:
        pass


def test_waiting_for_a_connection_to_flush_costs_nothing() -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        session = Session(context, Init(inputs=(nowhere,), outputs=(nowhere,)), limit_bytes=1_000)
        session.open_outputs()
        session.announce([b"goodbye"])
        began, used_s = time.monotonic(), time.thread_time()
        assert not session.flush(0.5, _Nobody())
        assert time.monotonic() - began < 1
        assert time.thread_time() - used_s < 0.1
        session.close()
