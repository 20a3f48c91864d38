# SPDX-License-Identifier: Apache-2.0
"""The page about replies, followed by who has nothing else: its stack, and its examples that need no other."""

import shlex
from collections.abc import Iterator

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.docs import REPLIES
from tests.support.examples import run_example
from tests.support.stack import MODEL, ROOT, Stack, serving

pytestmark = pytest.mark.rust_frontend


def _commands() -> list[list[str]]:
    """Return the words of the first two commands of the page: the frontend's and the engine's."""
    intro = REPLIES.read_text(encoding="utf-8").split("\n## ", 1)[0].replace("\\\n", "")
    return [shlex.split(line) for line in intro.splitlines() if line.startswith("    ")]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    served, played = _commands()
    parsers = served[served.index("--tool-call-parser") : served.index("--data-parallel-size")]
    assert played[0] == "mockengine"
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=parsers)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(ROOT)
        with frontend, serving(frontend, *played[1:]) as stack:
            yield stack


@pytest.mark.parametrize(
    "heading",
    ["A client steers its request", "Tool calls", "Reasoning", "How likely they were", "Structured output"],
)
def test_the_examples_of_the_page_run(stack: Stack, heading: str) -> None:
    run_example(stack, heading)
