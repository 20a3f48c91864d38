# SPDX-License-Identifier: Apache-2.0
"""One rank: requests arrive, steps are made, encoded messages leave.

Accepted requests wait until the next step, run from it on and leave with their last token. What a method returns is to
be sent, in that order.

A running request is *speaking* while it has more to say than tokens, which is with its first output and its last one.
In between it is in the running set of its client, where it is a row among others.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from mockengine.engine.config import EngineConfig
from mockengine.engine.control import SHUTTING_DOWN, Control, UtilityError
from mockengine.engine.dialect import Dialect
from mockengine.engine.observer import Observer
from mockengine.engine.outgoing import COORDINATOR, Outbound, Outgoing, Said
from mockengine.engine.pace import Pace
from mockengine.engine.requests import Request
from mockengine.engine.running import RunningSet
from mockengine.engine.waves import Wave
from mockengine.replies import TokenSource
from mockengine.replies.key import reply_key
from mockengine.replies.length import plan_ending
from mockengine.wire.codec import Flaw
from mockengine.wire.messages import Abort, Add, Message, StartDpWave, Unreadable
from mockengine.wire.outputs import (
    EngineCoreOutput,
    FinishReason,
    RequestError,
    StartWave,
    UtilityReply,
    WaveComplete,
)
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, SamplingParams
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.utility import UtilityCall, failure_message
from mockengine.wire.values import shown


class EngineCore:
    """The state of one rank towards one frontend.

    Attributes:
        rank: its index.
        wave: where it is in the waves of a mixture of experts.
        num_requests: requests waiting and running.

    """

    def __init__(
        self, rank: int, config: EngineConfig, source: TokenSource, dialect: Dialect, observer: Observer
    ) -> None:
        self.rank = rank
        self.wave = Wave()
        self._config = config
        self._source = source
        self._dialect = dialect
        self._observer = observer
        self._control = Control(config.block_size, dialect)
        self._waiting: dict[str, Request] = {}
        self._speaking: dict[str, Request] = {}
        self._sets: dict[int, RunningSet] = {}
        self.num_requests = 0
        self._num_of_client: Counter[int] = Counter()
        self._outgoing = Outgoing(rank, dialect, self._control.weight_version)
        self._pace = Pace(config.itl_s)
        self._last_load = SchedulerStats()
        self._shutting_down = False

    # What comes in.

    def receive(self, message: Message, client: int, now: float) -> list[Outbound]:
        """Take one message that arrived on the socket of `client` (or `COORDINATOR`); return what is to be sent."""
        match message:
            case Add() | Abort() | UtilityCall() if client == COORDINATOR:
                reason = "only START_DP_WAVE comes from a coordinator"
                unexpected = Unreadable(reason, type(message).__name__, (), flaw=Flaw.MISDIRECTED)
                return self._unreadable(unexpected, client, now)
            case Add(request):
                return self._add(request, client, now)
            case Abort(request_ids):
                return self._abort(request_ids, now)
            case UtilityCall():
                return self._answer(message, client, now)
            case StartDpWave(wave, exclude):
                if self._config.has_waves:
                    self.wave.woken(self.rank, wave, exclude)
                return []
            case Unreadable():
                return self._unreadable(message, client, now)

    def begin_shutdown(self) -> None:
        """Accept nothing any more; what runs goes on."""
        self._shutting_down = True

    def abort_everything(self, now: float) -> list[Outbound]:
        """End all requests with an ABORT output, as for a shutdown."""
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for running_set in self._sets.values():
            self._speaking |= {request.request_id: request for request in running_set.take_all()}
        requests = [*self._speaking.values(), *self._waiting.values()]
        self._speaking.clear()
        self._waiting.clear()
        self._num_of_client.clear()
        self.num_requests = 0
        for request in requests:
            self._report_finished(request, FinishReason.ABORT, now)
            by_client.setdefault(request.client, []).append(_last_output(request.request_id, FinishReason.ABORT))
        return [self._final_outputs(client, outputs, now) for client, outputs in by_client.items()]

    # What goes on.

    @property
    def num_running(self) -> int:
        """Requests that are stepped."""
        return self.num_requests - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not stepped yet."""
        return len(self._waiting)

    def next_deadline(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the next step is due, `now` or earlier being at once, or None while there is nothing to do.

        Args:
            now: the time, in engine seconds.
            blocked: clients that take no more output for now.

        """
        if any(client not in blocked for client in self._num_of_client):
            return self._pace.due(now)
        has_news = self._outgoing.has_finished_ids or (self._outgoing.has_been_told_of_load and not self.num_requests)
        return now if has_news else None

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
        outbound = self._load_for_coordinator(now)
        for request in self._waiting.values():
            request.schedule(now)
        self._speaking |= self._waiting
        self._waiting.clear()
        said = self._advance(now, blocked, most_steps)
        outbound += self._outgoing.step(said, self._load(), now)
        # Only now: the rows of what was said lie where the sets have them.
        self._regroup(said)
        outbound += self._load_for_coordinator(now)
        if not self.num_requests:
            outbound += self._outgoing.load_is_gone(self._load(), now)
            self._pace.rest()
        else:
            self._pace.stepped(now)
        return outbound

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
        if self._shutting_down:
            self._observer.request_refused(request.request_id, self.rank, request.client_index, SHUTTING_DOWN)
            is_pooling = request.pooling_params is not None
            output = _last_output(request.request_id, FinishReason.ABORT, is_pooling=is_pooling)
            return [self._final_outputs(request.client_index, [output], now)]
        problem = self._problem(request)
        if problem is not None:
            return self._refuse(request, request.client_index, problem, now)
        return self._accept(request, now)

    def _accept(self, request: EngineCoreRequest, now: float) -> list[Outbound]:
        config = self._config
        params = request.sampling_params or SamplingParams()
        ending = plan_ending(params, request.num_prompt_tokens, config.max_model_len, config.default_output_tokens)
        key = reply_key(request, config.seed, config.seed_scope)
        accepted = Request(request, ending, key, self._source, now)
        self._observer.request_started(accepted.served(self.rank))
        if request.abort_immediately:
            self._report_finished(accepted, FinishReason.ABORT, now)
            self._note_finished(accepted)
            return []
        self._waiting[accepted.request_id] = accepted
        self._num_of_client[accepted.client] += 1
        self.num_requests += 1
        outbound: list[Outbound] = []
        if config.has_waves and self.wave.request_arrived(request.current_wave):
            outbound.append(self._outgoing.encode(COORDINATOR, StartWave(self.rank, now, self.wave.number)))
        return outbound

    def _problem(self, request: EngineCoreRequest) -> RequestError | None:
        if request.pooling_params is not None:
            return _invalid(f"this engine has no pooling task (asked for {shown(request.pooling_params.task)})")
        if request.sampling_params is None:
            return _invalid("neither sampling_params nor pooling_params are set")
        if self._in_flight(request.request_id):
            return _invalid("a request of the same id is in flight")
        if request.num_prompt_tokens == 0:
            return _invalid("the prompt is empty")
        if request.num_prompt_tokens > self._config.max_model_len:
            return _invalid(
                f"the prompt has {request.num_prompt_tokens} tokens where max_model_len is {self._config.max_model_len}"
            )
        return None

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
            request = self._take(request_id)
            if request is not None:
                self._note_gone(request)
                self._report_finished(request, FinishReason.ABORT, now)
                self._note_finished(request)
        return []

    def _advance(self, now: float, blocked: AbstractSet[int], most_steps: int) -> dict[int, Said]:
        """Let everything that runs say its next tokens; return what was said, by client."""
        said: dict[int, Said] = {}
        chunk_size = self._config.output_token_chunk_size
        tokens = 0
        sets = [(client, each) for client, each in self._sets.items() if each and client not in blocked]
        steps = self._steps_at_once([each for _, each in sets], most_steps)
        for client, running_set in sets:
            said[client] = Said(running_set.step(steps))
            tokens += len(running_set) * chunk_size * steps
        finished: list[tuple[Request, FinishReason]] = []
        for request in self._speaking.values():
            if request.client in blocked:
                continue
            output = request.advance(chunk_size)
            said.setdefault(request.client, Said()).outputs.append(output)
            tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                finished.append((request, output.finish_reason))
        self._observer.tokens_said(tokens)
        for request, reason in finished:
            del self._speaking[request.request_id]
            self._note_gone(request)
            self._report_finished(request, reason, now)
            self._note_finished(request)
        return said

    def _steps_at_once(self, sets: list[RunningSet], most: int) -> int:
        """Return how many steps differ in nothing but tokens; with a pace each has its own time."""
        if most == 1 or not sets or self._config.itl_s or self._speaking or self._outgoing.has_finished_ids:
            return 1
        for running_set in sets:
            most = running_set.most_steps(most)
        return most

    def _regroup(self, said: Mapping[int, Said]) -> None:
        """Move requests into the running set of their client when they have nothing but tokens left, and out of it."""
        chunk_size = self._config.output_token_chunk_size
        for client, what in said.items():
            running_set = self._sets.get(client)
            leavers = running_set.take_leavers() if running_set is not None else ()
            for output in what.outputs:
                request = self._speaking.get(output.request_id)
                if request is not None and request.plain_outputs_left(chunk_size) > 0:
                    del self._speaking[request.request_id]
                    if running_set is None:
                        running_set = self._sets[client] = RunningSet(self._source, chunk_size)
                    running_set.join(request)
            for request in leavers:
                self._speaking[request.request_id] = request

    # Utility calls and what cannot be read.

    def _answer(self, call: UtilityCall, arrived_from: int, now: float) -> list[Outbound]:
        self._dialect.learn_from_call(call.method)
        result, failure = None, None
        if self._shutting_down:
            failure = SHUTTING_DOWN
        else:
            try:
                result = self._control.answer(call)
                self._outgoing.weight_version = self._control.weight_version
            except UtilityError as error:
                failure = str(error)
        client = call.client_index if 0 <= call.client_index < self._config.clients else arrived_from
        return [self._outgoing.encode(client, UtilityReply(self.rank, now, call.call_id, result, failure))]

    def _unreadable(self, message: Unreadable, client: int, now: float) -> list[Outbound]:
        """Answer what can be answered, so that no client waits for ever; a request in flight is left alone."""
        self._observer.message_dropped(message, self.rank, None if client == COORDINATOR else client)
        if client == COORDINATOR:
            return []
        if message.call is not None:
            failure = failure_message(message.call.method, message.reason)
            return [self._outgoing.encode(client, UtilityReply(self.rank, now, message.call.call_id, None, failure))]
        if message.request_id is None or self._in_flight(message.request_id):
            return []
        error = RequestError("unreadable_request", f"the engine could not read the request: {message.reason}")
        return [self._error_output(message.request_id, client, error, now, is_pooling=message.is_pooling)]

    # Bookkeeping.

    def _final_outputs(self, client: int, outputs: list[EngineCoreOutput], now: float) -> Outbound:
        """Make the message that ends requests outside of a step, and reports them as finished where that counts."""
        ids = [output.request_id for output in outputs if not self._in_flight(output.request_id)]
        finished_requests = ids if self._config.reports_finished_requests else ()
        return self._outgoing.final_outputs(client, outputs, finished_requests, now)

    def _load_for_coordinator(self, now: float) -> list[Outbound]:
        if not self._config.has_coordinator:
            return []
        wave = self.wave.number if self._config.has_waves else 0
        return self._outgoing.load_for_coordinator(self._load(), wave, now)

    def _load(self) -> SchedulerStats:
        counts = (self.num_running, self.num_waiting)
        if counts != (self._last_load.num_running_reqs, self._last_load.num_waiting_reqs):
            self._last_load = SchedulerStats(num_running_reqs=counts[0], num_waiting_reqs=counts[1])
        return self._last_load

    def _in_flight(self, request_id: str) -> bool:
        if request_id in self._speaking or request_id in self._waiting:
            return True
        return any(request_id in running_set for running_set in self._sets.values())

    def _take(self, request_id: str) -> Request | None:
        """Remove a request from wherever it is."""
        for running_set in self._sets.values():
            if request_id in running_set:
                return running_set.leave(request_id)
        return self._speaking.pop(request_id, None) or self._waiting.pop(request_id, None)

    def _note_gone(self, request: Request) -> None:
        self.num_requests -= 1
        self._num_of_client[request.client] -= 1
        if not self._num_of_client[request.client]:
            del self._num_of_client[request.client]

    def _note_finished(self, request: Request) -> None:
        if self._config.reports_finished_requests:
            self._outgoing.note_finished(request.client, request.request_id)

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
