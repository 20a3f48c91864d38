# SPDX-License-Identifier: Apache-2.0
"""Examples of the documentation, run as a reader would."""

from typing import Any

from tests.support.docs import example
from tests.support.stack import MODEL_NAME, Stack


def run_example(stack: Stack, heading: str) -> None:
    """Run the first Python example below a heading of `docs/replies.md` against a stack."""
    code = example(f"## {heading}", "python")
    assert "http://localhost:8000" in code
    assert 'model="mock"' in code
    here = code.replace("http://localhost:8000", stack.url).replace('model="mock"', f'model="{MODEL_NAME}"')
    names: dict[str, Any] = {}
    exec(here, names)  # noqa: S102  # it is our own
    names["client"].close()
