# SPDX-License-Identifier: Apache-2.0
"""One rank: requests arrive, steps are made, encoded messages leave.

Accepted requests wait until the next step, run from it on and leave with their last token. Whatever progressed in a
step shares one message per client. Nothing here is ever sent twice or half: what a method returns is to be sent, in
that order.

A running request is *speaking* while it has more to say than tokens, which is with its first output and its last one.
In between it is in the running set of its client, where it is a row among others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from mockengine.engine.config import EngineConfig
from mockengine.engine.control import SHUTTING_DOWN, Control, UtilityError
from mockengine.engine.dialect import Dialect
from mockengine.engine.observer import Observer
from mockengine.engine.pace import Pace
from mockengine.engine.requests import Request
from mockengine.engine.running import RunningSet
from mockengine.engine.waves import Wave
from mockengine.replies import TokenSource
from mockengine.replies.key import reply_key
from mockengine.replies.length import plan_ending
from mockengine.wire.batch import StepEncoder
from mockengine.wire.codec import Flaw
from mockengine.wire.messages import Abort, Add, Message, StartDpWave, Unreadable
from mockengine.wire.outputs import (
    EngineCoreOutput,
    Envelope,
    FinishReason,
    RequestError,
    StartWave,
    StepOutputs,
    UtilityReply,
    WaveComplete,
    write_envelope,
)
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, SamplingParams
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.utility import UtilityCall, failure_message
from mockengine.wire.values import shown

COORDINATOR: Final = -1
"""Destination of what goes to the coordinator rather than to a client."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """One encoded message and where it goes: a client index or `COORDINATOR`."""

    destination: int
    frames: list[bytes]


@dataclass(slots=True)
class _Said:
    """What one step says to one client.

    Attributes:
        rows: outputs of its running set, as bytes that the set may write over with its next change.
        num_rows: how many outputs these are.
        outputs: those of the others.

    """

    rows: Sequence[memoryview] = ()
    num_rows: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)


_NOTHING: Final = _Said()


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
        self._encoder = StepEncoder(rank)
        self._pace = Pace(config.itl_s)
        self._last_load = SchedulerStats()
        self._finished_ids: dict[int, list[str]] = {}
        self._clients_told_of_load: set[int] = set()
        self._published_counts = (0, 0)
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
        has_news = self._finished_ids or (self._clients_told_of_load and not self.num_requests)
        return now if has_news else None

    def step(self, now: float, blocked: AbstractSet[int] = frozenset()) -> list[Outbound]:
        """Let every request whose client takes output say its next tokens.

        Returns:
            One message per client with something to hear; statistics go with the first of them. When nothing is left
            to do, every client that heard of load hears that it is gone.

        """
        outbound = self._published_load(now)
        for request in self._waiting.values():
            request.schedule(now)
        self._speaking |= self._waiting
        self._waiting.clear()
        said = self._advance(now, blocked)
        outbound += self._step_messages(said, now)
        # Only now: the rows of what was said lie where the sets have them.
        self._regroup(said)
        outbound += self._published_load(now)
        if not self.num_requests:
            outbound += [self._load_message(client, now) for client in sorted(self._clients_told_of_load)]
            self._clients_told_of_load.clear()
            self._pace.rest()
        else:
            self._pace.stepped(now)
        return outbound

    def end_wave(self, now: float) -> list[Outbound]:
        """End the wave, every rank being idle; rank 0 tells the coordinator."""
        ended = self.wave.complete()
        return [self._encode(COORDINATOR, WaveComplete(self.rank, now, ended))] if self.rank == 0 else []

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
            outbound.append(self._encode(COORDINATOR, StartWave(self.rank, now, self.wave.number)))
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

    def _advance(self, now: float, blocked: AbstractSet[int]) -> dict[int, _Said]:
        """Let everything that runs say its next tokens; return what was said, by client."""
        said: dict[int, _Said] = {}
        chunk_size = self._config.output_token_chunk_size
        tokens = 0
        for client, running_set in self._sets.items():
            if running_set and client not in blocked:
                said[client] = _Said(running_set.step(), len(running_set))
                tokens += len(running_set) * chunk_size
        finished: list[tuple[Request, FinishReason]] = []
        for request in self._speaking.values():
            if request.client in blocked:
                continue
            output = request.advance(chunk_size)
            said.setdefault(request.client, _Said()).outputs.append(output)
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

    def _regroup(self, said: Mapping[int, _Said]) -> None:
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
            except UtilityError as error:
                failure = str(error)
        client = call.client_index if 0 <= call.client_index < self._config.clients else arrived_from
        return [self._encode(client, UtilityReply(self.rank, now, call.call_id, result, failure))]

    def _unreadable(self, message: Unreadable, client: int, now: float) -> list[Outbound]:
        """Answer what can be answered, so that no client waits for ever; a request in flight is left alone."""
        self._observer.message_dropped(message, self.rank, None if client == COORDINATOR else client)
        if client == COORDINATOR:
            return []
        if message.call is not None:
            failure = failure_message(message.call.method, message.reason)
            return [self._encode(client, UtilityReply(self.rank, now, message.call.call_id, None, failure))]
        if message.request_id is None or self._in_flight(message.request_id):
            return []
        error = RequestError("unreadable_request", f"the engine could not read the request: {message.reason}")
        return [self._error_output(message.request_id, client, error, now, is_pooling=message.is_pooling)]

    # Messages.

    def _step_messages(self, said: Mapping[int, _Said], now: float) -> list[Outbound]:
        """Make one message per client that has outputs or finished ids; the first of them gets the load."""
        finished_ids, self._finished_ids = self._finished_ids, {}
        clients = sorted({*said, *finished_ids}) if finished_ids or len(said) > 1 else list(said)
        if not clients:
            return []
        told_of_load = clients[0]
        if self.num_requests:
            self._clients_told_of_load.add(told_of_load)
        outbound: list[Outbound] = []
        for client in clients:
            what = said.get(client, _NOTHING)
            step = StepOutputs(
                engine_index=self.rank,
                timestamp=now,
                outputs=what.outputs,
                scheduler_stats=self._load() if client == told_of_load else None,
                finished_requests=finished_ids.get(client, ()),
                weight_version=self._control.weight_version,
            )
            frames = self._encoder.encode(step, self._dialect.line, what.rows, what.num_rows)
            outbound.append(Outbound(client, frames))
        return outbound

    def _final_outputs(self, client: int, outputs: list[EngineCoreOutput], now: float) -> Outbound:
        """Make the message that ends requests outside of a step, and reports them as finished where that counts."""
        ids = [output.request_id for output in outputs if not self._in_flight(output.request_id)]
        finished_requests = ids if self._config.reports_finished_requests else ()
        return self._encode(
            client,
            StepOutputs(engine_index=self.rank, timestamp=now, outputs=outputs, finished_requests=finished_requests),
        )

    def _load_message(self, client: int, now: float) -> Outbound:
        step = StepOutputs(
            engine_index=self.rank,
            timestamp=now,
            scheduler_stats=self._load(),
            weight_version=self._control.weight_version,
        )
        return self._encode(client, step)

    def _published_load(self, now: float) -> list[Outbound]:
        """Tell the coordinator how many requests run and wait, whenever that has changed."""
        if not self._config.has_coordinator:
            return []
        counts = (self.num_running, self.num_waiting)
        if counts == self._published_counts:
            return []
        self._published_counts = counts
        load = replace(self._load(), current_wave=self.wave.number if self._config.has_waves else 0)
        return [self._encode(COORDINATOR, StepOutputs(engine_index=self.rank, timestamp=now, scheduler_stats=load))]

    def _load(self) -> SchedulerStats:
        counts = (self.num_running, self.num_waiting)
        if counts != (self._last_load.num_running_reqs, self._last_load.num_waiting_reqs):
            self._last_load = SchedulerStats(num_running_reqs=counts[0], num_waiting_reqs=counts[1])
        return self._last_load

    def _encode(self, destination: int, envelope: Envelope) -> Outbound:
        return Outbound(destination, write_envelope(envelope, self._dialect.line))

    # Bookkeeping.

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
        """Remember to report an id; without a report a frontend that counts would think the rank ever busier."""
        if self._config.reports_finished_requests:
            self._finished_ids.setdefault(request.client, []).append(request.request_id)

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
