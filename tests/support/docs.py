# SPDX-License-Identifier: Apache-2.0
"""The page about replies, so that what it says can be held against the code."""

from tests.support.stack import ROOT

REPLIES = ROOT / "docs" / "replies.md"


def section(heading: str) -> str:
    """Return what comes after a heading, up to the next one of its level or above."""
    after = REPLIES.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    level = heading.split(" ", 1)[0]
    for above in range(2, len(level) + 1):
        after = after.split(f"\n{'#' * above} ", 1)[0]
    return after


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading."""
    rows = []
    for line in section(heading).splitlines():
        if line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")])
        elif rows:
            break
    return rows[2:]


def example(heading: str, language: str, number: int = 0) -> str:
    """Return one of the examples in that language after a heading."""
    return section(heading).split(f"```{language}\n")[number + 1].split("```", 1)[0]
