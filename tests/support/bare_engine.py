# SPDX-License-Identifier: Apache-2.0
"""One rank's sockets and no mind of its own: says what it is told to, right or wrong."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import zmq

from mockengine.wire.codec import pack
from mockengine.wire.handshake import Init, ReadyResponse, engine_identity, read_init
from mockengine.wire.lines import NEWEST, Line
from mockengine.wire.messages import RequestType
from mockengine.wire.outputs import Envelope, UtilityReply, write_envelope
from mockengine.wire.utility import read_utility_call

COORDINATOR: Final = -1
READY_RESPONSE: Final = ReadyResponse(
    max_model_len=4_096,
    num_gpu_blocks=1_000,
    block_size=16,
    dp_stats_address=None,
    dtype="float32",
    vllm_version="0.33.0",
    max_num_seqs=256,
    max_num_batched_tokens=8_192,
    instance_id="bare",
)
_DEADLINE_MS: Final = 5_000


class BareEngine:
    """Plain sockets.

    Attributes:
        handshake_address: where it says HELLO.
        rank: its index.
        said: to whom each envelope went, in order: a client's index or `COORDINATOR`.

    """

    def __init__(self, handshake_address: str, rank: int = 0, line: Line = NEWEST) -> None:
        self.handshake_address = handshake_address
        self.rank = rank
        self.said: list[int] = []
        self._line = line
        self._context = zmq.Context()
        self._context.linger = 0
        self._handshake = self._connect(zmq.DEALER, handshake_address)
        self._inputs: list[zmq.Socket[bytes]] = []
        self._outputs: list[zmq.Socket[bytes]] = []
        self._from_coordinator: zmq.Socket[bytes] | None = None
        self._to_coordinator: zmq.Socket[bytes] | None = None

    # Start-up.

    def hello(self, **changes: object) -> None:
        self._handshake.send(pack({"status": "HELLO", "local": False, "headless": True, **changes}))

    def ready(self, **changes: object) -> None:
        self.hello(**{"status": "READY", **changes})

    def take_init(self) -> Init:
        init = read_init(_receive(self._handshake)[0])
        self._inputs = [self._connect(zmq.DEALER, address) for address in init.inputs]
        self._outputs = [self._connect(zmq.PUSH, address) for address in init.outputs]
        if init.coordinator_input is not None and init.coordinator_output is not None:
            self._from_coordinator = self._connect(zmq.XSUB, init.coordinator_input)
            self._to_coordinator = self._connect(zmq.PUSH, init.coordinator_output)
        return init

    def introduce(self, *, without: Sequence[str] = (), **changes: object) -> None:
        said = {name: getattr(READY_RESPONSE, name) for name in ReadyResponse.__slots__} | changes
        self.introduce_raw(pack({name: value for name, value in said.items() if name not in without}))

    def introduce_raw(self, frame: bytes) -> None:
        for socket in self._inputs:
            socket.send(frame)

    def subscribe(self, subscription: bytes = b"\x01") -> None:
        assert self._from_coordinator is not None
        self._from_coordinator.send(subscription)

    def take_go_ahead(self) -> None:
        assert self._from_coordinator is not None
        assert _receive(self._from_coordinator) == [b"READY"]

    # Serving.

    def say(self, *envelopes: Envelope, to: int = 0) -> None:
        for envelope in envelopes:
            self.say_frames(write_envelope(envelope, self._line), to)

    def say_items(self, items: Sequence[Any], to: int = 0) -> None:
        """Say an envelope that `say` would refuse to encode."""
        self.say_frames([pack(list(items))], to)

    def say_frames(self, frames: Sequence[bytes], to: int = 0) -> None:
        socket = self._to_coordinator if to == COORDINATOR else self._outputs[to]
        assert socket is not None
        self.said.append(to)
        socket.send_multipart(frames)

    def answer_next_call(self, *, asked_by: int = 0, to: int | None = None, **changes: Any) -> None:
        """Wait for a utility call of a client and answer it, to another client if need be."""
        while True:
            kind, payload = _receive(self._inputs[asked_by])
            if kind == bytes([RequestType.UTILITY]):
                break
        values: Mapping[str, Any] = {"engine_index": self.rank, "timestamp": 1.0, "result": False, **changes}
        reply = UtilityReply(**{"call_id": read_utility_call(payload).call_id, **values})
        self.say(reply, to=asked_by if to is None else to)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy()

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, engine_identity(self.rank))
        socket.connect(address)
        return socket


def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(_DEADLINE_MS), "the frontend says nothing"
    return socket.recv_multipart()
