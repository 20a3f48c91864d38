# SPDX-License-Identifier: Apache-2.0
"""Replies begin with reasoning of the length that the settings and the client's budget give, where it may be."""

from array import array
from typing import Any

import numpy as np
import pytest

from mockengine.replies.length import fixed_length, uniform_length
from mockengine.replies.planner import Plan, Planner, RepliesConfig, ReplyKind
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.outputs import FinishReason
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

WORDS = 12
ANSWER = 20
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


class Replies:
    """An engine's replies, as text."""

    def __init__(self, tokenizer: Tokenizer, writer: StructuredWriter) -> None:
        self.tokenizer = tokenizer
        self._writer = writer

    def plan(
        self,
        prompt: str = PROMPT,
        *,
        ended: bool | None = None,
        kind: ReplyKind = ReplyKind.WORDS,
        config: dict[str, Any] | None = None,
        **params: Any,
    ) -> Plan:
        usual: dict[str, Any] = {
            "reasoning_length": fixed_length(WORDS),
            "output_length": fixed_length(ANSWER),
            "kind": kind,
        }
        replies = RepliesConfig(
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=self.tokenizer,
            writer=self._writer,
            **(usual | (config or {})),
        )
        given = SamplingParams(**({"max_tokens": 500, "eos_token_id": self.tokenizer.eos_ids[0]} | params))
        made = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=array("I", self.tokenizer.encode(prompt)),
            sampling_params=given,
            reasoning_ended=ended,
        )
        return Planner(replies, 4_096).plan(made)

    def tokens(self, *args: Any, **asked: Any) -> list[int]:
        plan = self.plan(*args, **asked)
        return plan.source.tokens(plan.key, 0, plan.ending.output_tokens)

    def text(self, *args: Any, **asked: Any) -> str:
        return self.tokenizer.decode(self.tokens(*args, **asked))

    def parts(self, text: str) -> tuple[int, int]:
        """Return how many tokens of reasoning and of an answer a text has."""
        reasoning, answer = text.removeprefix("<think>\n").split("\n</think>\n\n")
        return len(self.tokenizer.encode(reasoning)), len(self.tokenizer.encode(answer))


@pytest.fixture(scope="module")
def replies(tokenizer: Tokenizer, writer: StructuredWriter) -> Replies:
    return Replies(tokenizer, writer)


@pytest.mark.parametrize("kind", [ReplyKind.WORDS, ReplyKind.ECHO])
def test_reasoning_comes_before_the_answer(replies: Replies, kind: ReplyKind) -> None:
    text = replies.text(kind=kind)
    assert text.startswith("<think>\n")
    # The source itself says nothing of the EOS.
    assert replies.parts(text.removesuffix("<|im_end|>"))[0] == WORDS
    plan = replies.plan(kind=kind)
    marks = sum(len(replies.tokenizer.encode(part)) for part in ("<think>", "\n", "\n", "</think>\n\n"))
    assert plan.ending.output_tokens == marks + WORDS + ANSWER
    assert plan.ending.finish_reason is FinishReason.STOP


def test_none_is_no_reasoning(replies: Replies) -> None:
    assert "think>" not in replies.text(config={"reasoning_length": None})


def test_a_block_is_the_same_reply(replies: Replies) -> None:
    plan = replies.plan()
    tokens = plan.source.tokens(plan.key, 0, 40)
    starts = np.array([0, 5, WORDS + 1, 25], np.int64)
    block = plan.source.block(np.array([plan.key] * 4, np.uint64), starts, 8)
    assert block.tolist() == [tokens[start : start + 8] for start in starts.tolist()]
    assert [plan.source.tokens(plan.key, start, 1)[0] for start in range(40)] == tokens


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 13, 14, 100, -1])
def test_a_budget_is_kept_to(replies: Replies, budget: int) -> None:
    tokens = replies.tokens(thinking_token_budget=budget)
    begin, end = (tokens.index(replies.tokenizer.added_ids[mark]) for mark in ("<think>", "</think>"))
    unlimited = WORDS + 2
    assert (begin, end - 1) == (0, min(budget, unlimited) if budget >= 0 else unlimited)


def test_max_tokens_cuts_reasoning_too(replies: Replies) -> None:
    assert replies.tokens(max_tokens=6) == replies.tokens()[:6]
    assert replies.plan(max_tokens=6).ending.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_opens_it_gets_no_mark(replies: Replies) -> None:
    text = replies.text(f"{PROMPT}<think>\n")
    assert not text.startswith("<think>")
    assert text.count("</think>\n\n") == 1


def test_where_it_has_ended_there_is_none(replies: Replies) -> None:
    assert "think>" not in replies.text(f"{PROMPT}<think>\n\n</think>\n\n")
    assert "think>" not in replies.text(ended=True)


@pytest.mark.parametrize("mark", ["<think>", "</think>"])
def test_a_client_that_forbids_the_marks_gets_none(replies: Replies, mark: str) -> None:
    token = replies.tokenizer.added_ids[mark]
    assert "think>" not in replies.text(bad_words_token_ids=((token,),))
    assert "think>" not in replies.text(stop_token_ids=(token,))


def test_only_what_is_allowed_is_said(replies: Replies) -> None:
    allowed = (300, 301)
    assert set(replies.tokens(allowed_token_ids=allowed, max_tokens=50)[:-1]) <= {*allowed}


def test_words_that_are_forbidden_are_no_reasoning(replies: Replies) -> None:
    word = replies.tokens()[4]
    assert word not in replies.tokens(stop_token_ids=(word,), max_tokens=20)


@pytest.mark.parametrize("length", [WORDS, None])
def test_a_constraint_begins_after_it(replies: Replies, length: int | None) -> None:
    config = {"reasoning_length": None if length is None else fixed_length(length)}
    text = replies.text(ended=False, structured_outputs={"choice": ["yes"]}, config=config).removesuffix("<|im_end|>")
    if length is None:
        assert text == "<think>\n\n</think>\n\nyes"
    else:
        assert text.endswith("\n</think>\n\nyes")
        assert replies.parts(text)[0] == length
    assert replies.text(ended=True, structured_outputs={"choice": ["yes"]}, config=config).startswith("yes")


def test_lengths_are_drawn(replies: Replies) -> None:
    config = {"reasoning_length": uniform_length(1, 50), "output_length": uniform_length(1, 50)}
    found = [replies.parts(replies.text(f"{PROMPT}{number}", config=config)) for number in range(30)]
    assert len({reasoning for reasoning, _ in found}) > 10
    # They are drawn each by itself.
    assert len({reasoning - answer for reasoning, answer in found}) > 10
