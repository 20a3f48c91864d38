# SPDX-License-Identifier: Apache-2.0
"""Cost of a token against running requests, as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.report import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = {1: "tab:blue", 4: "tab:orange"}
_INCHES: Final = (9, 6)
_DOTS_PER_INCH: Final = 120


def draw(path: Path, steps: Table, sink: Table) -> None:
    """Write a PNG of what a token costs alone, over TCP, and in the plain loop; needs the extra `bench`."""
    # Only here, so that whoever wants no picture needs no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415 - as said

    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for chunk_size, colour in _COLOURS.items():
        tokens = "1 token" if chunk_size == 1 else f"{chunk_size} tokens"
        label = f"{tokens} per step"
        _line(
            axes, sink, chunk_size, "engine ns/token", (colour, "-", f"engine over TCP, steps without a pace, {label}")
        )
        _line(axes, steps, chunk_size, "engine ns/token", (colour, "--", f"engine's step alone, one by one, {label}"))
        _line(
            axes,
            sink,
            chunk_size,
            "plain loop ns/token",
            ("grey", "-" if chunk_size == 1 else ":", f"plain loop over TCP, {label}"),
        )
    axes.set(xscale="log", yscale="log")
    counts = sorted({int(row["running"]) for row in steps.named_rows()})
    axes.set_xticks(counts, [f"{count:,}".replace(",", " ") for count in counts])
    axes.minorticks_off()
    axes.set(
        title="What a token costs the engine, by how many requests run at once",
        xlabel="running requests",
        ylabel="CPU time per token, nanoseconds",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _line(axes: "Axes", table: Table, chunk_size: int, column: str, look: tuple[str, str, str]) -> None:
    """Draw one column over the running requests; the look is colour, style and label."""
    rows = [row for row in table.named_rows() if row["chunk"] == chunk_size]
    colour, style, label = look
    counts, costs = [float(row["running"]) for row in rows], [float(row[column]) for row in rows]
    axes.plot(counts, costs, color=colour, linestyle=style, marker=".", label=label)
