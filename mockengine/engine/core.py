# SPDX-License-Identifier: Apache-2.0
"""One rank: requests arrive, steps are made, encoded messages leave.

Accepted requests wait until the next step, run from it on and leave with their last token. What a method returns is to
be sent, in that order.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from mockengine.engine.calls import Calls
from mockengine.engine.config import EngineConfig
from mockengine.engine.control import FAULT_TOLERANCE, SHUTTING_DOWN
from mockengine.engine.dialect import Dialect
from mockengine.engine.faulty import RankFaults
from mockengine.engine.observer import Observer, Served
from mockengine.engine.outgoing import COORDINATOR, Outbound, Outgoing
from mockengine.engine.parts import make_parts
from mockengine.engine.pausing import ENGINE_PAUSED
from mockengine.engine.pooled import PooledReplies
from mockengine.engine.reception import Reception, invalid, last_output
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduled import KvEventSink
from mockengine.engine.scheduler import PauseState
from mockengine.engine.sessions import Outcome, Sessions, Turn
from mockengine.engine.waves import Wave
from mockengine.faults.injector import Injector
from mockengine.replies.planner import Planner
from mockengine.wire.codec import Flaw
from mockengine.wire.messages import Abort, Add, Message, StartDpWave, Unreadable
from mockengine.wire.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    RequestError,
    StartWave,
    StepOutputs,
    UtilityReply,
    WaveComplete,
)
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.utility import UtilityCall, failure_message

ENGINE_DRAINING: Final = RequestError(
    "engine_draining", "the engine is drained: it takes no requests until it rejoins (ask another one)", retryable=True
)
ENGINE_RESTARTED: Final = RequestError(
    "engine_restarted",
    "the engine was killed while it served this request, and is there again (ask again)",
    retryable=True,
)


class EngineCore:
    """The state of one rank towards one frontend.

    Attributes:
        rank: its index.
        wave: where it is in the waves of a mixture of experts.
        faults: what goes wrong on it.
        is_draining: whether new requests are refused, such that others may serve them, while those that run go on.

    """

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        dialect: Dialect,
        observer: Observer,
        kv_event_sink: KvEventSink | None = None,
        injector: Injector | None = None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            rank: its index.
            config: what it plays.
            dialect: of the frontend, which all ranks share.
            observer: hears of requests and messages.
            kv_event_sink: hears of what happens to blocks of the KV cache, where there is one.
            injector: decides what goes wrong, which all ranks share; None is nothing.

        """
        self.rank = rank
        self.wave = Wave()
        self.is_draining = False
        self.faults = RankFaults(rank, injector or Injector((), config.replies.seed), dialect)
        self._config = config
        self._dialect = dialect
        self._observer = observer
        parts = make_parts(rank, config, dialect, kv_event_sink, self._abort_running)
        self._runner = parts.runner
        self._pausing = parts.pausing
        self._weights = parts.weights
        self._sessions = Sessions(self._runner, self._begin_turn)
        self._pooled = PooledReplies()
        self._reception = Reception(
            rank, config, observer, parts.adapters, parts.mm_cache, self._is_in_flight, self.faults
        )
        self._calls = Calls(parts.control, self._reply, self._is_idle)
        self._outgoing = Outgoing(rank, dialect, self._weights.version)
        self._was_paused = False
        # Messages that came while the rank was busy, and from the first call on that came while a step was computed:
        # a real engine reads them between steps.
        self._inbox: deque[tuple[Message, int]] = deque()

    # What comes in.

    def receive(self, message: Message, client: int, now: float) -> list[Outbound]:
        """Take one message that arrived on the socket of `client` (or `COORDINATOR`); return what is to be sent."""
        return self.faults.edited(self._receive(message, client, now))

    def _receive(self, message: Message, client: int, now: float) -> list[Outbound]:
        if client == COORDINATOR and isinstance(message, Add | Abort | UtilityCall):
            reason = "only START_DP_WAVE comes from a coordinator"
            return self._unreadable(Unreadable(reason, type(message).__name__, (), flaw=Flaw.MISDIRECTED), client, now)
        if not self._must_wait(message):
            return self._take_in(message, client, now) + self._go_on_with_calls(now)
        self._inbox.append((message, client))
        # What is computed for an aborted request is dropped at once.
        return self._abort(message.request_ids, now) if isinstance(message, Abort) and not self._is_busy else []

    def _must_wait(self, message: Message) -> bool:
        """Whether a message is to be taken in later."""
        if isinstance(message, Unreadable):
            return False
        if isinstance(message, UtilityCall):
            return message.method != FAULT_TOLERANCE and (self._is_busy or self._runner.is_computing)
        return self._is_busy or (bool(self._inbox) and self._runner.is_computing)

    def _take_in(self, message: Message, client: int, now: float) -> list[Outbound]:
        match message:
            case Add(request):
                return self._add(request, client, now)
            case Abort(request_ids):
                return self._abort(request_ids, now)
            case UtilityCall():
                return self._call(message, client, now)
            case StartDpWave():
                return self._wake(message, now)
            case Unreadable():
                return self._unreadable(message, client, now)

    def _empty_inbox(self, now: float) -> list[Outbound]:
        """Take in what came meanwhile, as far as it does not make the rank busy again."""
        outbound = self._take_arrived_turns(now)
        while self._inbox and not self._is_busy:
            outbound += self._take_in(*self._inbox.popleft(), now)
            # In the order of their arrival, although one more step is computed.
            outbound += self._take_arrived_turns(now)
        return outbound

    def _take_arrived_turns(self, now: float) -> list[Outbound]:
        return [sent for outcome in self._sessions.take_arrived(now) for sent in self._follow(outcome, now)]

    def begin_shutdown(self) -> None:
        """Accept nothing any more; what runs goes on."""
        self._reception.is_closed = True

    def abort_everything(self, now: float) -> list[Outbound]:
        """End all requests with an ABORT output, as for a shutdown, and calls with a failure."""
        outbound = self._calls.give_up(SHUTTING_DOWN, now)
        while self._inbox:
            outbound += self._empty_inbox(now)
            outbound += self._calls.give_up(SHUTTING_DOWN, now)
        outbound += self._end([*self._runner.take_all(), *self._pooled.take_all()], now)
        return self.faults.edited(outbound)

    def _abort_running(self, now: float) -> list[Outbound]:
        return self._end([*self._runner.abort_all(), *self._pooled.take_all()], now)

    def _end(self, requests: Sequence[Request], now: float) -> list[Outbound]:
        """Tell clients that the engine has aborted requests, and all sessions."""
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for request in requests:
            if request.pooling is not None:
                request.pooling.give_up()
            self._report_finished(request, FinishReason.ABORT, now)
            output = last_output(request.request_id, FinishReason.ABORT, is_pooling=request.pooling is not None)
            by_client.setdefault(request.client, []).append(output)
        for asked in self._sessions.forget_all():
            by_client.setdefault(asked.client_index, []).append(last_output(asked.request_id, FinishReason.ABORT))
        return [self._final_outputs(client, outputs, now) for client, outputs in by_client.items()]

    # What goes on.

    @property
    def num_requests(self) -> int:
        """Requests waiting and running."""
        return self.num_running + self.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that are stepped, or whose reply is computed."""
        return self._runner.num_running + len(self._pooled)

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not stepped yet."""
        return self._runner.num_waiting

    @property
    def can_go_on(self) -> bool:
        """Whether requests are there that may be stepped, or the rank is busy with a call."""
        return self._is_busy or bool(self._pooled) or (bool(self.num_requests) and not self._runner.is_idle)

    def next_deadline(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the next step is due, `now` or earlier being at once, or None while there is nothing to do.

        Args:
            now: the time, in engine seconds.
            blocked: clients that take no more output for now.

        """
        if self._calls.busy_until is not None:
            return self._calls.busy_until
        due = self._runner.due(now, blocked)
        if self._pooled and self._pooled.has_some_for_others_than(blocked):
            return now if due is None else min(due, now)
        if due is not None and (self.num_requests or self._runner.is_computing):
            # What is due may be a transfer, long after.
            is_report_due = self._outgoing.has_finished_ids and self._runner.may_step_anytime
            return min(due, now) if is_report_due else due
        return now if self._has_news else due

    @property
    def _has_load(self) -> bool:
        """Whether there are requests, or sessions that wait for input and hold something meanwhile."""
        return bool(self.num_requests or self._runner.num_paused)

    @property
    def _has_news(self) -> bool:
        """Whether a client is to hear something although nothing is to be stepped."""
        return self._outgoing.has_finished_ids or (self._outgoing.has_been_told_of_load and not self._has_load)

    @property
    def _is_busy(self) -> bool:
        return self._calls.busy_until is not None

    def _is_idle(self) -> bool:
        """Whether nothing is left to be stepped, nor to be said of that."""
        return self._runner.is_idle and not self._pooled and not self._has_news

    def step(self, now: float, blocked: AbstractSet[int] = frozenset(), most_steps: int = 1) -> list[Outbound]:
        """Let every request whose client takes output say its next tokens.

        Args:
            now: the time, in engine seconds.
            blocked: clients that take no more output for now.
            most_steps: how many steps may be made at once, where they have no pace and differ in tokens alone.

        Returns:
            A message per client with something to hear, and per step; statistics go to the first of them. When nothing
            is left to do, every client that heard of load hears that it is gone.

        """
        return self.faults.edited(self._step(now, blocked, most_steps))

    def _step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> list[Outbound]:
        if self._is_busy:
            return self._go_on_after_call(now)
        outbound = self._load_for_coordinator(now)
        is_runners_turn = not self._pooled or self._is_runner_due(now, blocked)
        # What is said once belongs to one step.
        is_said_once = self._outgoing.has_finished_ids or self._pooled
        spoken = self._runner.step(now, blocked, 1 if is_said_once else most_steps) if is_runners_turn else Spoken()
        self._pooled.complete(spoken, blocked)
        self._observer.tokens_said(spoken.tokens)
        refusals: list[Outbound] = []
        for request, reason in spoken.finished:
            self._report_finished(request, reason, now)
            if request.request_id in self._sessions:
                refusals += self._end_turn(request, spoken, now)
            else:
                self._note_finished(request)
        outbound += self._outgoing.step(spoken, self._runner.take_stats, now, blocked)
        outbound += refusals
        if spoken.is_reported:
            outbound += self._empty_inbox(now)
        if is_runners_turn:
            # Only now: the rows of what was said lie where the running sets have them.
            self._runner.settle(spoken, now if self._calls.busy_until is None else self._calls.busy_until)
        outbound += self._load_for_coordinator(now)
        # A runner that reports every step makes another one, in which nothing is said.
        makes_another = self._runner.is_computing or (spoken.is_reported and bool(spoken.said))
        if not self._has_load and not makes_another:
            outbound += self._outgoing.load_is_gone(self._runner.take_stats, now)
        return outbound + self._go_on_with_calls(now)

    def _go_on_after_call(self, now: float) -> list[Outbound]:
        """Go on if a call does not keep the rank busy any more."""
        if self._calls.busy_until is not None and now < self._calls.busy_until:
            return []
        if self._runner.pause_state is not PauseState.PAUSED_ALL:
            self._runner.stand_still(self._calls.busy_s)
        outbound = self._calls.end_busy(now)
        outbound += self._empty_inbox(now)
        return outbound + self._go_on_with_calls(now)

    def _is_runner_due(self, now: float, blocked: AbstractSet[int]) -> bool:
        due = self._runner.due(now, blocked)
        return due is not None and due <= now

    def disown(self, lost: Mapping[int, Sequence[str]], now: float) -> list[Outbound]:
        """Tell clients that requests of an engine before this one are lost, and that there is no load.

        Args:
            lost: their ids, by client.
            now: the time, in engine seconds.

        """
        return [
            self._outgoing.encode(
                client,
                StepOutputs(
                    engine_index=self.rank,
                    timestamp=now,
                    outputs=[last_output(each, FinishReason.ERROR, ENGINE_RESTARTED) for each in lost.get(client, ())],
                    scheduler_stats=SchedulerStats(),
                    finished_requests=lost.get(client, ()) if self._config.reports_finished_requests else (),
                ),
            )
            for client in range(self._config.clients)
        ]

    # What others may do to it between two steps.

    def reconfigure(self, config: EngineConfig, planner: Planner) -> None:
        """Go on in another way: replies from the next request on, times and limits from the next step on.

        Args:
            config: as before, but for replies, timing and limits.
            planner: of replies as `config` has them.

        """
        self._reception.reconfigure(config, planner)
        self._runner.reconfigure(config)

    def in_flight(self) -> Iterator[tuple[Served, float]]:
        """Yield every request as far as it has got, and when it was accepted."""
        pooled = ((request, request.output_tokens) for request in self._pooled.requests())
        for request, tokens in chain(self._runner.in_flight(), pooled):
            yield replace(request.served(self.rank), output_tokens=tokens), request.accepted_at

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        return self._runner.load()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is stepped, or admitted, because of a call."""
        return self._pausing.is_paused

    def occupy_kv_cache(self, share: float) -> None:
        """Have that share of the KV cache held by nobody, as far as it is free; 0 frees it."""
        self._runner.occupy_kv_cache(share)

    def end_wave(self, now: float) -> list[Outbound]:
        """End the wave, every rank being idle; rank 0 tells the coordinator."""
        ended = self.wave.complete()
        if self.rank:
            return []
        return self.faults.edited([self._outgoing.encode(COORDINATOR, WaveComplete(self.rank, now, ended))])

    # Requests.

    def _add(self, request: EngineCoreRequest, arrived_from: int, now: float) -> list[Outbound]:
        contradiction = self._dialect.learn_from_request(request)
        if contradiction is not None:
            self._observer.release_contradicted(contradiction, request.items)
        if request.client_index >= self._config.clients:
            reason = f"client_index {request.client_index} where the frontend has {self._config.clients} clients"
            return self._refuse(request, arrived_from, invalid(reason), now)
        is_heard = request.request_id in self._sessions
        refusal = None if is_heard and not request.resumable else self._reception.refusal(request)
        if is_heard:
            return self._follow(self._sessions.hear(request, refusal, now), now)
        turned_away = ENGINE_PAUSED if self._pausing.rejects_new else ENGINE_DRAINING if self.is_draining else None
        if turned_away is not None and refusal is None and not request.abort_immediately:
            # More input of what runs is not new, and was heard above.
            return self._refuse(request, request.client_index, self._reception.problem(request) or turned_away, now)
        if request.resumable and not request.abort_immediately and request.request_id not in self._runner:
            return self._follow(self._sessions.open(request, refusal, now), now)
        if refusal is not None:
            return [self._final_outputs(request.client_index, [refusal], now)]
        problem = self._reception.problem(request)
        client = request.client_index
        return self._accept(request, now) if problem is None else self._refuse(request, client, problem, now)

    def _accept(self, request: EngineCoreRequest, now: float) -> list[Outbound]:
        accepted = self._reception.plan(request, now)
        if isinstance(accepted, RequestError):
            return self._refuse(request, request.client_index, accepted, now)
        if request.abort_immediately:
            self._report_finished(accepted, FinishReason.ABORT, now)
            self._note_finished(accepted)
            return []
        self._runner.add(accepted, request)
        return self._start_wave(request.current_wave, now)

    def _start_wave(self, stamped: int, now: float) -> list[Outbound]:
        """Begin a wave for requests that there are, unless they are to wait until a pause ends."""
        if not self._config.has_waves:
            return []
        if self._pausing.is_paused:
            self.wave.noted(stamped)
            return []
        if not self.wave.request_arrived(stamped):
            return []
        return [self._outgoing.encode(COORDINATOR, StartWave(self.rank, now, self.wave.number))]

    def _wake(self, woken: StartDpWave, now: float) -> list[Outbound]:
        """Take part in a wave; rank 0 tells the coordinator of one that it had no part in, as a real engine does."""
        if not self._config.has_waves or self._pausing.is_paused:
            return []
        begins = self.wave.woken(self.rank, woken.wave, woken.exclude)
        if not begins or self.rank:
            return []
        return [self._outgoing.encode(COORDINATOR, StartWave(self.rank, now, self.wave.number))]

    def _is_in_flight(self, request_id: str) -> bool:
        """Whether there is a request of an id, or its reply is still to be said."""
        return request_id in self._runner or request_id in self._pooled

    def _refuse(self, request: EngineCoreRequest, client: int, error: RequestError, now: float) -> list[Outbound]:
        return [self._final_outputs(client, [self._reception.refuse(request, client, error)], now)]

    def _abort(self, request_ids: tuple[str, ...], now: float) -> list[Outbound]:
        self.faults.forget(request_ids)
        for request_id in request_ids:
            request = self._runner.take(request_id) or self._pooled.take(request_id)
            first = self._sessions.forget(request_id)
            if request is not None:
                if request.pooling is not None:
                    request.pooling.give_up()
                self._report_finished(request, FinishReason.ABORT, now)
            gone = request or first
            if gone is not None:
                self._note_finished(gone)
        return []

    # Sessions.

    def _begin_turn(self, turn: Turn, now: float) -> Request | EngineCoreOutput:
        reception = self._reception
        problem = invalid(turn.problem) if turn.problem else reception.problem(turn.asked)
        begun = problem or reception.plan(turn.asked, now, is_first_turn=turn.is_first)
        return begun if isinstance(begun, Request) else reception.refuse(turn.heard, turn.asked.client_index, begun)

    def _end_turn(self, request: Request, spoken: Spoken, now: float) -> list[Outbound]:
        outcome = self._sessions.end_turn(request, now)
        if outcome.begun is not None:
            # As in vLLM, with the turn that has ended.
            spoken.tell(request, EngineCoreEvent(EventType.QUEUED, now))
        return self._follow(outcome, now)

    def _follow(self, outcome: Outcome, now: float) -> list[Outbound]:
        """Tell what came of a turn."""
        outbound = []
        if outcome.refused:
            outbound.append(self._final_outputs(outcome.first.client_index, list(outcome.refused), now))
        if outcome.has_ended:
            self._note_finished(outcome.first)
        if outcome.begun is not None:
            outbound += self._start_wave(outcome.begun.heard.current_wave, now)
        return outbound

    # Utility calls and what cannot be read.

    def _call(self, call: UtilityCall, arrived_from: int, now: float) -> list[Outbound]:
        self._dialect.learn_from_call(call.method)
        if self._reception.is_closed:
            return [self._reply(call, arrived_from, None, SHUTTING_DOWN, now)]
        self.faults.strike_call(call, now)
        return self._calls.begin(call, arrived_from, now)

    def _go_on_with_calls(self, now: float) -> list[Outbound]:
        """Go on with calls that wait until the rank is idle, and with the wave if one has ended a pause."""
        outbound = self._calls.go_on(now)
        was_paused, self._was_paused = self._was_paused, self._pausing.is_paused
        if was_paused and not self._was_paused and self.num_requests:
            outbound += self._start_wave(0, now)
        return outbound

    def _reply(self, call: UtilityCall, arrived_from: int, result: Any, failure: str | None, now: float) -> Outbound:
        self._outgoing.weight_version = self._weights.version
        client = call.client_index if 0 <= call.client_index < self._config.clients else arrived_from
        return self._outgoing.encode(client, UtilityReply(self.rank, now, call.call_id, result, failure))

    def _unreadable(self, message: Unreadable, client: int, now: float) -> list[Outbound]:
        """Answer what can be answered, so that no client waits for ever; a request in flight is left alone."""
        self._observer.message_dropped(message, self.rank, None if client == COORDINATOR else client)
        if client == COORDINATOR:
            return []
        if message.call is not None:
            failure = failure_message(message.call.method, message.reason)
            return [self._outgoing.encode(client, UtilityReply(self.rank, now, message.call.call_id, None, failure))]
        error = RequestError("unreadable_request", f"the engine could not read the request: {message.reason}")
        if message.request_id is not None and message.request_id in self._sessions:
            heard = EngineCoreRequest(request_id=message.request_id, resumable=True)
            refusal = last_output(message.request_id, FinishReason.ERROR, error)
            return self._follow(self._sessions.hear(heard, refusal, now), now)
        if message.request_id is None or self._is_in_flight(message.request_id):
            return []
        output = last_output(message.request_id, FinishReason.ERROR, error, is_pooling=message.is_pooling)
        return [self._final_outputs(client, [output], now)]

    # Bookkeeping.

    def _final_outputs(self, client: int, outputs: list[EngineCoreOutput], now: float) -> Outbound:
        """Make the message that ends requests outside of a step, and reports them as finished."""
        here = (self._runner, self._pooled, self._sessions)
        ids = [output.request_id for output in outputs if not any(output.request_id in each for each in here)]
        return self._outgoing.final_outputs(client, outputs, ids, now)

    def _load_for_coordinator(self, now: float) -> list[Outbound]:
        if not self._config.has_coordinator:
            return []
        wave = self.wave.number if self._config.has_waves else 0
        return self._outgoing.load_for_coordinator(self._runner.load(), wave, now)

    def _note_finished(self, request: Request | EngineCoreRequest) -> None:
        if self._config.reports_finished_requests:
            client = request.client if isinstance(request, Request) else request.client_index
            self._outgoing.note_finished(client, request.request_id)

    def _report_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        self._observer.request_finished(request.served(self.rank), reason.name.lower(), now - request.accepted_at)
