# SPDX-License-Identifier: Apache-2.0
"""Outputs of nothing but tokens, for requests that do not step together with all others of their client.

What the running set does with columns is done here one by one, at the cost of a row.
"""

from typing import Final

import numpy as np

from mockengine.engine.requests import Request
from mockengine.wire.batch import array_header
from mockengine.wire.codec import pack

# Tokens that are drawn at once.
_DRAWN: Final = 64
_DRAWN_VARYING: Final = 256
_TOKEN: Final = b"\xce"
_TOKEN_BYTES: Final = 4


# Of outputs with few tokens, as most are.
_HEADERS: Final = tuple(array_header(count) for count in range(256))


class LooseRow:
    """The outputs of one request, packed, with a full chunk of tokens each."""

    __slots__ = ("_chunk_size", "_drawn", "_head", "_place", "_request")

    def __init__(self, request: Request, chunk_size: int) -> None:
        self._request = request
        self._chunk_size = chunk_size
        self._head = b"\x92" + pack(request.request_id) + array_header(chunk_size)
        self._drawn = b""
        self._place = 0

    def say(self) -> bytes:
        """Return the next output, which must not be the last one, as msgpack."""
        if self._place == len(self._drawn):
            self._draw()
        start = self._place
        end = self._place = start + self._chunk_size * (1 + _TOKEN_BYTES)
        self._request.skip(self._chunk_size)
        return self._head + self._drawn[start:end]

    def _draw(self) -> None:
        """Draw as many chunks as are cheap at once, each token with its msgpack type before it."""
        count = max(1, _DRAWN // self._chunk_size) * self._chunk_size
        self._drawn = _next_tokens(self._request, count)
        self._place = 0


class VaryingRow:
    """The outputs of one request, packed, each with another number of tokens."""

    __slots__ = ("_drawn", "_head", "_place", "_request")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head = b"\x92" + pack(request.request_id)
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
            self._drawn = _next_tokens(self._request, _DRAWN_VARYING)
            start, end = 0, end - start
        self._place = end
        self._request.output_tokens += count
        return self._head + _HEADERS[count] + self._drawn[start:end]


def _next_tokens(request: Request, count: int) -> bytes:
    """Return the next tokens of a request, each with its msgpack type before it."""
    keys, starts = np.array([request.key], np.uint64), np.array([request.output_tokens], np.int64)
    tokens = request.source.block(keys, starts, count)[0]
    typed = np.empty((count, 1 + _TOKEN_BYTES), np.uint8)
    typed[:, 0] = _TOKEN[0]
    typed[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(count, _TOKEN_BYTES)
    return typed.tobytes()
