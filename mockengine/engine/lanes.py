# SPDX-License-Identifier: Apache-2.0
"""Requests of a running set whose outputs take the same number of bytes, as columns instead of objects.

What they say is drawn for many steps at once.
"""

from typing import Final

import numpy as np

from mockengine.engine.requests import Request
from mockengine.replies import Keys, Positions, TokenSource
from mockengine.replies import Tokens as Drawn
from mockengine.replies.scores import AskedScores, ScoreForm
from mockengine.wire.batch import Rows, Strip, Tokens
from mockengine.wire.logprobs import PackedScores, pack_logprobs, packed_bytes

# Tokens that are drawn at once, for a lane and for each of its requests: enough to share the fixed cost, few enough to
# stay in the cache.
_DRAWN_FOR_LANE: Final = 2**14
_DRAWN_LEAST: Final = 64
_DRAWN_MOST: Final = 512
# The same for tokens with scores: a score takes as long as ten tokens, and no step is to be late for those of others.
_SCORES_FOR_LANE: Final = 2**13
_SCORED_MOST: Final = 64
# Scores that are made at once where each step has more than that.
_SCORES_AT_ONCE: Final = 2**15


class Lane:
    """Requests whose ids take the same number of bytes, and that say tokens alone.

    Row i of every column belongs to the request in row i of the strip; rows have no gaps.
    """

    def __init__(self, id_bytes: int, chunk_size: int, scores_bytes: int = 0) -> None:
        """Make an empty lane.

        Args:
            id_bytes: length of an id as msgpack.
            chunk_size: tokens of every output.
            scores_bytes: length of their scores, where these are said too.

        """
        self.requests: list[Request] = []
        self._row_of: dict[str, int] = {}
        self._strip = Strip(id_bytes, chunk_size, scores_bytes)
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
            self._move(len(self.requests), row)
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
            self._keep(first, self._block(first, starts, steps * self._chunk_size))
        self._fresh_from = end

    def _keep(self, first: int, block: Drawn) -> None:
        """Keep what is drawn for the rows from `first` on, for all steps that are left."""
        shaped = block.reshape(len(block), -1, self._chunk_size).transpose(1, 0, 2)
        self._drawn[self._step :, first : first + len(block)] = shaped

    def _move(self, row: int, into: int) -> None:
        """Move what is known of a row into the place of another one."""
        self._keys[into], self._bases[into] = self._keys[row], self._bases[row]
        self._drawn[:, into] = self._drawn[:, row]

    def _block(self, first: int, starts: Positions, count: int) -> Drawn:
        """Draw so many tokens for each row from `first` on, as few times as there are sources."""
        keys, requests = self._keys[first : first + len(starts)], self.requests[first:]
        source = requests[0].source
        if all(request.source is source for request in requests):
            return source.block(keys, starts, count)
        rows_of: dict[TokenSource, list[int]] = {}
        for row, (request, start) in enumerate(zip(requests, starts.tolist(), strict=True)):
            rows_of.setdefault(request.source.beyond(start), []).append(row)
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
        self._steps_drawn = max(1, self._tokens_ahead(capacity) // self._chunk_size)
        self._drawn = np.empty((self._steps_drawn, capacity, self._chunk_size), np.uint32)
        self._step = self._fresh_from = 0

    def _tokens_ahead(self, capacity: int) -> int:
        """Return how many tokens are to be drawn at once for each of so many requests."""
        return min(max(_DRAWN_LEAST, _DRAWN_FOR_LANE // capacity), _DRAWN_MOST)


class ScoredLane(Lane):
    """Requests whose ids take the same number of bytes, and that say tokens with scores of one form."""

    def __init__(self, id_bytes: int, chunk_size: int, form: ScoreForm) -> None:
        """Make an empty lane.

        Args:
            id_bytes: length of an id as msgpack.
            chunk_size: tokens of every output.
            form: of their scores.

        """
        self._form = form
        # What each request asks.
        self._asked: AskedScores
        self._packed: PackedScores
        self._scores_bytes = packed_bytes(chunk_size, form.columns)
        super().__init__(id_bytes, chunk_size, self._scores_bytes)

    def join(self, request: Request, packed_id: bytes) -> None:
        """Add a row for a request of which scores are asked."""
        super().join(request, packed_id)
        if request.scores is not None:
            self._asked[len(self.requests) - 1] = request.scores.asked[0]

    def step(self, steps: int) -> Rows:
        """Return all rows with what so many steps say, at most `most_steps`, valid until the next change."""
        rows = super().step(steps)
        return Rows(rows.strip, rows.tokens, self._packed[self._step - steps : self._step, : len(self.requests)])

    def _keep(self, first: int, block: Drawn) -> None:
        super()._keep(first, block)
        at_once = max(1, _SCORES_AT_ONCE // (block.shape[1] * self._form.columns))
        for row in range(0, len(block), at_once):
            some = block[row : row + at_once]
            self._keep_scores(slice(first + row, first + row + len(some)), some)

    def _keep_scores(self, rows: slice, block: Drawn) -> None:
        """Keep the scores of the tokens of some rows, for all steps that are left."""
        starts = self._bases[rows] + self._step * self._chunk_size
        scored = self._form.score(self._asked[rows], self._keys[rows], starts, block)
        outputs = (-1, self._chunk_size, self._form.columns)
        packed = pack_logprobs(
            scored.token_ids.reshape(outputs), scored.logprobs.reshape(outputs), scored.ranks.reshape(outputs[:2])
        )
        self._packed[self._step :, rows] = packed.reshape(len(block), -1).T

    def _move(self, row: int, into: int) -> None:
        super()._move(row, into)
        self._asked[into] = self._asked[row]
        self._packed[:, into] = self._packed[:, row]

    def _allocate(self, capacity: int) -> None:
        super()._allocate(capacity)
        used = len(self.requests)
        asked = np.empty(capacity, self._form.items)
        if used:
            asked[:used] = self._asked[:used]
        self._asked = asked
        self._packed = np.empty((self._steps_drawn, capacity), f"V{self._scores_bytes}")

    def _tokens_ahead(self, capacity: int) -> int:
        return min(_SCORES_FOR_LANE // (capacity * self._form.columns), _SCORED_MOST)


def make_lane(id_bytes: int, chunk_size: int, form: ScoreForm | None) -> Lane:
    """Return a lane for requests with scores of that form, or without any."""
    return Lane(id_bytes, chunk_size) if form is None else ScoredLane(id_bytes, chunk_size, form)
