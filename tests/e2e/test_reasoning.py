# SPDX-License-Identifier: Apache-2.0
"""The reasoning parser of a real Rust frontend splits what is said, calls and structured output included."""

from collections.abc import Callable, Iterator

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import reasoning_checks
from tests.support.stack import MODEL, Stack, serving

pytestmark = pytest.mark.rust_frontend


@pytest.fixture(scope="module")
def thinking() -> Iterator[Stack]:
    """An engine that reasons, behind a frontend that parses it."""
    flags = ("--reasoning-parser=qwen3", "--tool-call-parser=hermes")
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=flags)
    with frontend, serving(frontend, *reasoning_checks.ENGINE_FLAGS) as stack:
        yield stack


@pytest.mark.parametrize("check", reasoning_checks.CHECKS, ids=lambda check: check.__name__)
def test_reasoning(thinking: Stack, check: Callable[[Stack], None]) -> None:
    check(thinking)
