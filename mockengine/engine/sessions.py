# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions: requests whose prompt arrives bit by bit (protocol section 8.7).

What arrives under the id of a session is one more *turn*. It goes on from the prompt and the reply so far, but for the
last token of that, and every turn ends with a finish reason. A turn that arrives while another one is said waits for
its end. A session between two turns waits for input; it ends when a request of its id says that no more comes, or when
it is aborted. A turn that cannot be served ends with an error, and the session goes on without it.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mockengine.engine.requests import Request
from mockengine.engine.runner import Runner
from mockengine.wire.outputs import EngineCoreOutput
from mockengine.wire.record import record
from mockengine.wire.requests import EngineCoreRequest, MultiModalFeature


@record
class Turn:
    """A turn that is to begin.

    Attributes:
        heard: what arrived.
        asked: the same with the whole prompt.
        is_first: whether no turn of its session has been served.

    """

    heard: EngineCoreRequest
    asked: EngineCoreRequest
    is_first: bool

    @property
    def problem(self) -> str | None:
        """Why it can be no turn, if so."""
        if self.heard.pooling_params is not None:
            return "a streaming-input session has no pooling task"
        if self.heard.prompt_embeds is not None:
            return "a streaming-input session takes token ids (got prompt_embeds)"
        return "the prompt is empty" if self.heard.num_prompt_tokens == 0 else None


BeginTurn = Callable[[Turn, float], Request | EngineCoreOutput]
"""Accepts a turn at a time, or returns how it ends if it cannot be served."""


@record
class Outcome:
    """What came of it that a turn has arrived or ended.

    Attributes:
        first: what the session began with.
        begun: the turn that has begun, if one has.
        refused: the ends of turns that are not served.
        has_ended: whether the session has ended.

    """

    first: EngineCoreRequest
    begun: Turn | None = None
    refused: Sequence[EngineCoreOutput] = ()
    has_ended: bool = False


class _Session:
    """One session.

    Attributes:
        first: what arrived first, which holds for all of it but for prompt, sampling parameters and arrival.
        heard: turns that wait for the end of another one, each with how it ends if it cannot be served.
        is_waiting: whether it waits for input.
        is_closed: whether no more input comes.

    """

    __slots__ = ("_features", "_has_begun", "_prompt", "first", "heard", "is_closed", "is_waiting")

    def __init__(self, first: EngineCoreRequest) -> None:
        self.first = first
        self.heard: deque[tuple[EngineCoreRequest, EngineCoreOutput | None]] = deque()
        self.is_waiting = True
        self.is_closed = False
        self._has_begun = False
        self._prompt = array("I")
        self._features: tuple[MultiModalFeature, ...] = ()

    def turn(self, heard: EngineCoreRequest) -> Turn:
        """Return what arrived as a turn."""
        before = len(self._prompt)
        features = (replace(feature, offset=feature.offset + before) for feature in heard.mm_features)
        asked = replace(
            self.first,
            prompt_token_ids=self._prompt + (heard.prompt_token_ids or array("I")),
            prompt_embeds=heard.prompt_embeds,
            mm_features=(*self._features, *features),
            sampling_params=heard.sampling_params,
            arrival_time=heard.arrival_time,
        )
        return Turn(heard, asked, not self._has_begun)

    def begin(self, asked: EngineCoreRequest) -> None:
        """Take note that a turn is served."""
        self._has_begun = True
        self.is_waiting = False
        self._prompt = asked.prompt_token_ids or array("I")
        self._features = asked.mm_features

    def end_turn(self, request: Request) -> None:
        """Take note that a turn has ended: what it said, but for the last token, is part of the prompt from now on."""
        self.is_waiting = True
        self._prompt = self._prompt + array("I", request.said()[:-1])


class Sessions:
    """The sessions of one rank."""

    def __init__(self, runner: Runner, begin_turn: BeginTurn) -> None:
        """Begin with none; turns are begun with `begin_turn` and run by `runner`."""
        self._runner = runner
        self._begin_turn = begin_turn
        self._sessions: dict[str, _Session] = {}
        # What came while a step was computed; a real engine reads it between steps.
        self._arrived: list[tuple[EngineCoreRequest, EngineCoreOutput | None]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sessions

    def open(self, first: EngineCoreRequest, refusal: EngineCoreOutput | None, now: float) -> Outcome:
        """Begin a session with its first turn; the arguments are those of `hear`."""
        session = self._sessions[first.request_id] = _Session(first)
        session.heard.append((first, refusal))
        return self._go_on(session, now, at_once=False)

    def hear(self, heard: EngineCoreRequest, refusal: EngineCoreOutput | None, now: float) -> Outcome:
        """Take in what arrived under the id of a session.

        Args:
            heard: one more turn, or one that is not resumable: no more comes.
            refusal: how it ends if it is already known that it cannot be served.
            now: the time, in engine seconds.

        """
        if self._runner.is_computing:
            self._arrived.append((heard, refusal))
            return Outcome(self._sessions[heard.request_id].first)
        return self._take_in(heard, refusal, now)

    def take_arrived(self, now: float) -> list[Outcome]:
        """Take in what came while a step was computed, now that it has ended."""
        arrived, self._arrived = self._arrived, []
        return [self._take_in(heard, refusal, now) for heard, refusal in arrived if heard.request_id in self._sessions]

    def end_turn(self, request: Request, now: float) -> Outcome:
        """Take note that the turn of a session has been said; the next one begins if it is there."""
        session = self._sessions[request.request_id]
        session.end_turn(request)
        return self._go_on(session, now, at_once=True)

    def forget(self, request_id: str) -> EngineCoreRequest | None:
        """Forget a session, whose turn somebody else ends; return what it began with, or None if there is none."""
        session = self._sessions.pop(request_id, None)
        if session is None:
            return None
        self._arrived = [entry for entry in self._arrived if entry[0].request_id != request_id]
        return session.first

    def forget_all(self) -> list[EngineCoreRequest]:
        """Forget all sessions likewise; return what those began with that wait for input."""
        waiting = [session.first for session in self._sessions.values() if session.is_waiting]
        self._sessions.clear()
        self._arrived.clear()
        return waiting

    def _take_in(self, heard: EngineCoreRequest, refusal: EngineCoreOutput | None, now: float) -> Outcome:
        session = self._sessions[heard.request_id]
        if heard.resumable:
            session.heard.append((heard, refusal))
        else:
            session.is_closed = True
            if not session.heard:
                self._runner.close(heard.request_id)
        return self._go_on(session, now, at_once=False) if session.is_waiting else Outcome(session.first)

    def _go_on(self, session: _Session, now: float, *, at_once: bool) -> Outcome:
        """Begin the next turn of a session that waits, if there is one that can be served."""
        refused: list[EngineCoreOutput] = []
        while session.heard:
            heard, refusal = session.heard.popleft()
            turn = session.turn(heard)
            begun = refusal or self._begin_turn(turn, now)
            if isinstance(begun, Request):
                session.begin(turn.asked)
                begun.is_resumable = bool(session.heard) or not session.is_closed
                begun.is_queued_told = at_once and not turn.is_first
                if turn.is_first:
                    self._runner.add(begun, turn.asked)
                else:
                    self._runner.go_on(begun, turn.asked, now)
                return Outcome(session.first, turn, refused)
            refused.append(begun)
        if session.is_closed:
            del self._sessions[session.first.request_id]
            self._runner.close(session.first.request_id)
        return Outcome(session.first, None, refused, session.is_closed)
