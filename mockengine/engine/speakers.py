# SPDX-License-Identifier: Apache-2.0
"""Requests that say tokens, and what they say in a step.

A request is *speaking* while it has more to say than tokens, which is with its first output and its last one. In
between it is in the running set of its client, where it is a row among others.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from mockengine.engine.loose import LooseRow
from mockengine.engine.requests import Request
from mockengine.engine.running import RunningSet
from mockengine.engine.said import Said, Spoken

# Of all clients' steps that are made at once: enough to share the fixed cost, few enough to stay in the cache and to
# keep nobody waiting.
_BURST_BYTES: Final = 2**18


class Speakers:
    """The requests of one rank that run."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._speaking: dict[str, Request] = {}
        self._sets: dict[int, RunningSet] = {}
        self._loose: dict[str, LooseRow] = {}

    def __contains__(self, request_id: str) -> bool:
        if request_id in self._speaking:
            return True
        for running_set in self._sets.values():  # noqa: SIM110 - asked of every request, and half as fast with any()
            if request_id in running_set:
                return True
        return False

    def add(self, requests: Mapping[str, Request]) -> None:
        """Let requests speak from now on, by id."""
        self._speaking |= requests

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is."""
        self._loose.pop(request_id, None)
        for running_set in self._sets.values():
            if request_id in running_set:
                return running_set.leave(request_id)
        return self._speaking.pop(request_id, None)

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request that has said something in a step, and how many tokens."""
        yield from ((request, request.output_tokens) for request in self._speaking.values())
        for running_set in self._sets.values():
            yield from running_set.in_flight()

    def set_apart(self, request: Request) -> None:
        """Let a request say more than tokens in the next step, which a row of a running set cannot."""
        if request.is_in_running_set:
            self._sets[request.client].leave(request.request_id)
            self._speaking[request.request_id] = request

    def take_all(self) -> list[Request]:
        """Remove every request."""
        requests = [request for running_set in self._sets.values() for request in running_set.take_all()]
        requests += self._speaking.values()
        self._speaking.clear()
        self._loose.clear()
        return requests

    def most_steps(self, blocked: AbstractSet[int], most: int) -> int:
        """Return how many steps, at most so many for each client's share of them, differ in nothing but tokens."""
        sets = [running_set for _, running_set in self._unblocked(blocked)]
        if most == 1 or not sets or any(request.client not in blocked for request in self._speaking.values()):
            return 1
        step_bytes = sum(running_set.num_bytes for running_set in sets)
        most = max(1, min(most // len(sets), _BURST_BYTES // step_bytes))
        for running_set in sets:
            most = running_set.most_steps(most)
        return most

    def say(self, blocked: AbstractSet[int], steps: int) -> Spoken:
        """Let every request say its next tokens unless its client is blocked, as often as that."""
        spoken = Spoken()
        for client, running_set in self._unblocked(blocked):
            spoken.said[client] = Said(running_set.step(steps))
            spoken.tokens += len(running_set) * self._chunk_size * steps
        for request in self._speaking.values():
            if request.client not in blocked:
                self._advance(request, spoken)
        for request, _ in spoken.finished:
            del self._speaking[request.request_id]
        return spoken

    def say_of(self, requests: Sequence[Request]) -> Spoken:
        """Let these requests say their next tokens, be they new here or not, and no others."""
        spoken = Spoken()
        others = [request for request in requests if not request.is_in_running_set]
        if len(requests) - len(others) < sum(map(len, self._sets.values())):
            self._single_out(requests)
            others = [request for request in requests if not request.is_in_running_set]
        for client, running_set in self._unblocked(frozenset()):
            spoken.said[client] = Said(running_set.step())
            spoken.tokens += len(running_set) * self._chunk_size
        for request in others:
            self._advance(request, spoken)
            self._speaking[request.request_id] = request
        for request, _ in spoken.finished:
            del self._speaking[request.request_id]
        return spoken

    def regroup(self, said: Mapping[int, Said]) -> None:
        """Move requests into the running set of their client when they have nothing but tokens left, and out of it."""
        for client, what in said.items():
            running_set = self._sets.get(client)
            leavers = running_set.take_leavers() if running_set is not None else ()
            for output in what.outputs:
                request = self._speaking.get(output.request_id)
                if request is None or request.moments is not None:
                    # One with moments of its own does not step together with others.
                    continue
                if request.plain_outputs_left(self._chunk_size) > 0:
                    del self._speaking[request.request_id]
                    if running_set is None:
                        running_set = self._sets[client] = RunningSet(self._chunk_size)
                    running_set.join(request)
            for request in leavers:
                self._speaking[request.request_id] = request

    def say_loosely(self, requests: Sequence[Request]) -> Spoken:
        """Let these requests say their next tokens, each at its own pace: none of them is ever a row among others."""
        spoken = Spoken()
        for request in requests:
            if request.has_more_to_say or request.plain_outputs_left(self._chunk_size) <= 0:
                # What its row has drawn ahead begins with these tokens.
                self._loose.pop(request.request_id, None)
                self._advance(request, spoken)
            else:
                row = self._loose.get(request.request_id)
                if row is None:
                    row = self._loose[request.request_id] = LooseRow(request, self._chunk_size)
                spoken.said.setdefault(request.client, Said()).packed.append(row.say())
                spoken.tokens += self._chunk_size
        return spoken

    def _single_out(self, requests: Sequence[Request]) -> None:
        """Remove everybody else from the running sets."""
        ids = {request.request_id for request in requests}
        for running_set in self._sets.values():
            for request in running_set.take_others(ids):
                self._speaking[request.request_id] = request

    def _advance(self, request: Request, spoken: Spoken) -> None:
        output = request.advance(self._chunk_size)
        spoken.said.setdefault(request.client, Said()).outputs.append(output)
        spoken.tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            spoken.finished.append((request, output.finish_reason))

    def _unblocked(self, blocked: AbstractSet[int]) -> Iterator[tuple[int, RunningSet]]:
        for client, running_set in self._sets.items():
            if running_set and client not in blocked:
                yield client, running_set
