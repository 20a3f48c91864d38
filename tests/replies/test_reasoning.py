# SPDX-License-Identifier: Apache-2.0
"""Replies begin with reasoning of the length that the settings and the client's budget give, where it may be."""

import json
import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.length import LengthDraw, fixed_length, uniform_length
from mockengine.replies.planner import Plan, Planner, RepliesConfig, ReplyKind
from mockengine.replies.reasoning import Reasoning
from mockengine.replies.reasoning_form import load_reasoning_form
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.wish import Wish
from mockengine.wire.outputs import FinishReason
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

WORDS = 12
ANSWER = 20
USUAL_LENGTH = fixed_length(WORDS)
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


class _Wanting:
    """Wants the same of every reply."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish

    def wish_for(self, _asked: Asked) -> Wish:
        return self._wish


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
        length: LengthDraw | None = USUAL_LENGTH,
        config: dict[str, Any] | None = None,
        **params: Any,
    ) -> Plan:
        usual: dict[str, Any] = {"output_length": fixed_length(ANSWER), "kind": kind}
        usual["reasoning"] = Reasoning(self.tokenizer, load_reasoning_form(), length)
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
        return Planner(replies, 2**20).plan(made)

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
    assert "think>" not in replies.text(length=None)


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


@pytest.mark.parametrize(("budget", "said"), [(0, 0), (1, 0), (2, 1), (6, 5), (100, WORDS + 1)])
def test_what_the_prompt_says_after_its_mark_counts_for_a_budget(replies: Replies, budget: int, said: int) -> None:
    tokens = replies.tokens(f"{PROMPT}<think>\n", thinking_token_budget=budget)
    assert tokens.index(replies.tokenizer.added_ids["</think>"]) == said


def test_much_reasoning_is_there_soon(replies: Replies) -> None:
    began = time.monotonic()
    for kind in ReplyKind:
        plan = replies.plan(kind=kind, length=fixed_length(100_000), max_tokens=200_000)
        assert plan.ending.output_tokens == 100_000 + ANSWER + 6
    # As long as a table is made for each kind; a look-up for every token would take seconds.
    assert time.monotonic() - began < 1.5


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
    drawn = None if length is None else fixed_length(length)
    text = replies.text(ended=False, structured_outputs={"choice": ["yes"]}, length=drawn).removesuffix("<|im_end|>")
    if length is None:
        assert text == "<think>\n\n</think>\n\nyes"
    else:
        assert text.endswith("\n</think>\n\nyes")
        assert replies.parts(text)[0] == length
    assert replies.text(ended=True, structured_outputs={"choice": ["yes"]}, length=drawn).startswith("yes")


def test_reasoning_that_is_cut_has_nothing_of_the_constraint(replies: Replies) -> None:
    asked: dict[str, Any] = {"ended": False, "structured_outputs": {"choice": ["yes"]}}
    assert replies.tokens(**asked, max_tokens=9) == replies.tokens(**asked)[:9]
    assert replies.plan(**asked, max_tokens=9).ending.finish_reason is FinishReason.LENGTH
    # What is wrong with it is told all the same.
    with pytest.raises(ReplyError, match="choice"):
        replies.plan(ended=False, structured_outputs={"choice": []}, max_tokens=9)


def _tag(begin: str = "<think>", end: str = "</think>", after: str = "\n\n") -> dict[str, str]:
    """Return a constraint as the Rust frontend makes it of one, with its reasoning parser."""
    reasoning = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
    parts = [reasoning, {"type": "const_string", "value": after}]
    optional = {"type": "optional", "content": {"type": "sequence", "elements": parts}}
    answer = {"type": "or", "elements": [{"type": "const_string", "value": "yes"}]}
    form = {"type": "sequence", "elements": [optional, answer]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def test_reasoning_that_a_constraint_allows_is_as_the_settings_have_it(replies: Replies) -> None:
    asked: dict[str, Any] = {"ended": True, "structured_outputs": _tag()}
    for number in range(8):
        prompt = f"{number}{PROMPT}"
        assert replies.text(prompt, **asked, length=None) == "yes<|im_end|>"
        text = replies.text(prompt, **asked).removesuffix("<|im_end|>")
        assert text.endswith("\n</think>\n\nyes")
        assert replies.parts(text)[0] == WORDS
    assert replies.text(**asked, thinking_token_budget=0) == "<think></think>\n\nyes<|im_end|>"
    assert replies.text(f"{PROMPT}<think>\n\n</think>\n\n", **asked) == "yes<|im_end|>"


@pytest.mark.parametrize(
    "constraint",
    [
        _tag(begin="[THINK]"),
        _tag(end="</thinks>"),
        _tag(after="."),
        {"structural_tag": json.dumps({"format": {"type": "const_string", "value": "yes</think>"}})},
        {"structural_tag": json.dumps({"structures": [], "triggers": ["</think>"]})},
        {"structural_tag": "</think>"},
        {"structural_tag": '"</think>"'},
        {"structural_tag": "[" * 100_000 + "</think>"},
        {"structural_tag": json.dumps({"format": {"type": "sequence", "elements": ["</think>"]}})},
    ],
)
def test_other_constraints_are_left_as_they_are(replies: Replies, constraint: dict[str, str]) -> None:
    found: list[str] = []
    for length in (None, USUAL_LENGTH):
        try:
            found.append(replies.text(ended=True, structured_outputs=constraint, length=length))
        except ReplyError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_a_shared_source_says_what_comes_after_it(replies: Replies) -> None:
    one, other = (replies.plan(f"{number}{PROMPT}", kind=ReplyKind.RANDOM) for number in range(2))
    span = WORDS + 6
    assert one.source.beyond(span - 1) is one.source
    assert one.source.beyond(span) is not one.source
    alone = replies.plan(kind=ReplyKind.RANDOM, length=None).source
    assert alone.beyond(5) is alone
    said = one.source.tokens(one.key, span, 10)
    assert one.source.beyond(span).tokens(one.key, span, 10) == said
    assert other.source.tokens(one.key, span, 10) == said


def test_other_marks_are_those_of_the_form(replies: Replies, tokenizer: Tokenizer) -> None:
    form = load_reasoning_form("kimi")
    reasoning = Reasoning(tokenizer, form, None)
    assert not form.is_in(tokenizer)
    assert load_reasoning_form().is_in(tokenizer)
    config = {"reasoning": reasoning, "wishes": [_Wanting(Wish(reasoning="Well.", text="Yes."))]}
    assert replies.text(config=config) == "◁think▷Well.◁/think▷Yes.<|im_end|>"
    assert replies.text(f"{PROMPT}◁think▷", config=config) == "Well.◁/think▷Yes.<|im_end|>"


@pytest.mark.parametrize("kind", ReplyKind)
def test_a_tokenizer_without_words_gives_plain_text(tokenizer: Tokenizer, kind: ReplyKind) -> None:
    class Pieces(Tokenizer):
        word_ids = ()

    pieces = Pieces(tokenizer.path, tokenizer.masks, tokenizer.eos_ids, tokenizer.added_ids)
    reasoning = Reasoning(pieces, load_reasoning_form(), fixed_length(2_000))
    config = RepliesConfig(vocab_size=pieces.vocab_size, tokenizer=tokenizer, reasoning=reasoning, kind=kind)
    made = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=array("I", tokenizer.encode(PROMPT)),
        sampling_params=SamplingParams(max_tokens=3_000),
    )
    plan = Planner(config, 4_096).plan(made)
    text = tokenizer.decode(plan.source.tokens(plan.key, 0, 2_006))
    thought = text.removeprefix("<think>\n").partition("\n</think>\n\n")[0]
    assert thought.isascii()
    assert thought.isprintable()
    assert "<" not in thought
    assert not any(b"<" in tokenizer.token_bytes[token] for token in reasoning._readable)


def test_lengths_are_drawn(replies: Replies) -> None:
    drawn = uniform_length(1, 50)
    config = {"output_length": drawn}
    found = [replies.parts(replies.text(f"{PROMPT}{number}", length=drawn, config=config)) for number in range(30)]
    assert len({reasoning for reasoning, _ in found}) > 10
    # They are drawn each by itself.
    assert len({reasoning - answer for reasoning, answer in found}) > 10


@settings(deadline=None, max_examples=150)
@given(
    params=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(1, 40),
            "min_tokens": st.integers(0, 60),
            "eos_token_id": st.none() | st.integers(0, 9),
            "stop_token_ids": st.lists(st.integers(0, 9), max_size=2).map(tuple),
            "bad_words_token_ids": st.lists(st.lists(st.integers(0, 9), max_size=2).map(tuple), max_size=2).map(tuple),
            "allowed_token_ids": st.lists(st.integers(0, 9), max_size=9).map(tuple),
            "thinking_token_budget": st.sampled_from([-(2**63), -1, 0, 1, 2, 5, 2**31, 2**63]),
            "structured_outputs": st.sampled_from([{"choice": ["yes"]}, _tag(), {"regex": "[ab]{3}"}]),
            "trace_decode_token_ids": st.just((5, 300)),
            "repetition_detection": st.just({"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}),
        },
    ),
    kind=st.sampled_from(ReplyKind),
    ended=st.sampled_from([None, True, False]),
    prompt=st.sampled_from([PROMPT, f"{PROMPT}<think>\n", f"{PROMPT}<think>\n\n</think>\n\n", "</think><think>" * 9]),
    length=st.sampled_from([None, fixed_length(1), fixed_length(9), fixed_length(2**31 - 1)]),
)
# The mark that reasoning begins with, as the end of the reply.
@example(params={"eos_token_id": 4}, kind=ReplyKind.RANDOM, ended=None, prompt=PROMPT, length=fixed_length(9))
def test_whatever_is_asked_the_reply_is_one_that_ends_as_it_says(
    replies: Replies,
    params: dict[str, Any],
    kind: ReplyKind,
    ended: bool | None,  # noqa: FBT001 - a test's
    prompt: str,
    length: LengthDraw | None,
) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "eos_token_id": None, **params}
    plan = replies.plan(prompt, kind=kind, ended=ended, length=length, **asked)
    said = plan.source.tokens(plan.key, 0, plan.ending.output_tokens)
    if plan.ending.last_token is not None:
        said[-1] = plan.ending.last_token
    stops = {*asked.get("stop_token_ids", ()), asked["eos_token_id"]}
    assert 1 <= len(said) == plan.ending.output_tokens <= asked["max_tokens"]
    assert not stops & set(said[:-1])
    assert (said[-1] in stops) == (plan.ending.finish_reason is FinishReason.STOP)
