# SPDX-License-Identifier: Apache-2.0
"""Scores that are made for many outputs at once are those of one output at a time, whoever steps with whom."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import SpeculationConfig
from mockengine.engine.gate import Gate
from mockengine.engine.requests import Request
from mockengine.engine.timing import TimingConfig
from mockengine.replies.planner import RepliesConfig
from mockengine.wire.outputs import EventType
from mockengine.wire.sampling import SamplingParams
from tests.engine.test_running import VOCAB_SIZE, in_order
from tests.support.rig import CONFIG, Rig, request

FEW_BLOCKS = BatchingConfig(num_gpu_blocks=20, max_num_seqs=6, max_num_batched_tokens=64, async_scheduling=False)
DRAFTS = SpeculationConfig(acceptance_rates=(0.8, 0.6, 0.3))
OWN_PACE = TimingConfig(timing="per_request", itl_ms=1.0)
RUNNERS: dict[str, dict[str, Any]] = {
    "vllm": {"batching": FEW_BLOCKS},
    "vllm, asynchronous": {"batching": replace(FEW_BLOCKS, async_scheduling=True)},
    "vllm, chunks": {"batching": FEW_BLOCKS, "output_token_chunk_size": 3},
    "per_request": {"timing": OWN_PACE},
    "per_request, chunks": {"timing": OWN_PACE, "output_token_chunk_size": 7},
    "vllm, per_request": {"timing": OWN_PACE, "batching": FEW_BLOCKS},
    "drafts": {"speculation": DRAFTS},
    "vllm, drafts": {"speculation": DRAFTS, "batching": FEW_BLOCKS},
}
ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 5, "top_k": 3},
    {"logprob_token_ids": (1, 2, 3, 4, 5)},
    {"logprobs": 20, "temperature": 0.0},
    {"logprobs": -1},
]


@dataclass(frozen=True)
class Ask:
    """A request comes in, and some steps later perhaps its end."""

    prompt_tokens: int
    max_tokens: int
    asked: dict[str, Any]
    pause: int
    is_aborted: bool


ASKS = st.lists(
    st.builds(Ask, st.integers(1, 60), st.integers(1, 110), st.sampled_from(ASKED), st.integers(0, 25), st.booleans()),
    min_size=1,
    max_size=12,
)


@contextmanager
def everything_is_said_one_by_one() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Request, "plain_outputs_left", return_value=0))
        stack.enter_context(mock.patch.object(Request, "has_more_to_say", new=True))
        yield


@contextmanager
def counted() -> Iterator[mock.MagicMock]:
    """Count the outputs that are made one by one."""
    with mock.patch.object(Request, "advance", autospec=True, side_effect=Request.advance) as spoken:
        yield spoken


def config(runner: str) -> EngineConfig:
    return replace(CONFIG, max_model_len=200, replies=RepliesConfig(vocab_size=VOCAB_SIZE), **RUNNERS[runner])


def play(runner: str, asks: list[Ask]) -> Rig:
    rig = Rig(config(runner))
    for number, ask in enumerate(asks):
        params = SamplingParams(max_tokens=ask.max_tokens, **ask.asked)
        rig.add(request(f"r{number}", prompt=[number % 3] * ask.prompt_tokens, sampling_params=params))
        for _ in range(ask.pause):
            if rig.ranks.next_deadline(rig.now, frozenset()) is not None:
                rig.step()
        if ask.is_aborted:
            rig.abort(f"r{number // 2}")
    rig.run(5_000)
    return rig


@pytest.mark.parametrize("runner", RUNNERS)
@settings(deadline=None, max_examples=8)
@given(asks=ASKS)
def test_every_envelope_is_that_of_the_ordinary_way(runner: str, asks: list[Ask]) -> None:
    with everything_is_said_one_by_one():
        ordinary = play(runner, asks)
    batched = play(runner, asks)
    assert [in_order(envelope) for envelope in batched.to(0)] == [in_order(envelope) for envelope in ordinary.to(0)]
    assert batched.watcher.tokens == ordinary.watcher.tokens


@pytest.mark.parametrize("runner", [name for name in RUNNERS if name.startswith("vllm")])
def test_so_it_is_of_requests_that_were_preempted(runner: str) -> None:
    asks = [Ask(50, 110, {"logprobs": 5}, 2, is_aborted=False)] * 3
    with everything_is_said_one_by_one():
        ordinary = play(runner, asks)
    batched = play(runner, asks)
    assert [in_order(envelope) for envelope in batched.to(0)] == [in_order(envelope) for envelope in ordinary.to(0)]
    events = [event.type for number in range(3) for output in batched.outputs(f"r{number}") for event in output.events]
    assert EventType.PREEMPTED in events


@pytest.mark.parametrize("runner", ["vllm", "per_request", "drafts"])
def test_few_outputs_are_said_one_by_one(runner: str) -> None:
    with counted() as spoken:
        rig = play(runner, [Ask(3, 100, {"logprobs": 5}, 0, is_aborted=False)])
    # The first one and the last.
    assert spoken.call_count == 2
    assert sum(output.new_logprobs.rows for output in rig.outputs("r0") if output.new_logprobs) == 100


def test_scores_of_a_whole_vocabulary_are_said_one_by_one() -> None:
    with counted() as spoken:
        play("vllm", [Ask(3, 40, {"logprobs": -1}, 0, is_aborted=False)])
    assert spoken.call_count == 40


def test_prompt_scores_alone_do_not_keep_a_request_out_of_the_set() -> None:
    with counted() as spoken:
        play("vllm", [Ask(3, 40, {"prompt_logprobs": 2}, 0, is_aborted=False)])
    assert spoken.call_count == 2


def _many(rig: Rig) -> None:
    """Ask for more than one lane has room for at first, and let some go while others come."""
    names = [f"r{number:03d}" for number in range(100)]
    for at, number in enumerate(range(0, 100, 20)):
        for place, name in enumerate(names[number : number + 20]):
            given: dict[str, Any] = {"logprob_token_ids": (place, 1, 2, 3, 4)}
            asked: dict[str, Any] = {"logprobs": 5, "top_k": place} if place % 3 else given
            params = SamplingParams(max_tokens=50 + place, **asked)
            rig.add(request(name, prompt=[number, place], sampling_params=params))
        for _ in range(7):
            rig.step()
        rig.abort(*names[number + at : number + 20 : 7])
    rig.run()


def test_a_set_of_many_says_the_same() -> None:
    chunks = replace(CONFIG, max_model_len=1_000, output_token_chunk_size=2)
    with everything_is_said_one_by_one():
        ordinary = Rig(chunks)
        _many(ordinary)
    batched = Rig(chunks)
    _many(batched)
    assert [in_order(envelope) for envelope in batched.to(0)] == [in_order(envelope) for envelope in ordinary.to(0)]


def test_an_empty_set_keeps_no_scores() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000))
    ids = [f"r{number}" for number in range(10)]
    rig.add(*(request(name, sampling_params=SamplingParams(max_tokens=500, logprobs=5)) for name in ids))
    rig.step()
    runner = rig.ranks.engines[0]._runner
    assert isinstance(runner, Gate)
    running = runner._runner._speakers._sets[0]
    assert len(running) == 10
    rig.abort(*ids)
    assert not running._lanes
    rig.add(request("again", sampling_params=SamplingParams(max_tokens=20, logprobs=5)))
    rig.run()
    assert len(rig.tokens("again")) == 20


def test_scores_are_said_in_bursts_too() -> None:
    rig = Rig(replace(CONFIG, max_model_len=1_000))
    rig.add(request("scored", sampling_params=SamplingParams(max_tokens=202, logprobs=5)))
    rig.add(request("plain", max_tokens=202))
    rig.step()
    # As many as are drawn together, up to the last output.
    assert [rig.burst(frozenset(), 10_000) for _ in range(5)] == [64, 64, 64, 8, 1]
    assert (len(rig.tokens("scored")), len(rig.tokens("plain"))) == (202, 202)
