# SPDX-License-Identifier: Apache-2.0
"""What a frontend and its engines say to each other once they serve: judges every envelope against what was asked.

It knows no socket. Three things it leaves alone, since it cannot know:

1. What was said behind its back (`said_raw`) may have asked for anything: from then on, requests and calls that it does
   not know are not judged, and neither is the number of requests in flight.
2. An id that was used again, or that is a session of several requests, has more than one life at a time: it is not
   judged any more.
3. How soon an abort is followed. What was on its way comes all the same; a real engine then says one token more and
   some envelopes of statistics alone (two, or three if it schedules ahead).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mockengine.testing.life import Asked, Life
from mockengine.testing.rules import EngineMistakeError, Rule
from mockengine.wire.codec import WireError, leading_items, unpack
from mockengine.wire.lines import LINES, Line, in_common
from mockengine.wire.messages import RequestType
from mockengine.wire.outputs import Envelope, StepOutputs, UtilityReply, read_envelope
from mockengine.wire.stats import SchedulerStats

_FAULT_TOLERANCE_STATUS: Final = -2
"""Under this id an engine may announce its health at any time (protocol section 10)."""
_COORDINATOR: Final = -1
_CALL_ID_POSITION: Final = 1
_LOGPROBS_POSITION: Final = 2
_LOGPROBS_ITEMS_MOST: Final = 4


@dataclass(slots=True)
class _Call:
    method: str
    rank: int
    client: int
    was_answered: bool = False


class Conversation:
    """Everything that was asked of some ranks, and whether what they said fits it."""

    def __init__(self, ranks: int, line: Line) -> None:
        """Begin a conversation with ranks 0 … `ranks` - 1, in the layouts of `line`."""
        self._line = line
        # Where several lines share their requests' layout, an engine cannot know where prefill_stats belong.
        alike = tuple(known for known in LINES if known.add_items == line.add_items) or (line,)
        self._needs_prefill_stats = "prefill_stats" in in_common(alike).output_fields
        self._lives: dict[str, Life | None] = {}
        self._calls: dict[int, _Call | None] = {}
        self._knows_everything = True
        self._asked_of = [0] * ranks
        # When requests ended, in engine seconds and in order, by rank: what is in flight depends on the time asked for.
        self._ends_of: list[list[float]] = [[] for _ in range(ranks)]
        self._last_step_s: dict[tuple[int, int], float] = {}

    # What the frontend says.

    def asked(self, values: Mapping[str, Any], rank: int, client: int) -> None:
        """Note a request: the fields of its EngineCoreRequest, as wire values by name."""
        asked = Asked.of(values, rank, client)
        self._asked_of[rank] += 1
        if asked.request_id in self._lives or values.get("resumable"):
            self._lives[asked.request_id] = None
            return
        self._lives[asked.request_id] = Life(
            asked,
            was_aborted=bool(values.get("abort_immediately")),
            needs_prefill_stats=self._needs_prefill_stats,
        )

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Note that nobody waits for some requests any more."""
        for request_id in request_ids:
            life = self._lives.get(request_id)
            if life is not None:
                life.was_aborted = True

    def called(self, call_id: int, method: str, rank: int, client: int) -> None:
        """Note a utility call."""
        self._calls[call_id] = _Call(method, rank, client)

    def said_raw(self, frames: Sequence[bytes]) -> list[str]:
        """Note a message of any content; whatever it names is not judged any more.

        Returns:
            The id of the request that it makes, if it makes one of which that much can be read.

        """
        self._knows_everything = False
        kind, payload, *_ = (*frames, b"", b"")
        made: list[str] = []
        if kind == bytes([RequestType.ADD]):
            made = [head for head in leading_items(payload, 1) if isinstance(head, str)]
            self._lives |= dict.fromkeys(made)
        elif kind == bytes([RequestType.UTILITY]):
            ids = leading_items(payload, _CALL_ID_POSITION + 1)[_CALL_ID_POSITION:]
            self._calls |= {call_id: None for call_id in ids if type(call_id) is int}
        elif kind == bytes([RequestType.ABORT]):
            self._lives |= {request_id: None for request_id in _strings(payload) if request_id in self._lives}
        return made

    # What it hears.

    def hear(self, client: int, frames: Sequence[bytes]) -> StepOutputs | UtilityReply:
        """Read and judge a message that came on the output socket of a client.

        Raises:
            EngineMistakeError: a real frontend suffers from it, or no correct engine says it.
            EngineCoreDead: the engine says that it is lost.
            WireError: a real frontend cannot read it.

        """
        envelope = self._read(frames)
        if isinstance(envelope, StepOutputs):
            if any(output.new_logprobs is not None for output in envelope.outputs):
                _judge_items(frames[0])
            self._hear_step(client, envelope)
            return envelope
        if isinstance(envelope, UtilityReply):
            self._hear_answer(client, envelope)
            return envelope
        raise EngineMistakeError(Rule.WAVE_TO_CLIENT, f"{envelope} to client {client}")

    def hear_as_coordinator(self, frames: Sequence[bytes]) -> Envelope:
        """Read and judge a message that came on the coordinator's socket; raises as `hear` does."""
        envelope = self._read(frames)
        if isinstance(envelope, UtilityReply):
            raise EngineMistakeError(Rule.WRONG_FOR_COORDINATOR, f"an answer to call {envelope.call_id}")
        if isinstance(envelope, StepOutputs):
            if envelope.outputs or envelope.finished_requests:
                found = f"{len(envelope.outputs)} outputs and {len(envelope.finished_requests)} finished requests"
                raise EngineMistakeError(Rule.WRONG_FOR_COORDINATOR, found)
            self._judge_time(_COORDINATOR, envelope)
            self._judge_stats(envelope)
        return envelope

    def _read(self, frames: Sequence[bytes]) -> Envelope:
        envelope = read_envelope(frames, self._line)
        if envelope.engine_index >= len(self._asked_of):
            known = f"the frontend has {len(self._asked_of)} ranks"
            raise EngineMistakeError(Rule.UNMANAGED_RANK, f"engine_index {envelope.engine_index} where {known}")
        return envelope

    # Steps.

    def _hear_step(self, client: int, step: StepOutputs) -> None:
        self._judge_time(client, step)
        for output in step.outputs:
            life = self._life_of(output.request_id, Rule.OUTPUT_UNKNOWN)
            if life is not None:
                self._judge_way(life.asked, client, step.engine_index)
                was_over = life.is_over
                life.hear(output, step.timestamp)
                self._note_end(life, step, was_over=was_over)
        for request_id in step.finished_requests:
            life = self._life_of(request_id, Rule.FINISHED_UNKNOWN)
            if life is not None:
                if (life.asked.client, life.asked.rank) != (client, step.engine_index):
                    found = f"request {request_id}, which is not of client {client} and rank {step.engine_index}"
                    raise EngineMistakeError(Rule.FINISHED_TO_ANOTHER_CLIENT, found)
                was_over = life.is_over
                life.hear_finished()
                self._note_end(life, step, was_over=was_over)
        self._judge_stats(step)

    def _life_of(self, request_id: str, unknown: Rule) -> Life | None:
        """Return what is known of a request, or None when it is not to be judged."""
        if self._knows_everything and request_id not in self._lives:
            raise EngineMistakeError(unknown, f"request {request_id}")
        return self._lives.get(request_id)

    def _judge_way(self, asked: Asked, client: int, rank: int) -> None:
        if asked.client != client:
            found = f"request {asked.request_id} of client {asked.client}, told to client {client}"
            raise EngineMistakeError(Rule.OUTPUT_TO_ANOTHER_CLIENT, found)
        if asked.rank != rank:
            found = f"request {asked.request_id} of rank {asked.rank}, told by rank {rank}"
            raise EngineMistakeError(Rule.OUTPUT_OF_ANOTHER_RANK, found)

    def _judge_time(self, heard_by: int, step: StepOutputs) -> None:
        # 0 is a time that was left out; the receiver fills in its own.
        way = (step.engine_index, heard_by)
        last_s = self._last_step_s.get(way, step.timestamp)
        if step.timestamp and step.timestamp < last_s:
            found = f"rank {step.engine_index} says {step.timestamp} after {last_s}"
            raise EngineMistakeError(Rule.TIME_REVERSED, found)
        self._last_step_s[way] = max(step.timestamp, last_s)

    def _note_end(self, life: Life, step: StepOutputs, *, was_over: bool) -> None:
        if life.is_over and not was_over and step.timestamp:
            insort(self._ends_of[step.engine_index], step.timestamp)

    def _judge_stats(self, step: StepOutputs) -> None:
        stats = step.scheduler_stats
        if stats is None:
            return
        problem = _problem(stats)
        ended = bisect_left(self._ends_of[step.engine_index], step.timestamp)
        most = self._asked_of[step.engine_index] - ended
        counted = stats.num_running_reqs + stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        if self._knows_everything and counted > most:
            problem = f"{counted} requests running and waiting where at most {most} are in flight"
        if problem is not None:
            raise EngineMistakeError(Rule.IMPOSSIBLE_STATS, f"rank {step.engine_index} says {problem}")

    # Utility calls.

    def _hear_answer(self, client: int, reply: UtilityReply) -> None:
        if reply.call_id == _FAULT_TOLERANCE_STATUS:
            return
        if reply.call_id not in self._calls and (self._knows_everything or reply.call_id < 0):
            raise EngineMistakeError(Rule.ANSWER_UNKNOWN, f"an answer to call {reply.call_id}")
        call = self._calls.get(reply.call_id)
        if call is None:
            return
        whose = f"{call.method} of client {call.client} to rank {call.rank}"
        if call.client != client:
            raise EngineMistakeError(Rule.ANSWER_TO_ANOTHER_CLIENT, f"{whose} answered to client {client}")
        if call.rank != reply.engine_index:
            raise EngineMistakeError(Rule.ANSWER_OF_ANOTHER_RANK, f"{whose} answered by rank {reply.engine_index}")
        if call.was_answered:
            raise EngineMistakeError(Rule.ANSWER_REPEATED, f"{whose} answered again")
        call.was_answered = True


def _problem(stats: SchedulerStats) -> str | None:
    """Return what cannot be in some statistics, whoever says them."""
    prefix = stats.prefix_cache_stats
    # In this form, so that NaN is a problem too.
    if not 0 <= stats.kv_cache_usage <= 1:
        return f"a kv_cache_usage of {stats.kv_cache_usage}"
    if prefix.hits > prefix.queries or prefix.preempted_hits > prefix.preempted_queries:
        return f"more hits than queries in {prefix}"
    return None


def _judge_items(payload: bytes) -> None:
    """Judge the form of `new_logprobs`, of which the reader accepts all that any frontend does."""
    for output in unpack(payload)[1]:
        scores = output[_LOGPROBS_POSITION] if len(output) > _LOGPROBS_POSITION else None
        if scores is not None and len(scores) > _LOGPROBS_ITEMS_MOST:
            raise EngineMistakeError(Rule.LOGPROBS_MALFORMED, f"request {output[0]}: {len(scores)} items")


def _strings(payload: bytes) -> list[str]:
    try:
        items = unpack(payload)
    except WireError:
        return []
    return [item for item in items if isinstance(item, str)] if isinstance(items, list) else []
