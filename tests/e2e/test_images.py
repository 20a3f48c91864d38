# SPDX-License-Identifier: Apache-2.0
"""Images through the real Rust frontend, which prepares them and sends them beside the request."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import image_checks
from tests.support.examples import run_example
from tests.support.stack import MODEL_NAME, Stack, serving
from tests.support.vision_model import make_vision_model, question_about

pytestmark = pytest.mark.rust_frontend


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = make_vision_model(tmp_path_factory.mktemp("models") / "vision")
    # This frontend always sends the data, so that nothing is ever missed.
    flags = ("--load-model=vllm", "--mm-cache-items=1", "--mm-cache-miss-rate=1")
    with RustFrontend(rust_frontend(DEFAULT_VERSION), folder) as frontend, serving(frontend, *flags) as stack:
        yield stack


@pytest.mark.parametrize(
    "check",
    [
        image_checks.an_image_is_answered_and_counted,
        image_checks.the_same_image_is_answered_alike_and_another_one_is_not,
        image_checks.blocks_of_an_image_are_hit_by_the_same_image_alone,
    ],
    ids=lambda check: check.__name__,
)
def test_images(stack: Stack, check: Callable[[Stack], None]) -> None:
    check(stack)


def test_a_streamed_answer_to_an_image(stack: Stack) -> None:
    messages: Any = question_about(image_checks.RED)
    stream = stack.client().chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=5, stream=True)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_something_that_is_no_image_is_the_clients_fault(stack: Stack) -> None:
    messages: Any = question_about(image_checks.RED)
    messages[0]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
    with pytest.raises(openai.APIStatusError):
        stack.client().chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=5)
    assert image_checks.tokens(stack, image_checks.RED)


def test_the_example_of_the_docs_runs(stack: Stack) -> None:
    run_example(stack, "Images, sounds and embeddings")
