# SPDX-License-Identifier: Apache-2.0
"""Requests that have moments of their own where no scheduler decides whose turn it is: each speaks when it is due."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from mockengine.engine.agenda import Agenda
from mockengine.engine.own_timing import Moments
from mockengine.engine.requests import Request


class OwnLane:
    """The requests of one rank that have moments of their own; they are scheduled as soon as they are there.

    Attributes:
        requests: by id, with their moments.
        usual_itl_s: time from one output to the next of those that have none of their own.

    """

    def __init__(self, usual_itl_s: float) -> None:
        """Begin with nobody; what has no time of its own takes none before the first output, and that after it."""
        self.usual_itl_s = usual_itl_s
        self.requests: dict[str, tuple[Request, Moments]] = {}
        # By client, since one that takes no output holds up nobody else.
        self._agendas: dict[int, Agenda[Request]] = {}

    def add(self, request: Request, moments: Moments, now: float) -> None:
        """Take in a request, which is scheduled now."""
        request.tell_scheduled(now)
        self.requests[request.request_id] = request, moments
        self._agendas.setdefault(request.client, Agenda()).put(request, moments.begin(now, 0.0))

    def take(self, request_id: str) -> Request | None:
        """Remove a request."""
        request, _ = self.requests.pop(request_id, (None, None))
        if request is not None:
            agenda = self._agendas[request.client]
            agenda.forget(request)
            if not agenda:
                del self._agendas[request.client]
        return request

    def take_all(self) -> list[Request]:
        """Remove every request."""
        requests = [request for request, _ in self.requests.values()]
        self.requests.clear()
        self._agendas.clear()
        return requests

    def stand_still(self, seconds: float) -> None:
        """Let everybody be due so much later."""
        for _, moments in self.requests.values():
            moments.put_off(seconds)
        for agenda in self._agendas.values():
            agenda.put_off(seconds)

    def due(self, blocked: AbstractSet[int]) -> float | None:
        """Return when somebody is due next whose client takes output, or None."""
        moments = [agenda.earliest for agenda in self._unblocked(blocked)]
        return min((moment for moment in moments if moment is not None), default=None)

    def take_due(self, now: float, blocked: AbstractSet[int]) -> list[Request]:
        """Return those who are due and whose client takes output; each has to say something."""
        return [request for agenda in self._unblocked(blocked) for request in agenda.take(now)]

    def said(self, requests: Sequence[Request]) -> None:
        """Have those wait for their next moment that have said something, and forget those that have ended."""
        for request in requests:
            if request.finish_reason is not None:
                self.take(request.request_id)
                continue
            _, moments = self.requests[request.request_id]
            self._agendas[request.client].put(request, moments.advance(self.usual_itl_s))

    def take_usual(self, requests: Sequence[Request]) -> list[Request]:
        """Remove those of the requests that go on without a time of their own, where that takes none at all."""
        if self.usual_itl_s:
            return []
        here = [self.requests[request.request_id] for request in requests if request.request_id in self.requests]
        over = [request for request, moments in here if moments.are_over]
        for request in over:
            self.take(request.request_id)
        return over

    def _unblocked(self, blocked: AbstractSet[int]) -> Iterator[Agenda[Request]]:
        for client, agenda in self._agendas.items():
            if client not in blocked:
                yield agenda
