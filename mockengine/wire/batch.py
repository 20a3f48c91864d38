# SPDX-License-Identifier: Apache-2.0
"""The encoder of a step: constant bytes for whoever says nothing but tokens, the ordinary encoder for the rest.

The output of a request that is simply decoding is `[request_id, [token, …]]`, and only the tokens change from step to
step. Written as msgpack's uint 32, which holds any token id, a token takes five bytes; so such outputs are laid out
once, as rows of one table for each length of id, and a step writes its tokens into a column of it. What the rows are
joined to, the head of the envelope and its tail, is a few dozen bytes.

The layout is that of protocol section 4; `outputs` has the encoder that says everything.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from mockengine.wire.codec import pack
from mockengine.wire.lines import Line
from mockengine.wire.outputs import StepOutputs, output_items, step_tail_items, unsigned
from mockengine.wire.stats import SchedulerStats

Tokens: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
"""Tokens of one step: a row for each request, a column for each of its tokens."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_TOKEN: Final = b"\xce\0\0\0\0"
_FEWEST_ROWS: Final = 8
_FIXARRAY_MOST: Final = 15
_ARRAY_16_MOST: Final = 2**16 - 1


class Strip:
    """Outputs of `chunk_size` tokens for requests whose ids take the same number of bytes: one row each, no gaps."""

    def __init__(self, id_bytes: int, chunk_size: int) -> None:
        """Make an empty strip.

        Args:
            id_bytes: length of an id as msgpack.
            chunk_size: tokens of every output.

        """
        self._tokens_text = array_header(chunk_size) + _TOKEN * chunk_size
        self._chunk_size = chunk_size
        self._width = 1 + id_bytes + len(self._tokens_text)
        self._rows = 0
        self._bytes = bytearray()
        self._allocate(_FEWEST_ROWS)

    def __len__(self) -> int:
        return self._rows

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
        self._bytes[row * self._width : self._rows * self._width] = b"\x92" + packed_id + self._tokens_text
        return row

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self._rows -= 1
        last, width = self._rows, self._width
        if row != last:
            self._bytes[row * width : (row + 1) * width] = self._bytes[last * width : (last + 1) * width]

    def write(self, tokens: Tokens) -> memoryview:
        """Write the tokens of a step, a row of them for each row here; return all rows, valid until the next change."""
        self._tokens[: self._rows] = tokens
        return memoryview(self._bytes)[: self._rows * self._width]

    def _allocate(self, capacity: int) -> None:
        grown = bytearray(capacity * self._width)
        grown[: len(self._bytes)] = self._bytes
        self._bytes = grown
        self._capacity = capacity
        self._tokens: Tokens = np.ndarray(
            (capacity, self._chunk_size),
            dtype=">u4",
            buffer=grown,
            offset=self._width - len(_TOKEN) * self._chunk_size + 1,
            strides=(self._width, len(_TOKEN)),
        )


class StepEncoder:
    """Writes the steps of one rank for one line of frontends."""

    def __init__(self, engine_index: int) -> None:
        """Make an encoder; raises ValueError for an index that is no unsigned 32-bit int."""
        self._packed_index = pack(unsigned(engine_index, "engine_index"))
        self._packed_stats: tuple[SchedulerStats | None, str, bytes] = (None, "", pack(None))

    def encode(self, step: StepOutputs, line: Line, rows: Sequence[Buffer] = (), num_rows: int = 0) -> list[bytes]:
        """Encode a step as the frames of one message.

        Args:
            step: what is said besides the rows; `engine_index` is that of this encoder.
            line: the frontend's.
            rows: of strips.
            num_rows: how many rows these are.

        Raises:
            ValueError: as `write_envelope`.

        """
        if not (num_rows or step.outputs or step.scheduler_stats or step.finished_requests):
            raise ValueError("an envelope without outputs, statistics and finished requests kills a Rust frontend")
        tail = step_tail_items(step, line)
        parts: list[Buffer] = [
            array_header(3 + len(tail)),
            self._packed_index,
            array_header(num_rows + len(step.outputs)),
            *rows,
            *[pack(output_items(output, line)) for output in step.outputs],
            self._stats(step.scheduler_stats, line),
            *[pack(item) for item in tail],
        ]
        return [b"".join(parts)]

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
