# SPDX-License-Identifier: Apache-2.0
"""The encoder of a step: rows of constant bytes, and everything else as the ordinary encoder writes it."""

from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.wire.batch import Messages, Rows, StepEncoder, Strip, Tokens, array_header
from mockengine.wire.codec import pack, unpack
from mockengine.wire.lines import LINES, NEWEST, Line
from mockengine.wire.logprobs import logprobs_lists, pack_logprobs, packed_bytes
from mockengine.wire.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    Envelope,
    EventType,
    FinishReason,
    StepOutputs,
    read_envelope,
    write_envelope,
)
from mockengine.wire.stats import PrefillStats, SchedulerStats
from mockengine.wire.tensors import Tensor

STEPS = [
    StepOutputs(engine_index=0, timestamp=1.5, outputs=(EngineCoreOutput(request_id="r1", new_token_ids=(1, 70_000)),)),
    StepOutputs(
        engine_index=0,
        timestamp=2.5,
        outputs=(
            EngineCoreOutput(
                request_id="r1",
                new_token_ids=(1,),
                finish_reason=FinishReason.STOP,
                stop_reason=7,
                events=(EngineCoreEvent(EventType.QUEUED, 1.0),),
                prefill_stats=PrefillStats(3, 3),
            ),
        ),
        scheduler_stats=SchedulerStats(num_running_reqs=3, num_waiting_reqs=1),
        finished_requests=("r1", "r2"),
        weight_version="v1",
    ),
    StepOutputs(engine_index=0, timestamp=3.5, scheduler_stats=SchedulerStats()),
    StepOutputs(engine_index=0, timestamp=4.5, finished_requests=("r1",)),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_without_rows_it_writes_what_the_ordinary_encoder_writes(line: Line) -> None:
    encoder = StepEncoder(0)
    # Twice, since statistics are remembered.
    for step in [*STEPS, *STEPS]:
        ((frame,),) = encoder.encode(step, line)
        assert unpack(bytes(frame)) == unpack(write_envelope(step, line)[0])


def test_large_tensors_follow_in_frames_of_their_own() -> None:
    sizes = (64, 10, 1_000)
    outputs = tuple(
        EngineCoreOutput(
            request_id=f"r{size}", pooling_output=Tensor("float32", (size,), np.arange(size, dtype="<f4").tobytes())
        )
        for size in sizes
    )
    step = StepOutputs(engine_index=0, timestamp=1.5, outputs=outputs)
    strip = Strip(3, 1)
    strip.append(pack("r1"))
    ((first, *aux_frames),) = StepEncoder(0).encode(step, NEWEST, [Rows(strip, _tokens(1, 1, 1))])
    assert [len(frame) for frame in aux_frames] == [256, 4_000]
    read = read_envelope([bytes(first), *map(bytes, aux_frames)], NEWEST)
    assert isinstance(read, StepOutputs)
    assert tuple(read.outputs[1:]) == outputs
    assert [len(frame) for frame in write_envelope(step)[1:]] == [256, 4_000]


def test_statistics_that_changed_are_written_anew() -> None:
    encoder = StepEncoder(0)
    for running in (1, 1, 2, 1):
        step = StepOutputs(engine_index=0, timestamp=1.0, scheduler_stats=SchedulerStats(num_running_reqs=running))
        assert _read(encoder.encode(step, NEWEST)) == [step]


def test_a_message_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="kills a Rust frontend"):
        StepEncoder(0).encode(StepOutputs(engine_index=0, timestamp=1.0), NEWEST)


@pytest.mark.parametrize("items", [0, 1, 15, 16, 65_535, 65_536, 2**32 - 1])
def test_headers_of_arrays_are_those_of_msgpack(items: int) -> None:
    assert array_header(items) == msgpack.Packer().pack_array_header(items)


@given(
    steps=st.sampled_from([1, 2, 7]),
    chunk_size=st.sampled_from([1, 2, 15, 16, 300]),
    ids=st.lists(st.text("abc", min_size=3, max_size=3), min_size=1, max_size=60),
    removed=st.lists(st.integers(0, 1_000), max_size=30),
)
def test_a_strip_holds_each_row_once_whatever_is_removed(
    steps: int, chunk_size: int, ids: list[str], removed: list[int]
) -> None:
    strip = Strip(4, chunk_size)
    rows: list[str] = []
    for name in ids:
        assert strip.append(pack(name)) == len(rows)
        rows.append(name)
    for number in removed:
        if rows:
            row = number % len(rows)
            strip.remove(row)
            last = rows.pop()
            if row < len(rows):
                rows[row] = last
    assert len(strip) == len(rows)
    tokens = _tokens(steps, len(rows), chunk_size)
    step = StepOutputs(engine_index=0, timestamp=1.0, scheduler_stats=SchedulerStats())
    envelopes = _read(StepEncoder(0).encode(step, NEWEST, [Rows(strip, tokens)]))
    assert [_outputs(envelope) for envelope in envelopes] == [
        [(name, row.tolist()) for name, row in zip(rows, said, strict=True)] for said in tokens
    ]


def test_the_largest_token_id_fits() -> None:
    strip = Strip(3, 1)
    strip.append(pack("r1"))
    rows = bytes(strip.write(np.array([[[2**32 - 1]]], np.uint32)))
    assert unpack(rows) == ["r1", [2**32 - 1]]


def test_steps_at_once_are_those_that_are_made_one_by_one() -> None:
    strips = [Strip(3, 2), Strip(4, 2)]
    for strip, names in zip(strips, (["r1", "r2"], ["r10", "r11", "r12"]), strict=True):
        for name in names:
            strip.append(pack(name))
    tokens = [_tokens(5, 2, 2), _tokens(5, 3, 2)]
    step = StepOutputs(
        engine_index=3, timestamp=1.5, scheduler_stats=SchedulerStats(num_running_reqs=5), weight_version="v1"
    )
    encoder = StepEncoder(3)
    at_once = encoder.encode(step, NEWEST, [Rows(*part) for part in zip(strips, tokens, strict=True)])
    one_by_one: list[Sequence[bytes]] = []
    for place in range(5):
        rows = [Rows(strip, part[place : place + 1]) for strip, part in zip(strips, tokens, strict=True)]
        one_by_one += [[bytes(frame) for frame in message] for message in encoder.encode(step, NEWEST, rows)]
    assert len(at_once) == len(one_by_one)
    assert [[bytes(frame) for frame in message] for message in at_once] == one_by_one


@pytest.mark.parametrize("steps", [1, 5])
def test_scores_lie_behind_the_tokens_of_their_row(steps: int) -> None:
    scored, plain = Strip(3, 2, packed_bytes(2, 4)), Strip(3, 2)
    for name in ("r1", "r2", "r3"):
        scored.append(pack(name))
    scored.remove(0)
    plain.append(pack("r4"))
    ids = np.arange(steps * 2 * 2 * 4, dtype=np.int32).reshape(-1, 2, 4)
    logprobs, ranks = -ids.astype(np.float32), ids[:, :, 0]
    packed = pack_logprobs(ids, logprobs, ranks).reshape(steps, 2)
    step = StepOutputs(engine_index=0, timestamp=1.0)
    rows = [Rows(scored, _tokens(steps, 2, 2), packed), Rows(plain, _tokens(steps, 1, 2))]
    expected = [logprobs_lists(*parts, as_tensors=False) for parts in zip(ids, logprobs, ranks, strict=True)]
    envelopes = _read(StepEncoder(0).encode(step, NEWEST, rows))
    assert len(envelopes) == steps
    for number, envelope in enumerate(envelopes):
        assert isinstance(envelope, StepOutputs)
        assert _outputs(envelope) == [
            *zip(("r3", "r2"), _tokens(steps, 2, 2)[number].tolist(), strict=True),
            ("r4", _tokens(steps, 1, 2)[number, 0].tolist()),
        ]
        said = [output.new_logprobs for output in envelope.outputs]
        assert said == [*expected[2 * number : 2 * number + 2], None]


def _tokens(steps: int, rows: int, chunk_size: int) -> Tokens:
    counted = np.arange(steps * rows * chunk_size, dtype=np.uint32) + np.uint32(2**31)
    return counted.reshape(steps, rows, chunk_size)


def _read(messages: Messages) -> list[Envelope]:
    return [read_envelope([bytes(frame) for frame in message], NEWEST) for message in messages]


def _outputs(envelope: Envelope) -> list[tuple[str, list[int]]]:
    assert isinstance(envelope, StepOutputs)
    return [(output.request_id, list(output.new_token_ids)) for output in envelope.outputs]
