# SPDX-License-Identifier: Apache-2.0
"""Reading steps without looking at what they say."""

import os
import time
from collections.abc import Iterator

import pytest
import zmq

from benchmarks.rig import StepReader, cpu_seconds
from mockengine.wire.lines import NEWEST
from mockengine.wire.outputs import EngineCoreOutput, StepOutputs, write_envelope


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """What says steps, and what hears them."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as said, context.socket(zmq.PULL) as heard:
        heard.bind("inproc://steps")
        said.connect("inproc://steps")
        yield said, heard


def _step(timestamp: float, count: int) -> list[bytes]:
    outputs = [EngineCoreOutput(request_id=f"r{number}", new_token_ids=[number]) for number in range(count)]
    return write_envelope(StepOutputs(engine_index=0, timestamp=timestamp, outputs=outputs), NEWEST)


def test_steps_are_read_by_when_they_were_made(sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    said, heard = sockets
    for timestamp, count in ((1.5, 1), (2.5, 3)):
        said.send_multipart(_step(timestamp, count))

    assert StepReader(heard).read_rest() == [1.5, 2.5]


def test_a_step_is_waited_for_by_what_it_says(sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    said, heard = sockets
    for timestamp, count in ((1.5, 1), (2.5, 20), (3.5, 1)):
        said.send_multipart(_step(timestamp, count))
    reader = StepReader(heard)

    reader.wait_for_outputs(20)

    assert reader.next(1.0) == 3.5


def test_cpu_time_is_that_of_the_process() -> None:
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)
