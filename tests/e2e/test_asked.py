# SPDX-License-Identifier: Apache-2.0
"""What clients of a real Rust frontend may ask of a reply."""

from collections.abc import Iterator

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import asked
from tests.support.stack import MODEL, Stack, serving

pytestmark = pytest.mark.rust_frontend


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL)
    with frontend, serving(frontend, *asked.FLAGS) as stack:
        yield stack


@pytest.mark.parametrize("each", asked.ASKED, ids=lambda each: each.name)
def test_what_is_asked_is_answered(stack: Stack, each: asked.Asked) -> None:
    asked.is_answered(stack, each)


def test_the_lower_priority_goes_first(stack: Stack) -> None:
    asked.the_lower_priority_goes_first(stack)
