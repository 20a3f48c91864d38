# SPDX-License-Identifier: Apache-2.0
"""Clients of a real Rust frontend get the reply that they ask for."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import steering_checks
from tests.support.checks import QUESTION, completion
from tests.support.examples import run_example
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving
from tests.support.steering_checks import steered

pytestmark = pytest.mark.rust_frontend

TEXT = "Hello world, as it was asked for."


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """An engine with a tokenizer, behind a frontend that tells how much of a prompt was cached."""
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=("--enable-prompt-tokens-details",))
    with frontend, serving(frontend, f"--tokenizer={MODEL}") as stack:
        yield stack


@pytest.mark.parametrize(
    "check",
    [
        steering_checks.tokens_are_said_as_asked,
        steering_checks.moments_are_kept,
        steering_checks.who_hangs_is_aborted_when_its_client_goes_away,
    ],
    ids=lambda check: check.__name__,
)
def test_what_any_frontend_does(stack: Stack, check: Callable[[Stack], None]) -> None:
    check(stack)


@pytest.mark.parametrize("asked", [{"mock_text": TEXT}, {"mock": {"text": TEXT}}, {"mock": f'{{"text": "{TEXT}"}}'}])
def test_a_text_is_said(stack: Stack, asked: dict[str, Any]) -> None:
    choice = steered(stack, asked, max_tokens=50).choices[0]
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    body = {"vllm_xargs": asked}
    chat = stack.client().chat.completions.create(model=MODEL_NAME, messages=QUESTION, extra_body=body)
    assert chat.choices[0].message.content == TEXT


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "repetition"])
def test_a_reply_ends_for_the_reason_that_is_asked_for(stack: Stack, reason: str) -> None:
    choice = steered(stack, {"mock_text": TEXT, "mock_finish_reason": reason}, max_tokens=50).choices[0]
    assert (choice.text, choice.finish_reason) == (TEXT, reason)


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"mock_fault": "error"}, 500, "Internal server error"),
        ({"mock_finish_reason": "error"}, 500, "Internal server error"),
        ({"mock_error_code": "validation_error", "mock_error_message": "no such thing"}, 400, "no such thing"),
        ({"mock_error_message": "come again", "mock_error_retryable": True}, 503, "come again"),
        ({"mock_error": {"message": "come again", "retryable": True}}, 503, "come again"),
        ({"mock_txt": "hello", "mock_ttft_ms": "soon"}, 400, "mock_txt: unknown (allowed are mock, mock_text, "),
        ({"mock_txt": "hello", "mock_ttft_ms": "soon"}, 400, "mock_ttft_ms: str 'soon' where a number from 0 to "),
    ],
)
def test_a_request_fails_as_asked(stack: Stack, asked: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(openai.APIStatusError) as failed:
        steered(stack, asked)
    assert failed.value.status_code == status
    assert message in failed.value.message
    completion(stack)


def test_a_stream_fails_after_what_it_says(stack: Stack) -> None:
    said: list[str] = []
    asked = {"mock_text": TEXT, "mock_error_message": "no more", "mock_error_code": "validation_error"}
    with stack.client() as client, pytest.raises(openai.APIError, match="no more"):
        said.extend(
            chunk.choices[0].text
            for chunk in client.completions.create(
                model=MODEL_NAME, prompt="Hello", max_tokens=50, stream=True, extra_body={"vllm_xargs": asked}
            )
        )
    assert "".join(said) == TEXT


@pytest.mark.parametrize("wished", [0, 3, 1_000])
def test_usage_and_metrics_tell_what_was_cached(stack: Stack, wished: int) -> None:
    before = stack.metric("vllm:prompt_tokens_cached_total")
    usage = steered(stack, {"mock_cached_tokens": wished}, max_tokens=2).usage
    cached = min(wished, usage.prompt_tokens - 1)
    assert usage.prompt_tokens_details.cached_tokens == cached
    stack.wait_for_metric("vllm:prompt_tokens_cached_total", (before + cached).__eq__)


def test_the_example_of_the_docs_runs(stack: Stack) -> None:
    run_example(stack, "A client steers its request")
