# SPDX-License-Identifier: Apache-2.0
"""One rank: requests arrive, steps are made, encoded messages leave.

Accepted requests wait until the next step, run from it on and leave with their last token. What a method returns is to
be sent, in that order.
"""

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from mockengine.engine.calls import Calls
from mockengine.engine.config import EngineConfig
from mockengine.engine.control import FAULT_TOLERANCE, SHUTTING_DOWN
from mockengine.engine.dialect import Dialect
from mockengine.engine.kv_transfer import KvTransfer, has_kv_transfer_params, read_kv_transfer
from mockengine.engine.observer import Observer
from mockengine.engine.outgoing import COORDINATOR, Outbound, Outgoing
from mockengine.engine.parts import make_parts
from mockengine.engine.pausing import ENGINE_PAUSED
from mockengine.engine.pooled import PooledReplies
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduled import KvEventSink
from mockengine.engine.scheduler import PauseState
from mockengine.engine.sessions import Outcome, Sessions, Turn
from mockengine.engine.waves import Wave
from mockengine.replies.asked import ReplyError
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
    UtilityReply,
    WaveComplete,
)
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, SamplingParams
from mockengine.wire.utility import UtilityCall, failure_message
from mockengine.wire.values import shown


class EngineCore:
    """The state of one rank towards one frontend.

    Attributes:
        rank: its index.
        wave: where it is in the waves of a mixture of experts.

    """

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        dialect: Dialect,
        observer: Observer,
        kv_event_sink: KvEventSink | None = None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            rank: its index.
            config: what it plays.
            dialect: of the frontend, which all ranks share.
            observer: hears of requests and messages.
            kv_event_sink: hears of what happens to blocks of the KV cache, where there is one.

        """
        self.rank = rank
        self.wave = Wave()
        self._config = config
        self._planner = Planner(config.replies, config.max_model_len, config.most_tokens_per_step)
        self._dialect = dialect
        self._observer = observer
        parts = make_parts(rank, config, dialect, kv_event_sink, self._abort_running)
        self._runner = parts.runner
        self._adapters = parts.adapters
        self._pausing = parts.pausing
        self._weights = parts.weights
        self._mm_cache = parts.mm_cache
        self._sessions = Sessions(self._runner, self._begin_turn)
        self._pooled = PooledReplies()
        self._calls = Calls(parts.control, self._reply, self._is_idle)
        self._outgoing = Outgoing(rank, dialect, self._weights.version)
        self._shutting_down = False
        # Messages that came while the rank was busy, and from the first call on that came while a step was computed:
        # a real engine reads them between steps.
        self._inbox: deque[tuple[Message, int]] = deque()

    # What comes in.

    def receive(self, message: Message, client: int, now: float) -> list[Outbound]:
        """Take one message that arrived on the socket of `client` (or `COORDINATOR`); return what is to be sent."""
        if client == COORDINATOR and isinstance(message, Add | Abort | UtilityCall):
            reason = "only START_DP_WAVE comes from a coordinator"
            return self._unreadable(Unreadable(reason, type(message).__name__, (), flaw=Flaw.MISDIRECTED), client, now)
        if not self._must_wait(message):
            return self._take_in(message, client, now) + self._calls.go_on(now)
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
            case StartDpWave(wave, exclude):
                if self._config.has_waves and not self._pausing.is_paused:
                    self.wave.woken(self.rank, wave, exclude)
                return []
            case Unreadable():
                return self._unreadable(message, client, now)

    def _empty_inbox(self, now: float) -> list[Outbound]:
        """Take in what came meanwhile, as far as it does not make the rank busy again."""
        outbound: list[Outbound] = []
        while self._inbox and not self._is_busy:
            outbound += self._take_in(*self._inbox.popleft(), now)
        if not self._is_busy:
            for outcome in self._sessions.take_arrived(now):
                outbound += self._follow(outcome, now)
        return outbound

    def begin_shutdown(self) -> None:
        """Accept nothing any more; what runs goes on."""
        self._shutting_down = True

    def abort_everything(self, now: float) -> list[Outbound]:
        """End all requests with an ABORT output, as for a shutdown, and calls with a failure."""
        outbound = self._calls.give_up(SHUTTING_DOWN, now)
        while self._inbox:
            outbound += self._empty_inbox(now)
            outbound += self._calls.give_up(SHUTTING_DOWN, now)
        return [*outbound, *self._end([*self._runner.take_all(), *self._pooled.take_all()], now)]

    def _abort_running(self, now: float) -> list[Outbound]:
        return self._end([*self._runner.abort_all(), *self._pooled.take_all()], now)

    def _end(self, requests: Sequence[Request], now: float) -> list[Outbound]:
        """Tell clients that the engine has aborted requests, and all sessions."""
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for request in requests:
            if request.pooling is not None:
                request.pooling.give_up()
            self._report_finished(request, FinishReason.ABORT, now)
            output = _last_output(request.request_id, FinishReason.ABORT, is_pooling=request.pooling is not None)
            by_client.setdefault(request.client, []).append(output)
        for asked in self._sessions.forget_all():
            by_client.setdefault(asked.client_index, []).append(_last_output(asked.request_id, FinishReason.ABORT))
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
        return outbound + self._calls.go_on(now)

    def _go_on_after_call(self, now: float) -> list[Outbound]:
        """Go on if a call does not keep the rank busy any more."""
        if self._calls.busy_until is not None and now < self._calls.busy_until:
            return []
        if self._runner.pause_state is not PauseState.PAUSED_ALL:
            self._runner.stand_still(self._calls.busy_s)
        outbound = self._calls.end_busy(now)
        outbound += self._empty_inbox(now)
        return outbound + self._calls.go_on(now)

    def _is_runner_due(self, now: float, blocked: AbstractSet[int]) -> bool:
        due = self._runner.due(now, blocked)
        return due is not None and due <= now

    def end_wave(self, now: float) -> list[Outbound]:
        """End the wave, every rank being idle; rank 0 tells the coordinator."""
        ended = self.wave.complete()
        return [self._outgoing.encode(COORDINATOR, WaveComplete(self.rank, now, ended))] if self.rank == 0 else []

    # Requests.

    def _add(self, request: EngineCoreRequest, arrived_from: int, now: float) -> list[Outbound]:
        contradiction = self._dialect.learn_from_request(request)
        if contradiction is not None:
            self._observer.release_contradicted(contradiction, request.items)
        if request.client_index >= self._config.clients:
            reason = f"client_index {request.client_index} where the frontend has {self._config.clients} clients"
            return self._refuse(request, arrived_from, _invalid(reason), now)
        is_heard = request.request_id in self._sessions
        refusal = None if is_heard and not request.resumable else self._refusal(request)
        if is_heard:
            return self._follow(self._sessions.hear(request, refusal, now), now)
        if self._pausing.rejects_new and refusal is None and not request.abort_immediately:
            # More input of what runs is not new, and was heard above.
            return self._refuse(request, request.client_index, self._problem(request) or ENGINE_PAUSED, now)
        if request.resumable and not request.abort_immediately and request.request_id not in self._runner:
            return self._follow(self._sessions.open(request, refusal, now), now)
        if refusal is not None:
            return [self._final_outputs(request.client_index, [refusal], now)]
        problem = self._problem(request)
        client = request.client_index
        return self._accept(request, now) if problem is None else self._refuse(request, client, problem, now)

    def _accept(self, request: EngineCoreRequest, now: float) -> list[Outbound]:
        accepted = self._plan(request, now)
        if isinstance(accepted, RequestError):
            return self._refuse(request, request.client_index, accepted, now)
        if request.abort_immediately:
            self._report_finished(accepted, FinishReason.ABORT, now)
            self._note_finished(accepted)
            return []
        self._runner.add(accepted, request)
        return self._start_wave(request.current_wave, now)

    def _plan(self, request: EngineCoreRequest, now: float, *, is_first_turn: bool = True) -> Request | RequestError:
        """Return an accepted request, or why it cannot be served."""
        try:
            plan = self._planner.plan(request)
        except ReplyError as error:
            return _invalid(str(error))
        params = request.sampling_params or SamplingParams()
        accepted = Request(request, plan, now, is_first_turn=is_first_turn)
        if has_kv_transfer_params(params.extra_args):
            accepted.kv_transfer = self._kv_transfer(request, params)
        self._observer.request_started(accepted.served(self.rank))
        return accepted

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

    def _kv_transfer(self, request: EngineCoreRequest, params: SamplingParams) -> KvTransfer | None:
        """Return what a request asks of disaggregation; what cannot be done of it costs a warning, as in vLLM."""
        transfer: KvTransfer | None = None
        problem: str | None = "kv_role is none"
        if self._config.kv_transfer is not None:
            num_tokens, block_size = request.num_prompt_tokens, self._config.block_size
            transfer, problem = read_kv_transfer(params.extra_args, num_tokens, block_size)
        if problem is not None:
            self._observer.transfer_ignored(request.request_id, self.rank, request.client_index, problem)
        return transfer

    def _problem(self, request: EngineCoreRequest) -> RequestError | None:
        pooling = request.pooling_params
        if pooling is None and request.sampling_params is None:
            return _invalid("neither sampling_params nor pooling_params are set")
        supported = self._config.supported_tasks
        if not (self._config.generates if pooling is None else pooling.task in supported):
            task = "generate" if pooling is None else pooling.task
            return _invalid(f"the task {shown(task)} is none of supported_tasks, which are {', '.join(supported)}")
        if request.request_id in self._runner or request.request_id in self._pooled:
            return _invalid("a request of the same id is in flight")
        if request.num_prompt_tokens == 0:
            return _invalid("the prompt is empty")
        if request.num_prompt_tokens > self._config.max_model_len:
            return _invalid(
                f"the prompt has {request.num_prompt_tokens} tokens where max_model_len is {self._config.max_model_len}"
            )
        return self._lora_problem(request)

    def _lora_problem(self, request: EngineCoreRequest) -> RequestError | None:
        if request.lora_request is None:
            return None
        if self._adapters is None:
            return _invalid(f"LoRA is not enabled (asked for {shown(request.lora_request.name)})")
        problem = self._adapters.problem(request.lora_request)
        return None if problem is None else _invalid(problem)

    def _refusal(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Return how a request ends at once whatever it asks, if it does."""
        is_pooling = request.pooling_params is not None
        if self._shutting_down:
            reason, output = SHUTTING_DOWN, _last_output(request.request_id, FinishReason.ABORT, is_pooling=is_pooling)
        else:
            missing = self._mm_cache.missing(request.mm_features)
            if not missing:
                return None
            what = f"{len(missing)} of {len(request.mm_features)} multimodal items"
            reason = f"cache miss: the engine does not hold the data of {what} (send the request again)"
            error = RequestError("multimodal_cache_miss", reason, retryable=True)
            output = _last_output(request.request_id, FinishReason.ERROR, error, is_pooling=is_pooling)
            output = replace(output, mm_cache_miss_hashes=missing)
        self._observer.request_refused(request.request_id, self.rank, request.client_index, reason)
        return output

    def _refuse(self, request: EngineCoreRequest, client: int, error: RequestError, now: float) -> list[Outbound]:
        self._observer.request_refused(request.request_id, self.rank, client, error.message)
        is_pooling = request.pooling_params is not None
        return [self._error_output(request.request_id, client, error, now, is_pooling=is_pooling)]

    def _error_output(
        self, request_id: str, client: int, error: RequestError, now: float, *, is_pooling: bool
    ) -> Outbound:
        output = _last_output(request_id, FinishReason.ERROR, error, is_pooling=is_pooling)
        return self._final_outputs(client, [output], now)

    def _abort(self, request_ids: tuple[str, ...], now: float) -> list[Outbound]:
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
        heard = turn.heard
        problem = _invalid(turn.problem) if turn.problem else self._problem(turn.asked)
        begun = problem or self._plan(turn.asked, now, is_first_turn=turn.is_first)
        if isinstance(begun, Request):
            return begun
        self._observer.request_refused(heard.request_id, self.rank, turn.asked.client_index, begun.message)
        is_pooling = heard.pooling_params is not None
        return _last_output(heard.request_id, FinishReason.ERROR, begun, is_pooling=is_pooling)

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
        if self._shutting_down:
            return [self._reply(call, arrived_from, None, SHUTTING_DOWN, now)]
        was_paused = self._pausing.is_paused
        outbound = self._calls.begin(call, arrived_from, now)
        if was_paused and not self._pausing.is_paused and self.num_requests:
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
            refusal = _last_output(message.request_id, FinishReason.ERROR, error)
            return self._follow(self._sessions.hear(heard, refusal, now), now)
        if message.request_id is None or message.request_id in self._runner or message.request_id in self._pooled:
            return []
        return [self._error_output(message.request_id, client, error, now, is_pooling=message.is_pooling)]

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


def _invalid(message: str) -> RequestError:
    """Make the error that a frontend of 0.33 answers with an HTTP 400."""
    return RequestError("validation_error", message)


def _last_output(
    request_id: str, reason: FinishReason, error: RequestError | None = None, *, is_pooling: bool = False
) -> EngineCoreOutput:
    """Make an output that ends a request without a token; one for pooling needs a tensor whatever its end."""
    return EngineCoreOutput(
        request_id=request_id,
        pooling_output=EMPTY_POOLING_OUTPUT if is_pooling else None,
        finish_reason=reason,
        error=error,
    )
