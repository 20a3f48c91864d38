# SPDX-License-Identifier: Apache-2.0
"""An engine's process that has joined a frontend double: asked, read and measured without looking at what it says.

The double itself judges and keeps whatever it hears, which would cost more than the engine does; so its sockets are
used directly, here and nowhere else.
"""

import signal
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgpack
import zmq

from benchmarks.reference import request_id
from mockengine.testing.double import DEADLINE_S, FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.wire.handshake import engine_identity

PROMPT_TOKENS: Final = 32
"""Length of the prompts of all requests whose prompt does not matter."""

ENDLESS: Final = 50_000_000
"""Tokens of a reply that outlives every measurement."""

# A process that was paused has sent everything when nothing has come for this long.
_SILENCE_MS: Final = 200
# Far more than a reply needs: one that fills all of it is taken for one of no particular length.
_ROOM_TOKENS: Final = 2 * ENDLESS
_BLOCK_TOKENS: Final = 16
# Of an envelope, what comes before its timestamp: the rank, the outputs and the statistics.
_BEFORE_TIMESTAMP: Final = 3
_TIMESTAMP: Final = struct.Struct(">xd")


class StepReader:
    """Reads steps as they come, and of each only when it was made."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        # How far from the end of a message its timestamp begins; what follows it is the same in every step, until a
        # request ends.
        self._from_end = 0

    def next(self, patience_s: float) -> float | None:
        """Return when the next step was made, in seconds of the engine's clock; None if none comes in time."""
        message = self._message(patience_s)
        if message is None:
            return None
        if not self._from_end:
            self._from_end = len(message) - _timestamp_place(message)
        made_at: float = _TIMESTAMP.unpack_from(message, len(message) - self._from_end)[0]
        return made_at

    def read_for(self, lasts_s: float) -> list[float]:
        """Read for so long; return when the steps were made."""
        made_at: list[float] = []
        end = time.monotonic() + lasts_s
        while (left_s := end - time.monotonic()) > 0:
            if (moment := self.next(left_s)) is not None:
                made_at.append(moment)
        return made_at

    def read_rest(self) -> list[float]:
        """Read until nothing comes any more; return when the steps were made."""
        made_at: list[float] = []
        while (moment := self.next(_SILENCE_MS / 1_000)) is not None:
            made_at.append(moment)
        return made_at

    def next_outputs(self) -> int:
        """Return of how many requests the next step says something."""
        message = self._message(DEADLINE_S)
        if message is None:
            raise TimeoutError(f"no step came within {DEADLINE_S:g} s")
        return _num_outputs(message)

    def wait_for_outputs(self, count: int) -> None:
        """Read until a step says something of so many requests."""
        while self.next_outputs() != count:
            pass

    def _message(self, patience_s: float) -> memoryview | None:
        try:
            return self._socket.recv(zmq.NOBLOCK, copy=False).buffer
        except zmq.Again:
            if not self._socket.poll(max(1, round(1_000 * patience_s))):
                return None
            return self._socket.recv(copy=False).buffer


class Rig:
    """An engine that has joined, and its frontend.

    Attributes:
        engine: the process.
        frontend: the double.
        outputs: the socket that the frontend hears the engine on.
        steps: reads that socket.

    """

    def __init__(self, frontend: FrontendDouble, engine: EngineProcess) -> None:
        self.engine = engine
        self.frontend = frontend
        self.outputs: zmq.Socket[bytes] = frontend._outputs[0]
        self.steps = StepReader(self.outputs)
        self._inputs = frontend._inputs[0]

    def run_requests(self, count: int, first_number: int = 0) -> None:
        """Add so many requests that never end; they run together soon, which `steps.wait_for_outputs` waits for."""
        for number in range(first_number, first_number + count):
            self.frontend.add(request_id(number), prompt=[number + 1] * PROMPT_TOKENS, max_tokens=ENDLESS)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message that the double is not to know of."""
        self._inputs.send_multipart([engine_identity(0), *frames])

    @property
    def cpu_s(self) -> float:
        """CPU time that the engine's process has used."""
        return cpu_seconds(self.engine.process.pid)

    @property
    def resident_mb(self) -> float:
        """Memory that the engine's process has resident."""
        status = Path(f"/proc/{self.engine.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1_024 / 1e6

    def pause(self) -> None:
        """Let the engine's process stand still."""
        self.engine.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.engine.send_signal(signal.SIGCONT)


@contextmanager
def joined(*flags: str) -> Iterator[Rig]:
    """Start an engine with these flags, in which endless replies have room; end it without a farewell."""
    room = (f"--max-model-len={_ROOM_TOKENS}", f"--num-gpu-blocks={_ROOM_TOKENS // _BLOCK_TOKENS + 1}")
    with (
        FrontendDouble() as frontend,
        EngineProcess(
            f"--handshake-address={frontend.handshake_address}", *room, *flags, "--no-log-requests"
        ) as engine,
    ):
        frontend.handshake()
        engine.wait_for("engine ready")
        try:
            yield Rig(frontend, engine)
        finally:
            # It may be paused, or have endless replies to bring to an end.
            engine.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its threads have used.

    Linux gives every process a clock of it; this is how `clock_getcpuclockid` names it, which Python has not. Unlike
    the figures in /proc it does not count in hundredths of a second.
    """
    return time.clock_gettime(~pid << 3 | 2)


def _timestamp_place(message: memoryview) -> int:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(message)
    unpacker.read_array_header()
    for _ in range(_BEFORE_TIMESTAMP):
        unpacker.skip()
    place: int = unpacker.tell()
    return place


def _num_outputs(message: memoryview) -> int:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(message)
    unpacker.read_array_header()
    unpacker.skip()
    count: int = unpacker.read_array_header()
    return count
