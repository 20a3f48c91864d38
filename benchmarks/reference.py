# SPDX-License-Identifier: Apache-2.0
"""The loop that everything is compared with: what a mock engine does that is written without a thought for speed.

For every running request it draws a token, makes a list and packs it, once per step, into one message. It answers
nobody and keeps no state, so a real engine of this kind costs more.
"""

import random
import sys
import time
from collections.abc import Sequence

import msgpack
import zmq


class PlainLoop:
    """Steps a fixed number of requests."""

    def __init__(self, running: int, chunk_size: int, vocab_size: int = 32_000) -> None:
        self._chunk_size = chunk_size
        self._vocab_size = vocab_size
        self._requests = [(request_id(number), random.Random(number)) for number in range(running)]  # noqa: S311 - tokens, not secrets

    def step(self) -> bytes:
        """Return the message of one step."""
        outputs = [
            [name, [source.randrange(self._vocab_size) for _ in range(self._chunk_size)]]
            for name, source in self._requests
        ]
        packed: bytes = msgpack.packb([0, outputs, None, time.monotonic()])
        return packed


def request_id(number: int) -> str:
    """Return an id of the form and length that frontends give."""
    return f"chatcmpl-{number:032x}-{number:08x}"


def main(argv: Sequence[str]) -> int:
    """Send so many steps to an address: address, running requests, chunk size, steps."""
    address, running, chunk_size, steps = argv[0], *map(int, argv[1:])
    loop = PlainLoop(running, chunk_size)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        socket.send(b"")
        for _ in range(steps):
            socket.send(loop.step())
        # Until the sink has read all of it, and has measured what this process has used.
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
