# SPDX-License-Identifier: Apache-2.0
"""A frontend double: plays a vLLM frontend towards an engine, for tests that need neither HTTP nor a tokenizer.

It is as strict as the strictest real frontend: what would kill that one raises here, and so does what no correct engine
does (`mockengine.testing.rules` names each rule). It works with any engine that speaks the protocol, not only with this
one.

    with FrontendDouble() as frontend:
        ...  # start an engine on frontend.handshake_address
        frontend.handshake()
        frontend.add("r1", prompt=[1, 2, 3], max_tokens=8)
        assert len(frontend.reply("r1").tokens) == 8
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mockengine.testing.conversation import Conversation
from mockengine.testing.joining import Joining, read_introduction
from mockengine.testing.life import Reply
from mockengine.testing.rules import EngineMistakeError, Rule
from mockengine.testing.sockets import FrontendSockets, Socket, receive
from mockengine.wire.handshake import EngineStatus, engine_identity
from mockengine.wire.lines import NEWEST, Line
from mockengine.wire.messages import COORDINATOR_READY, COORDINATOR_SUBSCRIBE, RequestType, write_message
from mockengine.wire.outputs import EngineCoreDead, Envelope, StepOutputs, UtilityReply
from mockengine.wire.requests import request_items
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.utility import UtilityCall

__all__ = ["DEADLINE_S", "EngineMistakeError", "FrontendDouble", "Reply", "Rule", "UtilityFailedError"]

DEADLINE_S: Final = 10.0
"""How long every wait lasts at most, unless told otherwise; a wait that is too long raises TimeoutError."""

# Python's call ids are as large; a test's own, which are small, do not meet them.
_FIRST_CALL_ID: Final = 2**63 + 2**32


class UtilityFailedError(Exception):
    """The engine answered a utility call with a failure; the text is the engine's."""


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
        self._call_ids = itertools.count(_FIRST_CALL_ID)
        self._joining = Joining(ranks, line, has_coordinator=coordinator)
        self._conversation = Conversation(ranks, line)
        # What was heard and not handed out by `next_status` yet.
        self._unread: list[tuple[int, EngineStatus]] = []
        self._sockets = FrontendSockets(
            clients=clients,
            coordinator=coordinator,
            ipc_directory=ipc_directory,
            handshake_address=handshake_address,
            parallel_config=parallel_config or {},
            reads_ahead=reads_ahead,
        )
        self.handshake_address = self._sockets.handshake_address
        self.init = self._sockets.init
        self._handshake = self._sockets.handshake
        self._inputs = self._sockets.inputs
        self._outputs = self._sockets.outputs
        self._coordinator_in = self._sockets.from_ranks
        self._coordinator_out = self._sockets.to_ranks

    # Start-up.

    def handshake(self, deadline_s: float = DEADLINE_S) -> None:
        """Go through the whole start-up with every rank, then close the handshake as a real frontend does.

        Args:
            deadline_s: for each message that is due.

        Raises:
            TimeoutError: some rank did not play its part.
            EngineMistakeError: a rank said something that is not due, or nobody waits for it.

        """
        self.greet(deadline_s)
        if self._coordinator_out is not None:
            self.subscribe(deadline_s)
        while self._joining.awaits_ready:
            self._hear_status(deadline_s)
        self.take_ready_responses(deadline_s)
        self._hear_what_is_there()
        self._joining.refuse_strangers()
        self._handshake.close()

    def greet(self, deadline_s: float = DEADLINE_S) -> None:
        """Answer the HELLO of every rank with INIT; ranks that nobody waits for are left alone.

        A rank may be READY before another says HELLO: that is what `next_status` returns next.
        """
        while True:
            for rank in self._joining.to_greet:
                self._handshake.send_multipart([engine_identity(rank), self.init.to_wire()])
                self._joining.greeted(rank)
            self._unread = [(rank, status) for rank, status in self._unread if status.status != "HELLO"]
            if not self._joining.awaits_hello:
                return
            self._hear_status(deadline_s)
            # Whatever else came before INIT leaves was not said in answer to it.
            self._hear_what_is_there()

    def subscribe(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait for the subscription of every rank, then give the go-ahead."""
        socket = self._played(self._coordinator_out)
        for number in range(self.ranks):
            try:
                frames = receive(socket, deadline_s, f"a subscription ({number} of {self.ranks} came)")
            except TimeoutError:
                # Perhaps a rank went on without.
                self._hear_what_is_there()
                raise
            if frames != [COORDINATOR_SUBSCRIBE]:
                raise EngineMistakeError(Rule.SUBSCRIPTION_UNREADABLE, f"{frames} came")
        self._hear_what_is_there()
        self._joining.go_ahead()
        socket.send(COORDINATOR_READY)

    def next_status(self, deadline_s: float = DEADLINE_S) -> tuple[int, EngineStatus]:
        """Wait for the next HELLO or READY of any rank; a HELLO is for the caller to answer."""
        if not self._unread:
            self._hear_status(deadline_s)
        rank, status = self._unread.pop(0)
        self._joining.greeted(rank)
        return rank, status

    def take_ready_responses(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until every rank has introduced itself to every client."""
        for client, socket in enumerate(self._inputs):
            while any((rank, client) not in self.ready_responses for rank in range(self.ranks)):
                self._take_ready_response(client, receive(socket, deadline_s, f"a ready response to client {client}"))
        for client, socket in enumerate(self._inputs):
            while socket.poll(0):
                self._take_ready_response(client, socket.recv_multipart())

    def _take_ready_response(self, client: int, message: list[bytes]) -> None:
        identity, *frames = message
        rank = int.from_bytes(identity, "little")
        if identity not in map(engine_identity, range(self.ranks)):
            raise EngineMistakeError(Rule.STRANGER, f"a ready response of rank {rank} to client {client}")
        if (rank, client) in self.ready_responses:
            raise EngineMistakeError(Rule.READY_RESPONSE_REPEATED, f"rank {rank} to client {client}")
        self.ready_responses[rank, client] = read_introduction(rank, frames, self.init, self.line)

    def _hear_status(self, deadline_s: float) -> None:
        try:
            identity, *frames = receive(self._handshake, deadline_s, "HELLO or READY")
        except TimeoutError:
            # More to the point than that nothing came.
            self._joining.refuse_strangers()
            raise
        heard = self._joining.hear(identity, frames)
        self.statuses.append(heard)
        self._unread.append(heard)

    def _hear_what_is_there(self) -> None:
        while self._handshake.poll(0):
            self._hear_status(0)

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

        What was heard of an earlier one of the same id that has ended is forgotten.

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
        frames = write_message(RequestType.ADD, request_items(values, self.line.add_items))
        self._conversation.asked(values, rank, client)
        self._forget_ended(request_id)
        self._send(frames, rank, client)

    def abort(self, *request_ids: str, rank: int = 0, client: int = 0) -> None:
        """Tell a rank that nobody waits for some requests any more."""
        self._conversation.aborted(request_ids)
        self._send(write_message(RequestType.ABORT, list(request_ids)), rank, client)

    def call(self, method: str, *args: object, rank: int = 0, client: int = 0, deadline_s: float = DEADLINE_S) -> Any:
        """Make a utility call and wait for its result.

        Raises:
            UtilityFailedError: the engine said that it failed.
            TimeoutError: no answer.

        """
        call_id = next(self._call_ids)
        call = UtilityCall(client, call_id, method, args)
        self._conversation.called(call_id, method, rank, client)
        self._send([bytes([RequestType.UTILITY]), call.to_wire()], rank, client)
        self._listen_until(client, lambda: call_id in self._utility_replies, f"the answer to {method}", deadline_s)
        reply = self._utility_replies.pop(call_id)
        if reply.failure is not None:
            raise UtilityFailedError(reply.failure)
        return reply.result

    def send(self, frames: Sequence[bytes], rank: int = 0, client: int = 0) -> None:
        """Send a message of any content from a client to a rank.

        From then on the double knows no longer what was asked: requests and calls that it does not know are not judged,
        nor are those that the message names.
        """
        for request_id in self._conversation.said_raw(frames):
            self._forget_ended(request_id)
        self._send(frames, rank, client)

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
            EngineMistakeError: it broke a rule.
            WireError: what a real frontend cannot read, and dies of.
            TimeoutError: nothing came.

        """
        envelope = self._conversation.hear(client, receive(self._outputs[client], deadline_s, "an envelope"))
        if isinstance(envelope, StepOutputs):
            self._note(client, envelope)
        else:
            self._utility_replies[envelope.call_id] = envelope
        return envelope

    def listen_as_coordinator(self, deadline_s: float = DEADLINE_S) -> Envelope:
        """Wait for the next envelope to the coordinator; raises as `listen` does."""
        frames = receive(self._played(self._coordinator_in), deadline_s, "a coordinator message")
        envelope = self._conversation.hear_as_coordinator(frames)
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
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, frames: Sequence[bytes], rank: int, client: int) -> None:
        self._inputs[client].send_multipart([engine_identity(rank), *frames])

    def _forget_ended(self, request_id: str) -> None:
        # Else `reply` would not wait for the end of the new one.
        reply = self._replies.get(request_id)
        if reply is not None and reply.finish_reason is not None:
            del self._replies[request_id]

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

    def _played(self, socket: Socket | None) -> Socket:
        if socket is None:
            raise ValueError("this double plays no coordinator: make it with coordinator=True")
        return socket
