# SPDX-License-Identifier: Apache-2.0
"""Replies that begin with reasoning: what is said is what is planned, and after it they share the work of drawing."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from mockengine.replies import Keys, Positions, Tokens
from mockengine.replies.length import uniform_length
from mockengine.replies.planner import Planner, RepliesConfig
from mockengine.replies.random import RandomTokens
from mockengine.replies.reasoning import Reasoning
from mockengine.replies.reasoning_form import load_reasoning_form
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.sampling import SamplingParams
from tests.support.rig import CONFIG, Rig, request

MOST_WORDS = 90
MAX_TOKENS = 2_000


@pytest.fixture(scope="module")
def replies() -> RepliesConfig:
    tokenizer = Tokenizer.load(Path(__file__).parents[2] / "deploy" / "model")
    reasoning = Reasoning(tokenizer, load_reasoning_form(), uniform_length(1, MOST_WORDS))
    return RepliesConfig(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, reasoning=reasoning)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}], ids=["plain", "scored"])
def test_what_is_said_is_what_is_planned(replies: RepliesConfig, asked: dict[str, int]) -> None:
    rig = Rig(replace(CONFIG, max_model_len=4_000, replies=replies))
    planner = Planner(replies, 4_000)
    made = [
        request(f"r{number}", prompt=[300 + number], sampling_params=SamplingParams(max_tokens=200, **asked))  # type: ignore[arg-type]  # they are the names
        for number in range(7)
    ]
    # They join while others speak, before and after the end of their reasoning.
    for each in made:
        rig.add(each)
        for _ in range(17):
            rig.step()
    rig.run()
    for each in made:
        plan = planner.plan(each)
        assert rig.tokens(each.request_id) == plan.source.tokens(plan.key, 0, 200)


def test_what_comes_after_it_is_drawn_for_all_at_once(replies: RepliesConfig) -> None:
    rig = Rig(replace(CONFIG, max_model_len=4_000, replies=replies))
    rig.add(*(request(f"r{number}", prompt=[300 + number], max_tokens=MAX_TOKENS) for number in range(10)))
    draw, drawn_for = RandomTokens.block, list[int]()

    def block(self: RandomTokens, keys: Keys, starts: Positions, count: int) -> Tokens:
        drawn_for.append(len(keys))
        return draw(self, keys, starts, count)

    for _ in range(MOST_WORDS * 10):
        rig.step()
    with mock.patch.object(RandomTokens, "block", block):
        for _ in range(1_000):
            rig.step()
    assert set(drawn_for) == {10}
