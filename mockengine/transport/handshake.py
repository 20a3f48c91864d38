# SPDX-License-Identifier: Apache-2.0
"""How ranks join a frontend (protocol section 1).

Three rules:

1. HELLO is said once per connection. A second HELLO of a known rank kills a starting frontend, so whatever goes wrong
   before READY is answered by closing every socket and beginning anew.
2. READY is said only after the coordinator's go-ahead, where there is a coordinator; it comes when all ranks of the
   deployment have subscribed, so no rank of this process waits before the others have.
3. A rank introduces itself on its inputs before it says READY; until then a frontend cannot address it.

Each rank's part is a small machine:

    state                 event                           next state            what is said
    AWAITS_INIT           INIT                            STARTING              nothing
    STARTING              it has started, no coordinator  JOINED                ready response, READY
    STARTING              it has started, coordinator     AWAITS_COORDINATOR    ready response, subscription
    AWAITS_COORDINATOR    the coordinator's go-ahead      JOINED                READY

A real engine loads its model while it is starting; here that takes as long as the plan says.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol

import zmq

from mockengine.faults.of_joining import SpoiledJoin
from mockengine.transport.abandoned import AbandonedFrontend
from mockengine.transport.connection import AddressError
from mockengine.transport.session import Handshake, Session
from mockengine.transport.sockets import Context, PeerMonitor, Socket, make_socket
from mockengine.transport.stop import StopSignal
from mockengine.wire.codec import WireError
from mockengine.wire.handshake import EngineStatus, Init, ReadyResponse, engine_identity, read_init
from mockengine.wire.messages import COORDINATOR_READY

# A rank that has joined a frontend must be able to say that it is gone although joining failed as a whole.
_FAREWELL_S: Final = 0.3
_FIRST_REMINDER_S: Final = 5.0
# A frontend that is there tells at once what it is.
_TELLING_S: Final = 0.5
_REMINDER_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """Who joins, and where.

    Attributes:
        address: the frontend's handshake socket.
        ranks: engine indexes of this process.
        data_parallel_size: ranks of the whole deployment, as far as this process knows.
        describe: makes the ready response of a rank.
        on_init: hears of a frontend before any rank says READY to it.
        ready_extra: keys for READY besides the fixed ones.
        timeout_s: how long to try before giving up, apart from starting; 0 is without limit.
        startup_s: how long a rank starts once it has its INIT.
        limit_bytes: what may wait for a client that does not read.
        farewell: message to every client when joining fails after some ranks have joined, if any.
        abandoned: the frontend of an engine that was killed, to be told while the next one is waited for, if any.
        resumes: what that frontend said in its INIT, if it is to be served again rather than told.
        between: called whenever joining wakes up, for what other threads want done.
        spoil: asked, when a frontend has answered, what is to go wrong from there on.

    """

    address: str
    ranks: Sequence[int]
    data_parallel_size: int
    describe: Callable[[int, Init], ReadyResponse]
    on_init: Callable[[Init], None]
    ready_extra: Mapping[str, object]
    timeout_s: float
    startup_s: float
    limit_bytes: int
    farewell: Sequence[bytes] | None
    abandoned: AbandonedFrontend | None = None
    resumes: Init | None = None
    between: Callable[[], None] = lambda: None
    spoil: Callable[[], SpoiledJoin] = SpoiledJoin


class JoinReporter(Protocol):
    """Hears how joining goes."""

    def joining(self, address: str, ranks: Sequence[int], waiting_for: str, waited_s: float, hint: str | None) -> None:
        """Hear what is being waited for: at the start, and now and then."""

    def init_unreadable(self, reason: str, rank: int, frame_bytes: int) -> None:
        """Hear that a rank got an INIT that it could not read, and goes on waiting."""

    def join_interrupted(self, reason: str, hint: str | None) -> None:
        """Hear that an attempt failed and another begins."""

    def turned(self, now: float) -> None:
        """Hear that joining goes on, whenever it wakes up."""


class JoinTimeoutError(Exception):
    """No frontend was joined in the time allowed."""


class _InterruptedError(Exception):
    """This attempt cannot succeed any more. Carries the reason and what may help."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class _State(Enum):
    AWAITS_INIT = auto()
    STARTING = auto()
    AWAITS_COORDINATOR = auto()
    JOINED = auto()


@dataclass(slots=True)
class _Rank:
    """One rank's part in an attempt."""

    rank: int
    handshake: Socket
    monitor: PeerMonitor
    state: _State = _State.AWAITS_INIT
    init: bytes = b""
    started_at: float = 0.0
    coordinator: Socket | None = None


def join(
    context: Context, plan: JoinPlan, stop: StopSignal, reporter: JoinReporter, clock: Callable[[], float]
) -> Session | None:
    """Join a frontend with all ranks; return the session, or None when asked to stop.

    Raises:
        JoinTimeoutError: `plan.timeout_s` has passed.

    """
    started = clock()
    while True:
        attempt = _Attempt(context, plan, reporter, clock, started)
        try:
            session = attempt.run(stop)
        except _InterruptedError as interrupted:
            attempt.abandon()
            reporter.join_interrupted(interrupted.reason, interrupted.hint)
        except BaseException:
            attempt.abandon()
            raise
        else:
            if session is None:
                attempt.abandon()
            return session


class _Attempt:
    """From HELLO to READY, once."""

    def __init__(
        self, context: Context, plan: JoinPlan, reporter: JoinReporter, clock: Callable[[], float], started: float
    ) -> None:
        self._context = context
        self._plan = plan
        self._reporter = reporter
        self._clock = clock
        self._started = started
        self._session: Session | None = None
        self._spoiled: SpoiledJoin | None = None
        self._is_resumed = False
        self._abandoned_events = plan.abandoned.events if plan.abandoned is not None else []
        self._ranks = [self._greet(rank) for rank in plan.ranks]

    def run(self, stop: StopSignal) -> Session | None:
        """Go through the handshake; return None when asked to stop."""
        self._remind()
        next_reminder = self._clock() + _FIRST_REMINDER_S
        poller = zmq.Poller()
        poller.register(stop.fileno(), zmq.POLLIN)
        for part in self._ranks:
            poller.register(part.handshake, zmq.POLLIN)
            poller.register(part.monitor.events, zmq.POLLIN)
        for events in self._abandoned_events:
            poller.register(events, zmq.POLLIN)
        while not self._is_resumed and any(part.state is not _State.JOINED for part in self._ranks):
            if stop.requested:
                return None
            now = self._clock()
            self._reporter.turned(now)
            self._plan.between()
            if now >= next_reminder:
                self._remind()
                next_reminder = now + _REMINDER_S
            readable = dict(poller.poll(max(0, round(1_000 * (self._next_wake(next_reminder) - now)))))
            if stop.fileno() in readable:
                stop.clear_wakeup()
            self._check_timeout()
            for position, part in enumerate(self._ranks):
                self._advance(position, part, readable, poller)
            self._look_for_the_abandoned(poller)
        return self._hand_over()

    def abandon(self) -> None:
        """Close every socket at once, unsaid things included: a later HELLO must not meet this one."""
        for part in self._ranks:
            part.monitor.close()
            part.handshake.close(0)
        if self._session is None:
            return
        self._session.look()
        has_joined = any(part.state is _State.JOINED for part in self._ranks)
        if has_joined and self._plan.farewell is not None and self._session.connected_clients:
            # The frontend may believe in that rank and send it requests.
            self._session.announce(self._plan.farewell)
            self._session.flush(_FAREWELL_S, self._reporter)
        self._session.close()

    def _greet(self, rank: int) -> _Rank:
        socket = make_socket(self._context, zmq.DEALER, self._plan.address, engine_identity(rank))
        monitor = PeerMonitor(socket)
        try:
            socket.connect(self._plan.address)
        except zmq.ZMQError:
            # Left open, it would keep the context, and so the process, from ending.
            monitor.close()
            socket.close(0)
            raise
        socket.send(EngineStatus("HELLO").to_wire())
        return _Rank(rank, socket, monitor)

    def _advance(self, position: int, part: _Rank, readable: dict[Any, int], poller: zmq.Poller) -> None:
        # What is not due is taken in all the same, or the poller would never sleep again.
        if part.handshake in readable:
            frames = part.handshake.recv_multipart()
            if part.state is _State.AWAITS_INIT:
                self._take_init(part, frames)
        if part.state is _State.STARTING and self._clock() >= part.started_at:
            self._introduce(position, part, poller)
        if part.coordinator is not None and part.coordinator in readable:
            frames = part.coordinator.recv_multipart()
            if part.state is _State.AWAITS_COORDINATOR and frames == [COORDINATOR_READY]:
                self._say_ready(part)
        if part.monitor.events in readable:
            part.monitor.read()
            if part.monitor.was_lost and part.state is not _State.JOINED:
                self._take_last_words()
                raise _InterruptedError(f"the frontend closed the handshake of rank {part.rank}", self._closing_hint())

    def _take_last_words(self) -> None:
        """Take in INITs that came after the poller was asked and before the frontend closed: they tell why it did."""
        for part in self._ranks:
            if part.state is _State.AWAITS_INIT:
                with suppress(zmq.Again):
                    self._take_init(part, part.handshake.recv_multipart(zmq.NOBLOCK))

    def _take_init(self, part: _Rank, frames: list[bytes]) -> None:
        try:
            self._session_of(read_init(frames[0]))
        except (WireError, AddressError, zmq.ZMQError) as error:
            self._refuse_init(part.rank, frames[0], error)
            return
        if self._spoiled is None:
            self._spoiled = self._plan.spoil()
        if self._spoiled.repeats_hello:
            part.handshake.send(EngineStatus("HELLO").to_wire())
        part.init = frames[0]
        part.state = _State.STARTING
        part.started_at = self._clock() + self._plan.startup_s + self._spoiled.delay_s

    def _introduce(self, position: int, part: _Rank, poller: zmq.Poller) -> None:
        """Have a rank that has started tell what it is, and that it is ready if nobody has to allow it."""
        try:
            init = read_init(part.init)
            ready_response = self._as_spoiled.introduction(self._plan.describe(part.rank, init).to_wire())
            part.coordinator = self._session_of(init).add_rank(position, part.rank, ready_response)
        except (WireError, AddressError, zmq.ZMQError) as error:
            part.state = _State.AWAITS_INIT
            self._refuse_init(part.rank, part.init, error)
            return
        if part.coordinator is None:
            self._say_ready(part)
        else:
            poller.register(part.coordinator, zmq.POLLIN)
            part.state = _State.AWAITS_COORDINATOR

    def _session_of(self, init: Init) -> Session:
        if self._session is None:
            self._plan.on_init(init)
            self._session = Session(self._context, init, self._plan.limit_bytes)
            self._session.open_outputs()
        elif (init.inputs, init.outputs) != (self._session.init.inputs, self._session.init.outputs):
            raise _InterruptedError("two frontends answered at one address, each to some of the ranks")
        return self._session

    def _refuse_init(self, rank: int, frame: bytes, error: Exception) -> None:
        """Go on waiting, since beginning anew would say HELLO twice to a frontend that is still there."""
        if any(part.state is not _State.AWAITS_INIT for part in self._ranks):
            raise _InterruptedError(f"INIT for rank {rank} is of no use: {error}") from error
        if self._session is not None:
            self._session.close()
            self._session = None
        self._reporter.init_unreadable(str(error), rank, len(frame))

    def _say_ready(self, part: _Rank) -> None:
        session = self._session
        stats_address = session.init.frontend_stats_publish_address if session is not None else None
        extra = {**self._plan.ready_extra, "dp_stats_address": stats_address}
        part.handshake.send(self._as_spoiled.ready(EngineStatus("READY", extra=extra)).to_wire())
        part.state = _State.JOINED

    @property
    def _as_spoiled(self) -> SpoiledJoin:
        return self._spoiled or SpoiledJoin()

    def _hand_over(self) -> Session | None:
        session = self._session
        if session is None:
            return None
        for part in self._ranks:
            handshake = Handshake(part.handshake, part.monitor)
            if part.monitor.was_lost:
                handshake.close()
            else:
                session.handshakes.append(handshake)
        return session

    # Telling what is going on.

    def _remind(self) -> None:
        self._reporter.joining(
            self._plan.address, self._plan.ranks, self._waiting_for(), self._clock() - self._started, self._hint()
        )

    def _waiting_for(self) -> str:
        if not any(part.monitor.connected for part in self._ranks) and self._session is None:
            return "a frontend to listen"
        if any(part.state is _State.AWAITS_INIT for part in self._ranks):
            return "the frontend's INIT"
        if any(part.state is _State.STARTING for part in self._ranks):
            return "the engine's start, which takes startup_ms"
        return "the coordinator's go-ahead"

    def _hint(self, *, is_over: bool = False) -> str | None:
        """Say what may be wrong, as far as the wire lets an engine see it; not at once, since it may only be early."""
        for part in self._ranks:
            part.monitor.read()
        if self._clock() - self._started < _FIRST_REMINDER_S and not is_over:
            return None
        if self._session is None:
            return self._silence_hint()
        if any(part.state is _State.STARTING for part in self._ranks):
            return None
        unanswered = [part.rank for part in self._ranks if part.state is _State.AWAITS_INIT]
        if unanswered:
            return (
                f"the frontend answered some ranks but not {unanswered}; is its --data-parallel-size smaller than "
                f"data_parallel_size here ({self._plan.data_parallel_size}), or does another engine play these ranks?"
            )
        return (
            f"it comes when all ranks have subscribed; this process plays {list(self._plan.ranks)} of "
            f"{self._plan.data_parallel_size}: start the others, or give the frontend as many ranks as there are"
        )

    def _silence_hint(self) -> str:
        if any(part.monitor.connected for part in self._ranks):
            return (
                "a frontend listens but does not answer; does it expect other ranks "
                f"(this process plays {list(self._plan.ranks)}), or does another engine play these?"
            )
        if any(part.monitor.was_reached and not part.monitor.was_connected for part in self._ranks):
            return (
                "something listens there but does not speak ZMQ; is this the HTTP port? "
                "The frontend's --data-parallel-rpc-port is meant (29550 by default)"
            )
        return (
            "a frontend listens there only until all its ranks have joined: start one with "
            "--data-parallel-size-local 0; one that another engine has joined or left must be restarted; if one waits, "
            "see whether its --data-parallel-address and --data-parallel-rpc-port are this address"
        )

    def _closing_hint(self) -> str:
        expected = self._session.init.expected_data_parallel_size if self._session is not None else None
        if expected is not None and expected != self._plan.data_parallel_size:
            return f"the frontend counts on {expected} ranks, this engine on {self._plan.data_parallel_size}"
        return (
            f"it was stopped, or it refused a rank (this process plays {list(self._plan.ranks)}): its "
            "--data-parallel-size is smaller, or another engine plays that rank; its own log then says "
            "'unexpected data parallel rank' or 'duplicate', and it must be restarted"
        )

    # The frontend of an engine that was killed.

    def _look_for_the_abandoned(self, poller: zmq.Poller) -> None:
        abandoned = self._plan.abandoned
        if abandoned is None:
            return
        another_starts = self._session is not None or any(part.monitor.connected for part in self._ranks)
        self._is_resumed = abandoned.look(self._clock(), another_starts=another_starts, resume=self._resume)
        if self._abandoned_events and not abandoned.events:
            for events in self._abandoned_events:
                poller.unregister(events)
            self._abandoned_events = []

    def _resume(self) -> bool:
        """Go on where the engine before this one was killed, if its frontend lets an engine return (section 10)."""
        init = self._plan.resumes
        if init is None:
            return False
        session = Session(self._context, init, self._plan.limit_bytes)
        try:
            session.open_outputs()
            if session.are_of_rust(_TELLING_S):
                for position, rank in enumerate(self._plan.ranks):
                    session.add_rank(position, rank, self._plan.describe(rank, init).to_wire())
                session.is_resumed = True
        except (AddressError, zmq.ZMQError):
            session.is_resumed = False
        if not session.is_resumed:
            session.close()
            return False
        # Nobody has heard these.
        for part in self._ranks:
            part.monitor.close()
            part.handshake.close(0)
        self._ranks.clear()
        self._session = session
        return True

    # Deadlines.

    def _next_wake(self, next_reminder: float) -> float:
        moments = [next_reminder, *(part.started_at for part in self._ranks if part.state is _State.STARTING)]
        if self._plan.timeout_s:
            moments.append(self._give_up_at)
        doubt = self._plan.abandoned.next_deadline() if self._plan.abandoned is not None else None
        if doubt is not None:
            moments.append(doubt)
        return min(moments)

    @property
    def _give_up_at(self) -> float:
        """When trying has taken too long, apart from a start that has begun."""
        startup_s = 0.0 if self._session is None else self._plan.startup_s + self._as_spoiled.delay_s
        return self._started + self._plan.timeout_s + startup_s

    def _check_timeout(self) -> None:
        if self._plan.timeout_s and self._clock() >= self._give_up_at:
            raise JoinTimeoutError(
                f"no frontend joined within {self._plan.timeout_s:g} s at {self._plan.address}: "
                f"still waiting for {self._waiting_for()} ({self._hint(is_over=True)})"
            )
