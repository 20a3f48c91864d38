# SPDX-License-Identifier: Apache-2.0
"""The running set: requests of one client that have nothing to say but tokens, as columns instead of objects.

All of them step together, so what a step costs is a handful of array operations, whatever their number. A request
joins when its first output has been said and leaves before its last one, since those two say more. Both cost the same
however many others there are.

Requests whose ids take the same number of bytes share a lane. Tokens are drawn for many steps at once.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from mockengine.engine.requests import Request
from mockengine.replies import Keys, Positions, TokenSource
from mockengine.replies import Tokens as Drawn
from mockengine.wire.batch import Rows, Strip, Tokens
from mockengine.wire.codec import pack
from mockengine.wire.record import record

# Tokens that are drawn at once, for a lane and for each of its requests: enough to share the fixed cost, few enough to
# stay in the cache.
_DRAWN_FOR_LANE: Final = 2**14
_DRAWN_LEAST: Final = 64
_DRAWN_MOST: Final = 512
# A lane that has emptied is kept for the next request of that length, unless it is one of many or has grown large.
_KEPT_LANES: Final = 16
_KEPT_ROWS: Final = 1_024


class _Lane:
    """Requests whose ids take the same number of bytes.

    Row i of every column belongs to the request in row i of the strip; rows have no gaps.
    """

    def __init__(self, id_bytes: int, chunk_size: int) -> None:
        self.requests: list[Request] = []
        self._row_of: dict[str, int] = {}
        self._strip = Strip(id_bytes, chunk_size)
        self._chunk_size = chunk_size
        # The step whose tokens come next, of those that are drawn.
        self._step = 0
        # Rows from here on have joined since the last step, and nothing is drawn for them yet.
        self._fresh_from = 0
        self._keys: Keys
        # Position in the reply of the first token of step 0 of the drawn ones.
        self._bases: Positions
        self._drawn: Tokens
        self._allocate(self._strip.capacity)

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._strip.capacity

    def join(self, request: Request, packed_id: bytes) -> None:
        """Add a row."""
        if not self.requests:
            # As many steps as can be are ahead of the first.
            self._step = self._fresh_from = 0
        row = self._strip.append(packed_id)
        if self._strip.capacity > len(self._keys):
            self._allocate(self._strip.capacity)
        self._keys[row] = request.key
        self._bases[row] = request.output_tokens - self._step * self._chunk_size
        self.requests.append(request)
        self._row_of[request.request_id] = row

    def leave(self, request_id: str) -> Request:
        """Remove a row, into whose place the last one moves."""
        if self._fresh_from < len(self.requests):
            # What moves must be complete.
            self._draw_for_fresh()
        row = self._row_of.pop(request_id)
        request, last = self.requests[row], self.requests.pop()
        self._strip.remove(row)
        if request is not last:
            end = len(self.requests)
            self._keys[row], self._bases[row] = self._keys[end], self._bases[end]
            self._drawn[:, row] = self._drawn[:, end]
            self.requests[row] = last
            self._row_of[last.request_id] = row
        self._fresh_from = len(self.requests)
        return request

    @property
    def num_bytes(self) -> int:
        """What a step of all rows takes."""
        return self._strip.num_bytes

    @property
    def most_steps(self) -> int:
        """How many steps can be made at once: those whose tokens are drawn together."""
        return self._steps_drawn - self._step or self._steps_drawn

    def step(self, steps: int) -> Rows:
        """Return all rows with the tokens of so many steps, at most `most_steps`, valid until the next change."""
        if self._step == self._steps_drawn:
            self._bases[: len(self.requests)] += self._steps_drawn * self._chunk_size
            self._step = 0
            self._fresh_from = 0
        if self._fresh_from < len(self.requests):
            self._draw_for_fresh()
        tokens = self._drawn[self._step : self._step + steps, : len(self.requests)]
        self._step += steps
        return Rows(self._strip, tokens)

    def _draw_for_fresh(self) -> None:
        first, end, step = self._fresh_from, len(self.requests), self._step
        steps = self._steps_drawn - step
        if steps:
            starts = self._bases[first:end] + step * self._chunk_size
            block = self._block(first, starts, steps * self._chunk_size)
            shaped = block.reshape(end - first, steps, self._chunk_size).transpose(1, 0, 2)
            self._drawn[step:, first:end] = shaped
        self._fresh_from = end

    def _block(self, first: int, starts: Positions, count: int) -> Drawn:
        """Draw so many tokens for each row from `first` on, as few times as there are sources."""
        keys, requests = self._keys[first : first + len(starts)], self.requests[first:]
        source = requests[0].source
        if all(request.source is source for request in requests):
            return source.block(keys, starts, count)
        rows_of: dict[TokenSource, list[int]] = {}
        for row, request in enumerate(requests):
            rows_of.setdefault(request.source, []).append(row)
        drawn = np.empty((len(requests), count), np.uint32)
        for each, rows in rows_of.items():
            drawn[rows] = each.block(keys[rows], starts[rows], count)
        return drawn

    def _allocate(self, capacity: int) -> None:
        """Make room; the tokens are drawn anew, for other steps than before, which growing makes up for."""
        used = len(self.requests)
        keys, bases = np.empty(capacity, np.uint64), np.empty(capacity, np.int64)
        if used:
            keys[:used], bases[:used] = self._keys[:used], self._bases[:used] + self._step * self._chunk_size
        self._keys, self._bases = keys, bases
        tokens = min(max(_DRAWN_LEAST, _DRAWN_FOR_LANE // capacity), _DRAWN_MOST)
        self._steps_drawn = max(1, tokens // self._chunk_size)
        self._drawn = np.empty((self._steps_drawn, capacity, self._chunk_size), np.uint32)
        self._step = self._fresh_from = 0


@record
class _Member:
    """A request of the set: where it is, since when, and when it leaves, counted in steps of the set."""

    lane: _Lane
    joined_at: int
    leaves_at: int


class RunningSet:
    """Requests of one client that say a full chunk of tokens with every step and nothing else."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._lanes: dict[int, _Lane] = {}
        self._members: dict[str, _Member] = {}
        self._leaving: dict[int, dict[str, None]] = {}
        self._steps = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def join(self, request: Request) -> None:
        """Take in a request that has at least one full chunk to say before its last output."""
        packed_id = pack(request.request_id)
        lane = self._lanes.get(len(packed_id))
        if lane is None:
            lane = self._lanes[len(packed_id)] = _Lane(len(packed_id), self._chunk_size)
        lane.join(request, packed_id)
        leaves_at = self._steps + request.plain_outputs_left(self._chunk_size)
        self._members[request.request_id] = _Member(lane, self._steps, leaves_at)
        self._leaving.setdefault(leaves_at, {})[request.request_id] = None
        request.is_in_running_set = True

    def leave(self, request_id: str) -> Request:
        """Give a request back, with the tokens counted that it has said here."""
        member = self._members.pop(request_id)
        leaving = self._leaving[member.leaves_at]
        del leaving[request_id]
        if not leaving:
            del self._leaving[member.leaves_at]
        request = member.lane.leave(request_id)
        request.is_in_running_set = False
        request.skip((self._steps - member.joined_at) * self._chunk_size)
        if not member.lane.requests and (len(self._lanes) > _KEPT_LANES or member.lane.capacity > _KEPT_ROWS):
            del self._lanes[next(size for size, lane in self._lanes.items() if lane is member.lane)]
        return request

    @property
    def num_bytes(self) -> int:
        """What a step takes."""
        return sum(lane.num_bytes for lane in self._lanes.values())

    def most_steps(self, most: int) -> int:
        """Return how many steps, at most so many, can be made at once before anybody leaves."""
        most = min([most, *[lane.most_steps for lane in self._lanes.values() if lane.requests]])
        if len(self._leaving) < most:
            return min(most, min(self._leaving, default=most + self._steps) - self._steps)
        return next((ahead for ahead in range(1, most) if self._steps + ahead in self._leaving), most)

    def step(self, steps: int = 1) -> list[Rows]:
        """Let every request say its next chunk, as often as that, at most `most_steps`.

        Returns:
            The rows of all, valid until the next change.

        """
        self._steps += steps
        return [lane.step(steps) for lane in self._lanes.values() if lane.requests]

    def take_all(self) -> list[Request]:
        """Remove and return every request."""
        return [self.leave(request_id) for request_id in list(self._members)]

    def take_others(self, request_ids: AbstractSet[str]) -> list[Request]:
        """Remove and return the requests that are not among these."""
        return [self.leave(request_id) for request_id in list(self._members) if request_id not in request_ids]

    def take_leavers(self) -> Sequence[Request]:
        """Remove and return the requests whose next output is their last."""
        return [self.leave(request_id) for request_id in list(self._leaving.get(self._steps, ()))]
