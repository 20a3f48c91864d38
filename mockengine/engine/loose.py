# SPDX-License-Identifier: Apache-2.0
"""Outputs of tokens and their scores alone, for requests that do not step together with all others of their client.

What the running set does with columns is done here one by one, at the cost of a row.
"""

from typing import Final

import numpy as np

from mockengine.engine.requests import Request
from mockengine.replies import Tokens
from mockengine.replies.scores import ReplyScores
from mockengine.wire.batch import array_header
from mockengine.wire.codec import pack
from mockengine.wire.logprobs import logprobs_frame

# Tokens that are drawn at once.
_DRAWN: Final = 64
_DRAWN_VARYING: Final = 256
_TOKEN: Final = b"\xce"
_TOKEN_BYTES: Final = 4
_SCORE_BYTES: Final = 4


# Of outputs with few tokens, as most are.
_HEADERS: Final = tuple(array_header(count) for count in range(256))


class LooseRow:
    """The outputs of one request, packed, with a full chunk of tokens each."""

    __slots__ = ("_chunk_size", "_drawn", "_head", "_place", "_request", "_scores")

    def __init__(self, request: Request, chunk_size: int) -> None:
        self._request = request
        self._chunk_size = chunk_size
        self._head = _head(request) + array_header(chunk_size)
        self._scores = None if request.scores is None else _ScoresAhead(request.scores)
        self._drawn = b""
        self._place = 0

    def say(self) -> bytes:
        """Return the next output, which must not be the last one, as msgpack."""
        if self._place == len(self._drawn):
            self._draw()
        start = self._place
        end = self._place = start + self._chunk_size * (1 + _TOKEN_BYTES)
        self._request.skip(self._chunk_size)
        output = self._head + self._drawn[start:end]
        return output if self._scores is None else output + self._scores.next(self._chunk_size)

    def _draw(self) -> None:
        """Draw as many chunks as are cheap at once, each token with its msgpack type before it."""
        count = max(1, _DRAWN // self._chunk_size) * self._chunk_size
        tokens = _next_tokens(self._request, count)
        self._drawn = _typed(tokens)
        self._place = 0
        if self._scores is not None:
            self._scores.draw(self._request.output_tokens, tokens)


class VaryingRow:
    """The outputs of one request, packed, each with another number of tokens."""

    __slots__ = ("_drawn", "_head", "_place", "_request", "_scores")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head = _head(request)
        self._scores = None if request.scores is None else _ScoresAhead(request.scores)
        self._drawn = b""
        self._place = 0

    def forget(self) -> None:
        """Drop what is drawn ahead, since somebody else says the next tokens."""
        self._drawn = b""
        self._place = 0

    def say(self, count: int) -> bytes:
        """Return the next output as msgpack, of so many tokens, fewer than 256; it must not be the last one."""
        start = self._place
        end = start + count * (1 + _TOKEN_BYTES)
        if end > len(self._drawn):
            self._draw(count)
            start, end = 0, end - start
        self._place = end
        self._request.output_tokens += count
        output = self._head + _HEADERS[count] + self._drawn[start:end]
        return output if self._scores is None else output + self._scores.next(count)

    def _draw(self, count: int) -> None:
        """Draw as many tokens as are cheap at once, and so many at least, each with its msgpack type before it."""
        if self._scores is None:
            self._drawn = _typed(_next_tokens(self._request, _DRAWN_VARYING))
            return
        tokens = _next_tokens(self._request, max(count, _DRAWN))
        self._drawn = _typed(tokens)
        self._scores.draw(self._request.output_tokens, tokens)


class _ScoresAhead:
    """Scores that are drawn ahead of one request, packed as its outputs cut them."""

    __slots__ = ("_columns", "_ids", "_logprobs", "_place", "_ranks", "_scores")

    def __init__(self, scores: ReplyScores) -> None:
        self._scores = scores
        self._columns = scores.form.columns
        self._ids = self._logprobs = self._ranks = b""
        self._place = 0

    def draw(self, start: int, tokens: Tokens) -> None:
        """Make the scores of the next tokens, `[1, T]`, the first of which has that position in the reply."""
        scored = self._scores.of_many(start, tokens)
        self._ids = scored.token_ids.astype("<i4", copy=False).tobytes()
        self._logprobs = scored.logprobs.astype("<f4", copy=False).tobytes()
        self._ranks = scored.ranks.astype("<i4", copy=False).tobytes()
        self._place = 0

    def next(self, count: int) -> bytes:
        """Return those of so many tokens as msgpack."""
        first, last = _SCORE_BYTES * self._place, _SCORE_BYTES * (self._place + count)
        self._place += count
        before_ids, before_logprobs, before_ranks, end = logprobs_frame(count, self._columns)
        scores = slice(first * self._columns, last * self._columns)
        parts = (before_ids, self._ids[scores], before_logprobs, self._logprobs[scores], before_ranks)
        return b"".join((*parts, self._ranks[first:last], end))


def _head(request: Request) -> bytes:
    """Return what outputs begin with: the header of so many items, and the first of them."""
    return array_header(2 if request.scores is None else 3) + pack(request.request_id)


def _next_tokens(request: Request, count: int) -> Tokens:
    """Return the next tokens of a request, `[1, count]`."""
    keys, starts = np.array([request.key], np.uint64), np.array([request.output_tokens], np.int64)
    return request.source.block(keys, starts, count)


def _typed(tokens: Tokens) -> bytes:
    """Return tokens as msgpack, each with its type before it."""
    typed = np.empty((tokens.size, 1 + _TOKEN_BYTES), np.uint8)
    typed[:, 0] = _TOKEN[0]
    typed[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(tokens.size, _TOKEN_BYTES)
    return typed.tobytes()
