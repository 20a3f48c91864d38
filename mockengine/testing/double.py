# SPDX-License-Identifier: Apache-2.0
"""A frontend double: plays a vLLM frontend towards an engine, for tests that need neither HTTP nor a tokenizer.

It is as strict as the strictest real frontend: what would kill that one raises here. It works with any engine that
speaks the protocol, not only with this one.

    with FrontendDouble() as frontend:
        ...  # start an engine on frontend.handshake_address
        frontend.handshake()
        frontend.add("r1", prompt=[1, 2, 3], max_tokens=8)
        assert len(frontend.reply("r1").tokens) == 8
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import zmq

from mockengine.wire.handshake import (
    EngineStatus,
    Init,
    engine_identity,
    read_ready_response,
    read_status,
)
from mockengine.wire.lines import NEWEST, Line
from mockengine.wire.messages import COORDINATOR_READY, COORDINATOR_SUBSCRIBE, RequestType, write_message
from mockengine.wire.outputs import (
    EngineCoreDead,
    EngineCoreOutput,
    Envelope,
    FinishReason,
    StepOutputs,
    UtilityReply,
    read_envelope,
)
from mockengine.wire.requests import request_items
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.utility import UtilityCall

DEADLINE_S: Final = 10.0
"""How long every wait lasts at most, unless told otherwise; a wait that is too long raises TimeoutError."""


_SMALL_BUFFER_BYTES: Final = 4_096


class UtilityFailedError(Exception):
    """The engine answered a utility call with a failure; the text is the engine's."""


class EngineMistakeError(AssertionError):
    """The engine did what the protocol forbids and a real frontend suffers from."""


@dataclass(slots=True)
class Reply:
    """What has been heard of one request.

    Attributes:
        outputs: every output, in order.
        timestamps: of the envelopes they came in, engine seconds.

    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it has not."""
        return self.outputs[-1].finish_reason if self.outputs else None


class FrontendDouble:
    """The sockets of a frontend, and what was heard on them.

    Attributes:
        handshake_address: where engines say HELLO.
        statuses: HELLO and READY of each rank, in the order of arrival.
        ready_responses: what each rank said of itself, by (rank, client).
        steps: every step envelope heard, by client, in order.
        coordinator_messages: every envelope heard on the coordinator's socket.

    """

    def __init__(
        self,
        *,
        ranks: int = 1,
        clients: int = 1,
        coordinator: bool = False,
        line: Line = NEWEST,
        ipc_directory: Path | None = None,
        parallel_config: Mapping[str, object] | None = None,
        handshake_address: str | None = None,
        reads_ahead: bool = True,
    ) -> None:
        """Bind every socket.

        Args:
            ranks: how many are waited for: 0 … `ranks` - 1.
            clients: number of API servers to play.
            coordinator: whether to play a data-parallel coordinator.
            line: the release line to speak and to accept.
            ipc_directory: bind Unix sockets there; else loopback TCP.
            parallel_config: what INIT carries.
            handshake_address: where to bind the handshake; else a free port.
            reads_ahead: whether its sockets take in whatever comes, as real ones do, or next to nothing that is not
                listened to.

        """
        self.ranks = ranks
        self.line = line
        self.statuses: list[tuple[int, EngineStatus]] = []
        self.ready_responses: dict[tuple[int, int], dict[str, Any]] = {}
        self.steps: list[list[StepOutputs]] = [[] for _ in range(clients)]
        self.coordinator_messages: list[Envelope] = []
        self._replies: dict[str, Reply] = {}
        self._utility_replies: dict[int, UtilityReply] = {}
        self._call_ids = itertools.count(1)
        self._context = zmq.Context()
        self._ipc_directory = ipc_directory
        self._handshake = self._socket(zmq.ROUTER)
        if handshake_address is not None:
            self._handshake.bind(handshake_address)
            self.handshake_address = handshake_address
        else:
            self.handshake_address = self._bind(self._handshake, "handshake")
        self._inputs = [self._socket(zmq.ROUTER) for _ in range(clients)]
        self._outputs = [self._socket(zmq.PULL) for _ in range(clients)]
        if not reads_ahead:
            for socket in self._outputs:
                socket.set_hwm(1)
                socket.setsockopt(zmq.RCVBUF, _SMALL_BUFFER_BYTES)
        self._coordinator_in = from_ranks = self._socket(zmq.PULL) if coordinator else None
        self._coordinator_out = to_ranks = self._socket(zmq.XPUB) if coordinator else None
        if to_ranks is not None:
            # Each rank's subscription counts, though they are all equal.
            to_ranks.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.init = Init(
            inputs=tuple(self._bind(socket, f"input{index}") for index, socket in enumerate(self._inputs)),
            outputs=tuple(self._bind(socket, f"output{index}") for index, socket in enumerate(self._outputs)),
            coordinator_input=None if to_ranks is None else self._bind(to_ranks, "coordinator_out"),
            coordinator_output=None if from_ranks is None else self._bind(from_ranks, "coordinator_in"),
            parallel_config=parallel_config or {},
        )

    # Start-up.

    def handshake(self, deadline_s: float = DEADLINE_S) -> None:
        """Go through the whole start-up with every rank, then close the handshake as a real frontend does.

        Raises:
            TimeoutError: some rank did not play its part.
            EngineMistakeError: a rank said something at the wrong time or twice.

        """
        self.greet(deadline_s)
        if self._coordinator_out is not None:
            self.subscribe(deadline_s)
        greeted: set[int] = set()
        while len(greeted) < self.ranks:
            rank, status = self.next_status(deadline_s)
            _require(status.status == "READY", f"rank {rank} said {status.status} where READY is due")
            greeted.add(rank)
        self.take_ready_responses(deadline_s)
        self._handshake.close()

    def greet(self, deadline_s: float = DEADLINE_S) -> None:
        """Answer the HELLO of every rank with INIT."""
        greeted: set[int] = set()
        while len(greeted) < self.ranks:
            rank, status = self.next_status(deadline_s)
            _require(status.status == "HELLO", f"rank {rank} said {status.status} where HELLO is due")
            _require(rank not in greeted, f"rank {rank} said HELLO twice")
            greeted.add(rank)
            self._handshake.send_multipart([engine_identity(rank), self.init.to_wire()])

    def subscribe(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait for the subscription of every rank, then give the go-ahead."""
        socket = self._played(self._coordinator_out)
        for number in range(self.ranks):
            frames = _receive(socket, deadline_s, f"a subscription ({number} of {self.ranks} came)")
            _require(frames == [COORDINATOR_SUBSCRIBE], f"{frames} is no subscription")
        socket.send(COORDINATOR_READY)

    def next_status(self, deadline_s: float = DEADLINE_S) -> tuple[int, EngineStatus]:
        """Wait for the next HELLO or READY of any rank."""
        identity, frame = _receive(self._handshake, deadline_s, "HELLO or READY")
        self.statuses.append((int.from_bytes(identity, "little"), read_status(frame)))
        return self.statuses[-1]

    def take_ready_responses(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until every rank has introduced itself to every client."""
        for client, socket in enumerate(self._inputs):
            for _ in range(self.ranks):
                identity, frame = _receive(socket, deadline_s, f"a ready response to client {client}")
                self.ready_responses[int.from_bytes(identity, "little"), client] = read_ready_response(frame)

    # What a frontend says.

    def add(
        self,
        request_id: str,
        *,
        prompt: Sequence[int] | None = (1, 2, 3),
        max_tokens: int | None = 4,
        sampling: Mapping[str, object] | None = None,
        rank: int = 0,
        client: int = 0,
        **fields: object,
    ) -> None:
        """Send a request in the layout of this double's line.

        Args:
            request_id: names it.
            prompt: its token ids.
            max_tokens: None leaves the key out.
            sampling: further keys of its SamplingParams.
            rank: who is to serve it.
            client: who asks.
            fields: further fields of EngineCoreRequest by name, as wire values.

        """
        params = {**({} if max_tokens is None else {"max_tokens": max_tokens}), **(sampling or {})}
        values: dict[str, object] = {
            "request_id": request_id,
            "prompt_token_ids": None if prompt is None else list(prompt),
            "sampling_params": params,
            "arrival_time": time.time(),
            "client_index": client,
            **fields,
        }
        self.send(write_message(RequestType.ADD, request_items(values, self.line.add_items)), rank, client)

    def abort(self, *request_ids: str, rank: int = 0, client: int = 0) -> None:
        """Tell a rank that nobody waits for some requests any more."""
        self.send(write_message(RequestType.ABORT, list(request_ids)), rank, client)

    def call(self, method: str, *args: object, rank: int = 0, client: int = 0) -> Any:
        """Make a utility call and wait for its result.

        Raises:
            UtilityFailedError: the engine said that it failed.
            TimeoutError: no answer.

        """
        call_id = next(self._call_ids)
        call = UtilityCall(client, call_id, method, args)
        self.send([bytes([RequestType.UTILITY]), call.to_wire()], rank, client)
        self._listen_until(client, lambda: call_id in self._utility_replies, f"the answer to {method}")
        reply = self._utility_replies.pop(call_id)
        if reply.failure is not None:
            raise UtilityFailedError(reply.failure)
        return reply.result

    def send(self, frames: Sequence[bytes], rank: int = 0, client: int = 0) -> None:
        """Send a message of any content from a client to a rank."""
        self._inputs[client].send_multipart([engine_identity(rank), *frames])

    def broadcast(self, frames: Sequence[bytes]) -> None:
        """Send a message from the coordinator to every rank."""
        self._played(self._coordinator_out).send_multipart(frames)

    # What it hears.

    def reply(self, request_id: str, *, client: int = 0, deadline_s: float = DEADLINE_S) -> Reply:
        """Wait until a request has ended, and return all that was heard of it."""

        def ended() -> bool:
            return self.heard(request_id).finish_reason is not None

        self._listen_until(client, ended, f"the end of {request_id}", deadline_s)
        return self.heard(request_id)

    def heard(self, request_id: str) -> Reply:
        """Return what has been heard of a request so far, without waiting."""
        return self._replies.setdefault(request_id, Reply())

    def load(self, client: int = 0, deadline_s: float = DEADLINE_S) -> SchedulerStats:
        """Wait until a client hears statistics without running and waiting requests, and return them."""

        def last() -> SchedulerStats | None:
            heard = [step.scheduler_stats for step in self.steps[client] if step.scheduler_stats is not None]
            return heard[-1] if heard else None

        def idle() -> bool:
            stats = last()
            return stats is not None and stats.num_running_reqs == 0 and stats.num_waiting_reqs == 0

        self._listen_until(client, idle, "idle statistics", deadline_s)
        stats = last()
        return stats or SchedulerStats()

    def listen(self, client: int = 0, deadline_s: float = DEADLINE_S) -> Envelope:
        """Wait for the next envelope to a client.

        Raises:
            EngineCoreDead: the engine said that it is lost.
            WireError: what a real frontend would die of.
            TimeoutError: nothing came.

        """
        envelope = read_envelope(_receive(self._outputs[client], deadline_s, "an envelope"), self.line)
        _require(envelope.engine_index < self.ranks, f"rank {envelope.engine_index} is unknown")
        if isinstance(envelope, StepOutputs):
            self._note(client, envelope)
        elif isinstance(envelope, UtilityReply):
            _require(envelope.call_id not in self._utility_replies, f"call {envelope.call_id} answered twice")
            self._utility_replies[envelope.call_id] = envelope
        else:
            raise EngineMistakeError(f"{envelope} on a client's socket, which kills a Rust frontend")
        return envelope

    def listen_as_coordinator(self, deadline_s: float = DEADLINE_S) -> Envelope:
        """Wait for the next envelope to the coordinator."""
        socket = self._played(self._coordinator_in)
        envelope = read_envelope(_receive(socket, deadline_s, "a coordinator message"), self.line)
        outputs = envelope.outputs if isinstance(envelope, StepOutputs) else ()
        _require(not outputs, "outputs on the coordinator's socket, which kills a Python coordinator")
        _require(not isinstance(envelope, UtilityReply), "a utility reply on the coordinator's socket")
        self.coordinator_messages.append(envelope)
        return envelope

    def wait_for_death(self, client: int = 0, deadline_s: float = DEADLINE_S) -> None:
        """Listen until the engine says that it is lost.

        Raises:
            TimeoutError: it does not.

        """
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.listen(client, max(0.0, end - time.monotonic()))
            except EngineCoreDead:
                return

    def hears_nothing(self, client: int = 0, for_s: float = 0.2) -> bool:
        """Tell whether a client hears nothing at all for a while."""
        return not self._outputs[client].poll(round(1_000 * for_s))

    def close(self) -> None:
        """Go away, as a frontend that has ended."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, client: int, step: StepOutputs) -> None:
        self.steps[client].append(step)
        for output in step.outputs:
            reply = self.heard(output.request_id)
            reply.outputs.append(output)
            reply.timestamps.append(step.timestamp)

    def _listen_until(
        self, client: int, condition: Callable[[], bool], awaited: str, deadline_s: float = DEADLINE_S
    ) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{awaited} did not come within {deadline_s:g} s")
            self.listen(client, left_s)

    def _played(self, socket: "zmq.Socket[bytes] | None") -> "zmq.Socket[bytes]":
        if socket is None:
            raise ValueError("this double plays no coordinator: make it with coordinator=True")
        return socket

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], name: str) -> str:
        if self._ipc_directory is not None:
            address = f"ipc://{self._ipc_directory / name}"
            socket.bind(address)
            return address
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def _require(condition: bool, mistake: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise EngineMistakeError(mistake)


def _receive(socket: zmq.Socket[bytes], deadline_s: float, awaited: str) -> list[bytes]:
    if not socket.poll(round(1_000 * deadline_s)):
        raise TimeoutError(f"{awaited} did not come within {deadline_s:g} s")
    return socket.recv_multipart()
