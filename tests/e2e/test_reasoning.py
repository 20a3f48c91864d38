# SPDX-License-Identifier: Apache-2.0
"""The reasoning parser of a real Rust frontend splits what is said."""

from collections.abc import Iterator
from typing import Any

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving

pytestmark = pytest.mark.rust_frontend

WORDS = 12
ANSWER = 20
QUESTION: Any = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(scope="module")
def thinking() -> Iterator[Stack]:
    """An engine that reasons, behind a frontend that parses it."""
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=("--reasoning-parser=qwen3",))
    flags = (f"--tokenizer={MODEL}", "--reply-source=words")
    lengths = (f"--reasoning-length={WORDS}", f"--output-length={ANSWER}")
    with frontend, serving(frontend, *flags, *lengths) as stack:
        yield stack


def _asked(stack: Stack, **extra: Any) -> Any:
    with stack.client() as client:
        return client.chat.completions.create(
            model=MODEL_NAME, messages=QUESTION, extra_body={"return_token_ids": True, **extra}
        )


def test_reasoning_and_answer_are_split(thinking: Stack) -> None:
    reply = _asked(thinking)
    message, usage = reply.choices[0].message, reply.usage
    assert len(message.reasoning.split()) == WORDS
    assert len(message.content.split()) == ANSWER - 1
    assert "think>" not in message.reasoning + message.content
    assert usage.completion_tokens == len(reply.choices[0].token_ids)
    # <think>, a newline on both sides of the words, </think>, and two newlines, a token each.
    assert usage.completion_tokens == WORDS + ANSWER + 6


@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_is_kept_to(thinking: Stack, budget: int) -> None:
    message = _asked(thinking, thinking_token_budget=budget).choices[0].message
    assert len((message.reasoning or "").split()) == max(0, budget - 1)
    assert len(message.content.split()) == ANSWER - 1


def test_a_stream_tells_them_apart(thinking: Stack) -> None:
    said = {"reasoning": "", "content": ""}
    with thinking.client() as client:
        for chunk in client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, stream=True):
            for part in said:
                said[part] += getattr(chunk.choices[0].delta, part, None) or ""
    whole = _asked(thinking).choices[0].message
    assert said == {"reasoning": whole.reasoning, "content": whole.content}


def test_what_a_client_wants_is_reasoned(thinking: Stack) -> None:
    message = _asked(thinking, vllm_xargs={"mock_reasoning": "Well, well.", "mock_text": "Yes."}).choices[0].message
    assert (message.reasoning, message.content) == ("Well, well.", "Yes.")
