# SPDX-License-Identifier: Apache-2.0
"""What replies are made of and where they stop, as clients of a real Rust frontend see it."""

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.checks import PROMPT
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving

pytestmark = pytest.mark.rust_frontend

LENGTH = 17


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """An engine whose replies end by themselves, at one length."""
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, f"--output-length={LENGTH}") as stack,
    ):
        yield stack


def _ask(stack: Stack, prompt: str = PROMPT, max_tokens: int = 40, **asked: Any) -> tuple[list[int], Any]:
    """Return the tokens of a completion, and all of it."""
    body = {"return_token_ids": True, **asked}
    reply = stack.client().completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, extra_body=body)
    choice: Any = reply.choices[0]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(choice.token_ids)
    return choice.token_ids, choice


def test_a_reply_ends_by_itself(stack: Stack) -> None:
    tokens, choice = _ask(stack)
    assert (len(tokens), choice.finish_reason, choice.stop_reason) == (LENGTH, "stop", None)
    _, other = _ask(stack, "Something else")
    assert tokens[-1] == other.token_ids[-1], "the EOS"
    assert tokens[:-1] != other.token_ids[:-1]


def test_the_client_allows_less_or_ignores_the_end(stack: Stack) -> None:
    tokens, choice = _ask(stack, max_tokens=9)
    assert (len(tokens), choice.finish_reason) == (9, "length")
    tokens, choice = _ask(stack, ignore_eos=True)
    assert (len(tokens), choice.finish_reason) == (40, "length")
    tokens, choice = _ask(stack, min_tokens=30)
    assert (len(tokens), choice.finish_reason) == (31, "stop")


def test_only_allowed_tokens_are_said(stack: Stack) -> None:
    tokens, _ = _ask(stack, allowed_token_ids=[300, 301, 302])
    assert set(tokens[:-1]) == {300, 301, 302}
    tokens, _ = _ask(stack, logit_bias={"300": 100})
    assert set(tokens[:-1]) == {300}


def test_a_stop_token_that_is_all_that_may_be_said_stops(stack: Stack) -> None:
    tokens, choice = _ask(stack, allowed_token_ids=[300], stop_token_ids=[300])
    assert (tokens, choice.finish_reason, choice.stop_reason) == ([300], "stop", 300)
    assert choice.text == ""


def test_a_stop_token_is_not_said_by_chance(stack: Stack) -> None:
    allowed, stops = list(range(300, 310)), list(range(301, 310))
    tokens, choice = _ask(stack, allowed_token_ids=allowed, stop_token_ids=stops, ignore_eos=True)
    assert set(tokens[:-1]) == {300}
    assert (len(tokens), tokens[-1], choice.finish_reason, choice.stop_reason) == (LENGTH, 301, "stop", 301)


def test_a_repetition_ends_a_reply(stack: Stack) -> None:
    asked = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 4}
    tokens, choice = _ask(stack, allowed_token_ids=[300], repetition_detection=asked)
    assert (tokens, choice.finish_reason) == ([300] * 4, "repetition")


def test_an_echo_says_the_prompt_again() -> None:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, "--reply-source=echo") as stack,
    ):
        tokens, choice = _ask(stack, "Hello there, how are you?", max_tokens=100)
        assert choice.text.strip() == "Hello there, how are you?"
        assert choice.finish_reason == "stop"
        again, choice = _ask(stack, "Hello there, how are you?", max_tokens=4)
        assert (again, choice.finish_reason) == (tokens[:4], "length")


SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
EMPTY: Any = SimpleNamespace(content=None)
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def writing() -> Iterator[Stack]:
    """An engine that knows the model's tokenizer, behind a frontend that parses tool calls."""
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=("--tool-call-parser=hermes",))
    with frontend, serving(frontend, f"--tokenizer={MODEL}", "--reply-source=words") as stack:
        yield stack


def test_words_can_be_read(writing: Stack) -> None:
    _, choice = _ask(writing)
    assert re.fullmatch(r"( [a-z]{2,})+", choice.text)


def test_a_schema_is_kept_to(writing: Stack) -> None:
    seen = set()
    for number in range(5):
        question: Any = [{"role": "user", "content": f"Who is number {number}?"}]
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        reply = writing.client().chat.completions.create(model=MODEL_NAME, messages=question, response_format=wanted)
        assert reply.choices[0].finish_reason == "stop"
        content = reply.choices[0].message.content or ""
        jsonschema.validate(json.loads(content), SCHEMA)
        seen.add(content)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "a" [0-9] "z"'}, "a[0-9]z"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_other_constraints_are_kept_to(writing: Stack, constraint: dict[str, Any], pattern: str) -> None:
    _, choice = _ask(writing, structured_outputs=constraint)
    assert re.fullmatch(pattern, choice.text, re.DOTALL)
    assert choice.finish_reason == "stop"


def test_a_wrong_constraint_is_the_clients_fault(writing: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="foo"):
        _ask(writing, structured_outputs={"grammar": "root ::= foo"})
    assert _ask(writing)[0]


def test_a_tool_that_is_required_is_called(writing: Stack) -> None:
    reply = writing.client().chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, tools=[WEATHER], tool_choice="required"
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    calls = reply.choices[0].message.tool_calls or []
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments), dict)


def test_without_a_tokenizer_the_client_is_told(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="this engine has no tokenizer"):
        _ask(stack, structured_outputs={"choice": ["yes", "no"]})


def _check_scores(tokens: int, scores: Any, most_likely: int) -> None:
    """Look at the logprobs of a completion: one for each token, and the most likely ones beside, in order."""
    assert [len(part) for part in (scores.tokens, scores.token_logprobs, scores.text_offset)] == [tokens] * 3
    assert all(logprob <= 0 for logprob in scores.token_logprobs)
    for own, others in zip(scores.token_logprobs, scores.top_logprobs, strict=True):
        assert most_likely <= len(others) <= most_likely + 1
        # JSON has float32 rounded, each in its own way.
        assert sum(math.exp(logprob) for logprob in others.values()) <= 1.000_1
        assert min(abs(own - logprob) for logprob in others.values()) < 1e-5


@pytest.mark.parametrize("flags", [(), ("--output-token-chunk-size=4",), ("--spec-tokens=3",), ("--load-model=vllm",)])
def test_logprobs_are_said_of_every_token(flags: tuple[str, ...]) -> None:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, f"--output-length={LENGTH}", *flags) as stack,
    ):
        tokens, choice = _ask(stack, logprobs=3)
        _check_scores(len(tokens), choice.logprobs, 3)
        assert _ask(stack)[0] == tokens, "asking changes nothing"
        assert _ask(stack, logprobs=3)[1].logprobs == choice.logprobs
        chat = stack.client().chat.completions.create(
            model=MODEL_NAME, messages=QUESTION, max_tokens=9, logprobs=True, top_logprobs=2, stream=True
        )
        said = [entry for chunk in chat for entry in (chunk.choices[0].logprobs or EMPTY).content or ()]
        assert len(said) == 9
        assert all(len(entry.top_logprobs) >= 2 for entry in said)


def _streamed(stack: Stack, prompt: str, max_tokens: int, logprobs: int | None) -> list[Any]:
    """Return the scores of a streamed completion, token by token: its text, its logprob, and those beside it."""
    asked: Any = {"max_tokens": max_tokens, "logprobs": logprobs, "extra_body": {"ignore_eos": True}}
    reply = stack.client().completions.create(model=MODEL_NAME, prompt=prompt, stream=True, **asked)
    parts = [chunk.choices[0].logprobs for chunk in reply if chunk.choices]
    scores: list[Any] = []
    for part in parts:
        if part is not None:
            scores += zip(part.tokens or (), part.token_logprobs or (), part.top_logprobs or (), strict=True)
    return scores


def test_streams_side_by_side_have_the_logprobs_that_each_has_alone(stack: Stack) -> None:
    asked = [(f"Number {place}", 60 + place, number) for place, number in enumerate((5, 5, 2, 5, 5, 0, 5, 20, 5, 5))]
    with ThreadPoolExecutor(len(asked) + 1) as pool:
        plain = pool.submit(_streamed, stack, "None at all", 200, None)
        together = list(pool.map(lambda each: _streamed(stack, *each), asked))
    assert plain.result() == []
    for each, scores in zip(asked, together, strict=True):
        assert len(scores) == each[1]
        assert scores == _streamed(stack, *each)


def test_prompts_are_scored(stack: Stack) -> None:
    _, choice = _ask(stack, echo=True, logprobs=2, max_tokens=3)
    scores: Any = choice.logprobs
    assert scores.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scores.token_logprobs[1:])
    assert len(scores.tokens) > 3
