# SPDX-License-Identifier: Apache-2.0
"""Usage, scores and stop strings as clients of a real Rust frontend see them."""

from collections.abc import Callable, Iterator

import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support import count_checks
from tests.support.stack import MODEL, Stack, serving

pytestmark = pytest.mark.rust_frontend


@pytest.fixture(scope="module", params=[1, 4], ids=["chunks of 1", "chunks of 4"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=("--enable-prompt-tokens-details",))
    flags = (f"--output-token-chunk-size={request.param}", "--load-model=vllm", "--block-size=16")
    with frontend, serving(frontend, *flags) as stack:
        yield stack


@pytest.mark.parametrize(
    "check",
    [
        count_checks.stop_strings_cut_what_is_said,
        count_checks.scores_are_as_many_as_tokens,
        count_checks.usage_is_exact,
        count_checks.usage_tells_what_was_cached,
        count_checks.blocks_that_were_computed_are_cached,
    ],
    ids=lambda check: check.__name__,
)
def test_what_is_counted(stack: Stack, check: Callable[[Stack], None]) -> None:
    check(stack)
