# SPDX-License-Identifier: Apache-2.0
"""Replies of pooling requests: what they say is computed after their prompts are, as far as there is time.

A runner ends a pooling request with an output that still lacks its tensor. Many may end in one step, and a tensor may
be large, so they wait here, in order: with each step some are computed, and one that takes longer is gone on with in
the next. Until then they are in flight as they were, and nothing is made for a client that does not read.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from mockengine.engine.requests import Request
from mockengine.engine.said import Said, Spoken
from mockengine.replies.asked import ReplyError
from mockengine.replies.pooling import Pooling
from mockengine.wire.outputs import EngineCoreOutput, FinishReason, RequestError
from mockengine.wire.record import record
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT

# In numbers that are computed: some milliseconds.
_COST_OF_STEP: Final = 2**20


@record
class _Unsaid:
    """A request whose prompt is computed, what computes its reply, and the output that will carry it."""

    request: Request
    pooling: Pooling
    output: EngineCoreOutput


class PooledReplies:
    """What the pooling requests of one rank are still to be told."""

    def __init__(self) -> None:
        self._unsaid: dict[str, _Unsaid] = {}
        self._num_of_client: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._unsaid)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unsaid

    def has_some_for_others_than(self, blocked: AbstractSet[int]) -> bool:
        """Whether something can be computed for a client that takes output."""
        return any(client not in blocked for client in self._num_of_client)

    def requests(self) -> Iterator[Request]:
        """Yield every request."""
        yield from (unsaid.request for unsaid in self._unsaid.values())

    def take(self, request_id: str) -> Request | None:
        """Remove a request that nobody waits for any more."""
        unsaid = self._unsaid.get(request_id)
        return None if unsaid is None else self._remove(unsaid)

    def take_all(self) -> list[Request]:
        """Remove every request."""
        return [self._remove(unsaid) for unsaid in list(self._unsaid.values())]

    def complete(self, spoken: Spoken, blocked: AbstractSet[int]) -> None:
        """Keep the outputs of a step that lack a tensor, and add those whose tensors can be computed now."""
        if spoken.finished:
            self._keep(spoken)
        if self._unsaid:
            self._say(spoken, blocked)

    def _keep(self, spoken: Spoken) -> None:
        kept = {request.request_id: request for request, _ in spoken.finished if request.pooling is not None}
        if not kept:
            return
        spoken.finished = [each for each in spoken.finished if each[0].pooling is None]
        for client in {request.client for request in kept.values()}:
            said = spoken.said[client]
            for output in said.outputs:
                request = kept.get(output.request_id)
                if request is not None and request.pooling is not None:
                    self._unsaid[request.request_id] = _Unsaid(request, request.pooling, output)
                    self._num_of_client[client] += 1
            said.outputs = [output for output in said.outputs if output.request_id not in kept]
            if not (said.rows or said.packed or said.outputs):
                del spoken.said[client]
        if spoken.first_client not in spoken.said:
            spoken.first_client = None

    def _say(self, spoken: Spoken, blocked: AbstractSet[int]) -> None:
        left = _COST_OF_STEP
        for unsaid in list(self._unsaid.values()):
            if unsaid.request.client in blocked:
                continue
            output: EngineCoreOutput | None = None
            while left > 0 and output is None:
                left -= unsaid.pooling.cost
                output = _go_on(unsaid)
            if output is None:
                return
            self._remove(unsaid)
            spoken.said.setdefault(unsaid.request.client, Said()).outputs.append(output)
            spoken.finished.append((unsaid.request, output.finish_reason or FinishReason.STOP))

    def _remove(self, unsaid: _Unsaid) -> Request:
        request = unsaid.request
        del self._unsaid[request.request_id]
        self._num_of_client[request.client] -= 1
        if not self._num_of_client[request.client]:
            del self._num_of_client[request.client]
        return request


def _go_on(unsaid: _Unsaid) -> EngineCoreOutput | None:
    """Compute a part of a reply; return the output once it is complete, or cannot be."""
    if unsaid.output.finish_reason is not FinishReason.STOP:
        unsaid.pooling.give_up()
        return replace(unsaid.output, pooling_output=EMPTY_POOLING_OUTPUT)
    try:
        tensor = unsaid.pooling.go_on()
    except ReplyError as error:
        return replace(
            unsaid.output,
            pooling_output=EMPTY_POOLING_OUTPUT,
            finish_reason=FinishReason.ERROR,
            error=RequestError("validation_error", str(error)),
        )
    return None if tensor is None else replace(unsaid.output, pooling_output=tensor)
