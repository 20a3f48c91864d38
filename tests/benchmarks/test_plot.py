# SPDX-License-Identifier: Apache-2.0
"""The picture of what a token costs."""

from pathlib import Path

from benchmarks import plot
from benchmarks.report import Table


def _costs(title: str) -> Table:
    table = Table(title, ("chunk", "running", "engine ns/token", "plain loop ns/token"))
    for chunk_size in (1, 4):
        for running in (1, 16_384):
            table.add(chunk_size, running, 1_000.0 / running, 900.0)
    return table


def test_it_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "made" / "cost.png"

    plot.draw(path, _costs("steps"), _costs("sink"))

    assert path.read_bytes().startswith(b"\x89PNG")
