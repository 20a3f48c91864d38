# SPDX-License-Identifier: Apache-2.0
"""Real frontends for end-to-end tests."""

from collections.abc import Iterator

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.stack import MODEL, Stack, serving

OLDER_VERSIONS = ("0.30.0", "0.27.1", "0.24.0")


@pytest.fixture(scope="module", params=[DEFAULT_VERSION, *OLDER_VERSIONS])
def any_rust_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A Rust frontend of each supported release, one after the other, with the engine telling its line by itself."""
    # At a pace: without one a long stream has been said to its end before its client can go away.
    with RustFrontend(rust_frontend(request.param), MODEL) as frontend, serving(frontend, "--itl-ms=0.2") as stack:
        yield stack


@pytest.fixture(scope="module")
def rust_stack() -> Iterator[Stack]:
    """The newest Rust frontend."""
    with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend, serving(frontend) as stack:
        yield stack
