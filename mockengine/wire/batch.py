# SPDX-License-Identifier: Apache-2.0
"""The encoder of a step: constant bytes for whoever says nothing but tokens, the ordinary encoder for the rest.

The output of a request that is simply decoding is `[request_id, [token, …]]`, and only the tokens change from step to
step. Written as msgpack's uint 32, which holds any token id, a token takes five bytes; so such outputs are laid out
once, as rows of one table for each length of id, and a step writes its tokens into a column of it. Where their scores
are said too, these are an item behind the tokens, of one length for one number of scores: one column more. What the
rows are joined to, the head of the envelope and its tail, is a few dozen bytes. Steps that differ in nothing but these
columns are copies of the first one.

The layout is that of protocol section 4; `outputs` has the encoder that says everything.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from mockengine.wire.codec import pack
from mockengine.wire.lines import Line
from mockengine.wire.logprobs import PackedScores
from mockengine.wire.outputs import StepOutputs, output_items, step_tail_items, unsigned
from mockengine.wire.record import record
from mockengine.wire.stats import SchedulerStats

Tokens: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.uint32]]
"""Tokens by step, request, and place in the chunk that the request says in that step."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_TOKEN: Final = b"\xce\0\0\0\0"
_ID_AND_TOKENS: Final = b"\x92"
_ID_TOKENS_AND_SCORES: Final = b"\x93"
_FEWEST_ROWS: Final = 8
_FIXARRAY_MOST: Final = 15
_ARRAY_16_MOST: Final = 2**16 - 1


class Strip:
    """Outputs of `chunk_size` tokens for requests whose ids take the same number of bytes: one row each, no gaps."""

    def __init__(self, id_bytes: int, chunk_size: int, scores_bytes: int = 0) -> None:
        """Make an empty strip.

        Args:
            id_bytes: length of an id as msgpack.
            chunk_size: tokens of every output.
            scores_bytes: length of their scores as msgpack, which every output says besides; 0 is none.

        """
        self._head = _ID_TOKENS_AND_SCORES if scores_bytes else _ID_AND_TOKENS
        self._tail = array_header(chunk_size) + _TOKEN * chunk_size + bytes(scores_bytes)
        self._chunk_size = chunk_size
        self._scores_bytes = scores_bytes
        self._width = len(self._head) + id_bytes + len(self._tail)
        self._rows = 0
        self._bytes = bytearray()
        self._allocate(_FEWEST_ROWS)

    def __len__(self) -> int:
        return self._rows

    @property
    def num_bytes(self) -> int:
        """What all rows take."""
        return self._rows * self._width

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._capacity

    def append(self, packed_id: bytes) -> int:
        """Add a row for the request of that id, as msgpack; return its number."""
        if self._rows == self._capacity:
            self._allocate(2 * self._capacity)
        row = self._rows
        self._rows += 1
        self._bytes[row * self._width : self._rows * self._width] = self._head + packed_id + self._tail
        return row

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self._rows -= 1
        last, width = self._rows, self._width
        if row != last:
            self._bytes[row * width : (row + 1) * width] = self._bytes[last * width : (last + 1) * width]

    def write(self, tokens: Tokens, scores: PackedScores | None = None) -> memoryview:
        """Write the tokens of the first step, and their scores; return all rows, valid until the next change."""
        self._tokens[0, : self._rows] = tokens[0]
        if scores is not None:
            self._score_view(self._bytes, 0, (1, self._rows), self.num_bytes)[0] = scores[0]
        return memoryview(self._bytes)[: self.num_bytes]

    def write_all(
        self, tokens: Tokens, scores: PackedScores | None, into: bytearray, first_row: int, step_bytes: int
    ) -> None:
        """Write what all steps say into as many copies of the rows, `step_bytes` apart from `first_row` on."""
        shape = tokens.shape[:2]
        self._token_view(into, first_row, shape, step_bytes)[:] = tokens
        if scores is not None:
            self._score_view(into, first_row, shape, step_bytes)[:] = scores

    def _allocate(self, capacity: int) -> None:
        grown = bytearray(capacity * self._width)
        grown[: len(self._bytes)] = self._bytes
        self._bytes = grown
        self._capacity = capacity
        self._tokens = self._token_view(grown, 0, (1, capacity), len(grown))

    def _token_view(self, of: bytearray, first_row: int, shape: tuple[int, int], step_bytes: int) -> Tokens:
        """Return the places of tokens in a buffer, for so many steps and rows."""
        return np.ndarray(
            (*shape, self._chunk_size),
            dtype=">u4",
            buffer=of,
            offset=first_row + self._width - self._scores_bytes - len(_TOKEN) * self._chunk_size + 1,
            strides=(step_bytes, self._width, len(_TOKEN)),
        )

    def _score_view(self, of: bytearray, first_row: int, shape: tuple[int, int], step_bytes: int) -> PackedScores:
        """Return the places of scores in a buffer, for so many steps and rows."""
        return np.ndarray(
            shape,
            dtype=f"V{self._scores_bytes}",
            buffer=of,
            offset=first_row + self._width - self._scores_bytes,
            strides=(step_bytes, self._width),
        )


@record
class Burst:
    """Messages of one frame each, all of them as long as the others.

    Attributes:
        frames: one behind the other.
        frame_bytes: length of each.

    """

    frames: bytearray
    frame_bytes: int

    def __len__(self) -> int:
        return len(self.frames) // self.frame_bytes

    def __iter__(self) -> Iterator[Sequence[Buffer]]:
        view = memoryview(self.frames)
        for start in range(0, len(view), self.frame_bytes):
            yield [view[start : start + self.frame_bytes]]


Messages: TypeAlias = Sequence[Sequence[Buffer]] | Burst
"""Encoded messages, in order: the frames of each."""


@record
class Rows:
    """What all rows of a strip say in one step or in several.

    Attributes:
        strip: has a row for each request.
        tokens: of each.
        scores: `[steps, rows]` of these tokens, where the strip has room for them.

    """

    strip: Strip
    tokens: Tokens
    scores: PackedScores | None = None


class StepEncoder:
    """Writes the steps of one rank for one line of frontends."""

    def __init__(self, engine_index: int) -> None:
        """Make an encoder; raises ValueError for an index that is no unsigned 32-bit int."""
        self._packed_index = pack(unsigned(engine_index, "engine_index"))
        self._packed_stats: tuple[SchedulerStats | None, str, bytes] = (None, "", pack(None))

    def encode(
        self, step: StepOutputs, line: Line, rows: Sequence[Rows] = (), packed: Sequence[bytes] = ()
    ) -> Messages:
        """Encode a step, or several that differ in what the rows say alone.

        Args:
            step: what is said besides the rows; `engine_index` is that of this encoder. With tokens of several steps it
                has no outputs and no finished requests, since these are said once.
            line: the frontend's.
            rows: each with tokens of as many steps.
            packed: outputs as msgpack, of one step.

        Returns:
            One message for each step, of one frame and those of large tensors.

        Raises:
            ValueError: as `write_envelope`.

        """
        num_rows = sum(len(part.strip) for part in rows) + len(packed)
        if not (num_rows or step.outputs or step.scheduler_stats or step.finished_requests):
            raise ValueError("an envelope without outputs, statistics and finished requests kills a Rust frontend")
        tail = step_tail_items(step, line)
        head = array_header(3 + len(tail)) + self._packed_index + array_header(num_rows + len(step.outputs))
        aux_frames: list[bytes] = []
        parts: list[Buffer] = [
            head,
            *[part.strip.write(part.tokens, part.scores) for part in rows],
            *packed,
            *[pack(output_items(output, line, aux_frames)) for output in step.outputs],
            self._stats(step.scheduler_stats, line),
            # Its items, without the header of their array.
            pack(tail)[1:],
        ]
        first = b"".join(parts)
        return [[first, *aux_frames]] if not rows or len(rows[0].tokens) == 1 else _burst(first, len(head), rows)

    def _stats(self, stats: SchedulerStats | None, line: Line) -> bytes:
        """Encode statistics, which mostly are those of the step before."""
        if stats is None:
            return b"\xc0"
        known, line_name, packed = self._packed_stats
        if stats is not known or line.name != line_name:
            packed = pack(stats.to_wire(with_encoder_cache_usage=line.stats_have_encoder_cache_usage))
            self._packed_stats = (stats, line.name, packed)
        return packed


def array_header(items: int) -> bytes:
    """Return the msgpack header of an array."""
    if items <= _FIXARRAY_MOST:
        return bytes([0x90 | items])
    if items <= _ARRAY_16_MOST:
        return b"\xdc" + items.to_bytes(2, "big")
    return b"\xdd" + items.to_bytes(4, "big")


def _burst(first: bytes, first_row: int, rows: Sequence[Rows]) -> Burst:
    """Return the first step and its copies, each with what its own step says."""
    copies = bytearray(first) * len(rows[0].tokens)
    for part in rows:
        part.strip.write_all(part.tokens, part.scores, copies, first_row, len(first))
        first_row += part.strip.num_bytes
    return Burst(copies, len(first))
