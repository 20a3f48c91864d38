# SPDX-License-Identifier: Apache-2.0
"""The tool parsers of real Rust frontends read the calls that are written for them."""

from collections.abc import Iterator

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import tool_checks
from tests.support.examples import run_example
from tests.support.stack import MODEL, Stack, serving

pytestmark = pytest.mark.rust_frontend

PARSERS = ["hermes", "llama3_json", "mistral", "qwen3_coder"]


@pytest.fixture(scope="module", params=PARSERS)
def parsing(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A frontend with each of the parsers, and an engine that writes its form."""
    flags = (f"--tool-call-parser={request.param}",)
    engine_flags = (f"--tokenizer={MODEL}", f"--tool-call-form={request.param}", "--tool-call-probability=1")
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=flags)
    with frontend, serving(frontend, *engine_flags) as stack:
        yield stack


@pytest.mark.parametrize("calls", [1, 2])
def test_arguments_arrive_as_they_were_asked_for(parsing: Stack, calls: int) -> None:
    for stream in (False, True):
        tool_checks.calls_arrive(parsing, tool_checks.CALLS[:calls], stream=stream)


def test_a_tool_is_called_where_it_is_left_to_the_model(parsing: Stack) -> None:
    tool_checks.tools_are_called_by_themselves(parsing)


def test_the_example_of_the_docs_runs(parsing: Stack) -> None:
    run_example(parsing, "Tool calls")
