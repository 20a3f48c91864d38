# SPDX-License-Identifier: Apache-2.0
"""The tool parsers of real Rust frontends read the calls that are written for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import tool_checks
from tests.support.examples import run_example
from tests.support.stack import MODEL, MODEL_NAME, ROOT, Stack, serving

pytestmark = pytest.mark.rust_frontend

PARSERS = ["hermes", "llama3_json", "mistral", "qwen3_coder"]
# They have forms of their own; forms of Python frontends alone are tested with those.
OTHER_PARSERS = ["deepseek_v3", "deepseek_v31", "glm45", "internlm", "kimi_k2", "minimax_m2", "seed_oss"]


@contextmanager
def _parsing(parser: str) -> Iterator[Stack]:
    """Start a frontend with a parser, and an engine that writes its form."""
    engine_flags = (f"--tokenizer={MODEL}", f"--tool-call-form={parser}", "--tool-call-probability=1")
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=(f"--tool-call-parser={parser}",))
    with frontend, serving(frontend, *engine_flags) as stack:
        yield stack


@pytest.fixture(scope="module", params=PARSERS)
def parsing(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with _parsing(request.param) as stack:
        yield stack


@pytest.mark.parametrize("calls", [1, 2])
def test_arguments_arrive_as_they_were_asked_for(parsing: Stack, calls: int) -> None:
    for stream in (False, True):
        tool_checks.calls_arrive(parsing, tool_checks.CALLS[:calls], stream=stream)


def test_a_tool_is_called_where_it_is_left_to_the_model(parsing: Stack) -> None:
    tool_checks.tools_are_called_by_themselves(parsing)


@pytest.mark.parametrize("parser", OTHER_PARSERS)
def test_other_parsers_read_their_forms_too(parser: str) -> None:
    with _parsing(parser) as stack:
        for stream in (False, True):
            tool_checks.calls_arrive(stack, tool_checks.CALLS, stream=stream)


def test_the_example_of_the_docs_runs(parsing: Stack) -> None:
    run_example(parsing, "Tool calls")


def test_a_script_calls_a_tool_and_answers_with_its_result() -> None:
    flags = (f"--tokenizer={MODEL}", f"--reply-script={ROOT / 'deploy' / 'replies' / 'example.yaml'}")
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=("--tool-call-parser=hermes",))
    with frontend, serving(frontend, *flags) as stack:
        question: Any = {"role": "user", "content": "How is the weather in Rome?"}
        for stream in (False, True):
            (call,) = tool_checks.called(stack, messages=[question], stream=stream)
            assert call == {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}
        asked: Any = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
        }
        result: Any = {"role": "tool", "tool_call_id": "1", "content": "sun"}
        with stack.client() as client:
            answer = client.chat.completions.create(model=MODEL_NAME, messages=[question, asked, result])
        assert answer.choices[0].message.content == "It is sunny."
        assert answer.choices[0].finish_reason == "stop"
