# SPDX-License-Identifier: Apache-2.0
"""The tool parsers of real Rust frontends read the calls that are written for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import tool_checks
from tests.support.examples import run_example
from tests.support.stack import MODEL, Stack, serving

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
