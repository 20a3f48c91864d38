# SPDX-License-Identifier: Apache-2.0
"""Examples of the documentation, run as a reader would."""

from typing import Any

from tests.support.stack import MODEL_NAME, ROOT, Stack


def run_example(stack: Stack, heading: str) -> None:
    """Run the first Python example below a heading of `docs/replies.md` against a stack."""
    docs = (ROOT / "docs" / "replies.md").read_text(encoding="utf-8")
    section = docs.split(f"\n## {heading}\n", 1)[1]
    example = section.split("```python\n", 1)[1].split("```", 1)[0]
    assert "http://localhost:8000" in example
    here = example.replace("http://localhost:8000", stack.url).replace('"mock"', f'"{MODEL_NAME}"', 1)
    names: dict[str, Any] = {}
    exec(here, names)  # noqa: S102  # it is our own
    names["client"].close()
