# SPDX-License-Identifier: Apache-2.0
"""How a run and its replay compare: TTFT, TPOT and throughput, and the error of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mockengine.fit.results import Floats, Run
from mockengine.fit.simulator import Replay

_MS_PER_S: Final = 1e3
STATISTICS: Final = ("mean", "p50", "p99")


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What is judged of a run. TTFT and TPOT are in seconds, by request; throughput in tokens per second, overall.

    TPOT is the time from the first token to the last, divided by the tokens after the first, as vLLM defines it;
    replies of one token have none.
    """

    ttft_s: Floats
    tpot_s: Floats
    throughput: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: measured and by the model, in `unit`."""

    what: str
    statistic: str
    unit: str
    measured: float
    model: float

    @property
    def error(self) -> float:
        """How far the model is off, as a fraction of what was measured; above 0 if the model has more."""
        return self.model / self.measured - 1 if self.measured else 0.0


def measured(run: Run) -> Figures:
    """Return the figures of a run as it was."""
    return _figures(run, run.sent_s, run.sent_s + run.ttft_s, run.sent_s + run.ttft_s + run.decode_s)


def modelled(run: Run, replayed: Replay) -> Figures:
    """Return the figures of its replay."""
    return _figures(run, replayed.sent_s, replayed.first_token_s, replayed.last_token_s)


def _figures(run: Run, sent: Floats, first: Floats, last: Floats) -> Figures:
    several = run.output_tokens > 1
    tpot = (last[several] - first[several]) / (run.output_tokens[several] - 1)
    return Figures(first - sent, tpot, float(run.output_tokens.sum() / max(last.max() - sent.min(), 1e-9)))


def compare(real: Figures, model: Figures) -> list[Comparison]:
    """Return mean, median and 99th percentile of TTFT and TPOT in milliseconds, and the throughput."""
    lines = []
    for what, of_real, of_model in (("TTFT", real.ttft_s, model.ttft_s), ("TPOT", real.tpot_s, model.tpot_s)):
        pairs = zip(STATISTICS, _statistics(of_real), _statistics(of_model), strict=True)
        lines += [Comparison(what, name, "ms", _MS_PER_S * one, _MS_PER_S * other) for name, one, other in pairs]
    return [*lines, Comparison("throughput", "mean", "tok/s", real.throughput, model.throughput)]


def _statistics(values: Floats) -> tuple[float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0
    return float(values.mean()), float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99))


def table(sections: Sequence[tuple[str, Sequence[Comparison]]]) -> str:
    """Return the comparisons of each named run, as a table for a person."""
    rows = [("RUN", "FIGURE", "MEASURED", "MODEL", "ERROR")]
    for name, lines in sections:
        rows += _rows(name, lines)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  "
        f"{row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]:>{widths[4]}}"
        for row in rows
    )


def _rows(name: str, lines: Sequence[Comparison]) -> Iterator[tuple[str, str, str, str, str]]:
    for number, line in enumerate(lines):
        figure = f"{line.what} {line.statistic}, {line.unit}" if line.unit == "ms" else f"{line.what}, {line.unit}"
        yield "" if number else name, figure, f"{line.measured:.2f}", f"{line.model:.2f}", f"{100 * line.error:+.1f} %"
