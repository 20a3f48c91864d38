# SPDX-License-Identifier: Apache-2.0
"""The running set says what the ordinary way would say, whatever joins, leaves and waits meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mockengine.engine.gate import Gate
from mockengine.engine.observer import Served
from mockengine.engine.requests import Request
from mockengine.engine.running import RunningSet
from mockengine.replies.key import reply_key
from mockengine.replies.planner import RepliesConfig
from mockengine.replies.random import RandomTokens
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.outputs import Envelope, FinishReason, StepOutputs
from mockengine.wire.sampling import SamplingParams
from tests.support.rig import CONFIG, Rig, request

CLIENTS = 3
# Ids of these lengths cross every limit of msgpack's headers for text.
ID_LENGTHS = (1, 2, 31, 32, 255, 256, 65_535)
VOCAB_SIZE = 300
# What is asked of scores: nothing, few of several forms and limits, and so many that they are said one by one.
ASKED: list[dict[str, Any]] = [
    *[{}] * 4,
    {"logprobs": 0},
    {"logprobs": 3},
    {"logprobs": 3, "top_k": 2},
    {"logprobs": 3, "top_p": 0.5, "prompt_logprobs": 1},
    {"logprobs": 20, "temperature": 0.0},
    {"logprob_token_ids": (7, 9, 11)},
    {"logprob_token_ids": (5, 299, 2**32 - 1)},
    {"logprob_token_ids": ()},
    {"logprobs": -1},
    {"prompt_logprobs": 2},
]


@dataclass(frozen=True)
class Arrival:
    """A request comes in."""

    client: int
    id_length: int
    max_tokens: int
    asked: dict[str, Any]


@dataclass(frozen=True)
class Departure:
    """The request that came as the nth is aborted, by its client or by chance by another."""

    nth: int


@dataclass(frozen=True)
class Steps:
    """Some steps, while some clients do not read."""

    count: int
    blocked: frozenset[int]


Event = Arrival | Departure | Steps
EVENTS: SearchStrategy[list[Event]] = st.lists(
    st.one_of(
        st.builds(
            Arrival,
            st.integers(0, CLIENTS - 1),
            st.sampled_from(ID_LENGTHS),
            st.integers(0, 150),
            st.sampled_from(ASKED),
        ),
        st.builds(Departure, st.integers(0, 40)),
        st.builds(Steps, st.integers(1, 70), st.frozensets(st.integers(0, CLIENTS - 1), max_size=CLIENTS)),
    ),
    max_size=40,
)


@contextmanager
def nothing_joins_the_set() -> Iterator[None]:
    """Let every request be encoded in the ordinary way, with every output."""
    with mock.patch.object(Request, "plain_outputs_left", return_value=0):
        yield


def play(events: list[Event], chunk_size: int, *, at_once: bool = False) -> Rig:
    replies = RepliesConfig(vocab_size=VOCAB_SIZE)
    rig = Rig(replace(CONFIG, clients=CLIENTS, max_model_len=200, output_token_chunk_size=chunk_size, replies=replies))
    ids: list[str] = []
    for event in events:
        match event:
            case Arrival(client, id_length, max_tokens, asked):
                # The same id again, while the first one runs or after, must make no difference either.
                ids.append(f"{len(ids) % 30}".ljust(id_length, "x"))
                params = SamplingParams(max_tokens=max_tokens, **asked)
                rig.add(request(ids[-1], client=client, prompt=[len(ids), client], sampling_params=params))
            case Departure(nth) if nth < len(ids):
                rig.abort(ids[nth])
            case Steps(count, blocked):
                left = count
                while left > 0:
                    left -= rig.burst(blocked, left if at_once else 1)
    rig.run()
    return rig


def in_order(envelope: Envelope) -> Envelope:
    if not isinstance(envelope, StepOutputs):
        return envelope
    return replace(envelope, outputs=tuple(sorted(envelope.outputs, key=lambda output: output.request_id)))


def timeless(envelope: Envelope) -> Envelope:
    if not isinstance(envelope, StepOutputs):
        return envelope
    outputs = [replace(output, events=()) for output in envelope.outputs]
    return in_order(replace(envelope, timestamp=0.0, outputs=tuple(outputs)))


def _ending(finished: tuple[Served, str, float]) -> tuple[float, str]:
    served, _, duration_s = finished
    return duration_s, served.request_id


@settings(deadline=None, max_examples=150)
@given(events=EVENTS, chunk_size=st.sampled_from([1, 2, 3, 15, 16, 64, 65, 1_000]))
def test_every_envelope_is_that_of_the_ordinary_way(events: list[Event], chunk_size: int) -> None:
    with nothing_joins_the_set():
        ordinary = play(events, chunk_size)
    batched = play(events, chunk_size)
    assert [(client, in_order(envelope)) for client, envelope in batched.heard] == [
        (client, in_order(envelope)) for client, envelope in ordinary.heard
    ]
    # Those that end with the same step are told in any order.
    assert sorted(batched.watcher.finished, key=_ending) == sorted(ordinary.watcher.finished, key=_ending)
    assert batched.watcher.tokens == ordinary.watcher.tokens


@settings(deadline=None, max_examples=150)
@given(events=EVENTS, chunk_size=st.sampled_from([1, 2, 3, 16, 64, 1_000]))
def test_steps_at_once_say_what_they_say_one_by_one(events: list[Event], chunk_size: int) -> None:
    one_by_one, at_once = play(events, chunk_size), play(events, chunk_size, at_once=True)
    for client in range(CLIENTS):
        assert [timeless(envelope) for envelope in at_once.to(client)] == [
            timeless(envelope) for envelope in one_by_one.to(client)
        ]
    assert [(served, reason) for served, reason, _ in at_once.watcher.finished] == [
        (served, reason) for served, reason, _ in one_by_one.watcher.finished
    ]
    assert at_once.watcher.tokens == one_by_one.watcher.tokens


def test_steps_are_made_at_once_until_something_else_is_due() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000))
    rig.add(request("r1", max_tokens=302), request("r2", max_tokens=402))
    rig.step()
    # As many as are drawn together, up to the last output of r1, and to that of r2.
    assert [rig.burst(frozenset(), 10_000) for _ in range(5)] == [300, 1, 99, 1, 1]
    assert (len(rig.tokens("r1")), len(rig.tokens("r2"))) == (302, 402)
    assert rig.ranks.num_requests == 0


def test_with_a_pace_every_step_has_its_own_time() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000, itl_s=0.01))
    rig.add(request("r1", max_tokens=300))
    rig.step()
    assert rig.burst(frozenset(), 100) == 1


def test_bursts_go_on_beside_a_client_that_does_not_read() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000, clients=2))
    rig.add(*(request(f"r{client}", client=client, max_tokens=500) for client in range(2)))
    rig.step()
    rig.add(request("unheard", client=0, max_tokens=500))
    assert rig.burst(frozenset({0}), 200) == 200


def test_clients_share_a_burst() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000, clients=4))
    rig.add(*(request(f"r{client}", client=client, max_tokens=500) for client in range(4)))
    rig.step()
    assert rig.burst(frozenset(), 200) == 50


def test_a_burst_is_no_larger_than_what_a_frontend_takes_at_a_time() -> None:
    rig = Rig(replace(CONFIG, max_model_len=10_000))
    rig.add(*(request(f"r{number:04d}", max_tokens=5_000) for number in range(1_000)))
    rig.step()
    assert rig.burst(frozenset(), 10_000) == 2**18 // (1_000 * len(b"\x92\xa5r0000\x91\xce\0\0\0\0"))


def test_requests_do_join_the_set() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000))
    rig.add(*(request(f"r{number}", prompt=[number], max_tokens=100) for number in range(50)))
    with mock.patch.object(Request, "advance", autospec=True, side_effect=Request.advance) as spoken:
        rig.run()
    # The first output and the last one of each.
    assert spoken.call_count == 100
    assert {len(rig.tokens(f"r{number}")) for number in range(50)} == {100}


def test_a_set_of_many_grows_and_shrinks() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000))
    ids = [f"r{number:05d}" for number in range(3_000)]
    rig.add(*(request(name, prompt=[number], max_tokens=80) for number, name in enumerate(ids)))
    for _ in range(10):
        rig.step()
    rig.abort(*ids[::2])
    assert rig.ranks.engines[0].num_running == 1_500
    rig.run()
    assert rig.ranks.num_requests == 0
    for number in (1, 1_499, 2_999):
        key = reply_key(request(prompt=[number]), CONFIG.replies.seed, CONFIG.replies.seed_scope)
        assert rig.tokens(ids[number]) == RandomTokens(Vocabulary(32_000)).tokens(key, 0, 80)
    finished = {served.request_id: (served.output_tokens, reason) for served, reason, _ in rig.watcher.finished}
    assert finished[ids[0]] == (10, "abort")
    assert finished[ids[1]] == (80, "length")


def test_everything_ends_when_the_engine_shuts_down() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000))
    rig.add(*(request(f"r{number}", max_tokens=500) for number in range(20)))
    for _ in range(30):
        rig.step()
    rig._hear(rig.ranks.abort_everything(rig.now))
    assert rig.ranks.num_requests == 0
    rig.run()
    assert {rig.finish_reason(f"r{number}") for number in range(20)} == {FinishReason.ABORT}
    assert {served.output_tokens for served, _, _ in rig.watcher.finished} == {30}


def _set_of(rig: Rig) -> RunningSet:
    runner = rig.ranks.engines[0]._runner
    assert isinstance(runner, Gate)
    return runner._runner._speakers._sets[0]


def test_an_empty_set_keeps_few_lanes_and_no_large_one() -> None:
    rig = Rig(replace(CONFIG, max_model_len=100_000))
    ids = [f"{number:0{4 + number % 40}d}" for number in range(4_000)]
    rig.add(*(request(name, max_tokens=50_000) for name in ids))
    rig.step()
    running = _set_of(rig)
    assert len(running) == 4_000
    rig.abort(*ids)
    assert len(running) == 0
    assert len(running._lanes) <= 16
    assert not running._leaving
    assert not running._members


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_tokens_of_a_block_are_those_of_each_reply(chunk_size: int) -> None:
    source = RandomTokens(Vocabulary(2**31 - 1))
    keys = np.array([0, 1, 2**64 - 1, 12345678901234567890], np.uint64)
    starts = np.array([0, 5, 10**9, 2**31 - 2], np.int64)
    block = source.block(keys, starts, chunk_size)
    assert block.shape == (4, chunk_size)
    for row, key, start in zip(block, keys, starts, strict=True):
        assert row.tolist() == source.tokens(int(key), int(start), chunk_size)
