# SPDX-License-Identifier: Apache-2.0
"""Where the load model bends: latency and throughput of a Rust frontend against the requests that are offered.

vLLM's load generator sends requests at random moments, at one rate after the other; what the frontend's `/metrics` has
gained by each is set beside what the generator measured. It takes five minutes and needs the extra `bench`.
"""

import argparse
import http.client
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import Table
from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import SERVED_MODEL_NAME, RustFrontend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODEL: Final = Path(__file__).parent.parent / "deploy" / "model"
_PROMPT_TOKENS: Final = 256
_REPLY_TOKENS: Final = 64
_SLOTS: Final = 32
_BASE_MS: Final = 8.0
_PREFILL_MS: Final = 0.05
_DECODE_MS: Final = 0.1
_RATES: Final = (2, 5, 10, 15, 20, 24, 26, 28, 30, 34, 40)
_LASTS_S: Final = 20

_SERIES: Final = {
    "ttft s": "time_to_first_token_seconds",
    "queue s": "request_queue_time_seconds",
    "prefill s": "request_prefill_time_seconds",
    "tpot s": "request_time_per_output_token_seconds",
}
_COLUMNS: Final = ("offered /s", "served /s", *_SERIES, "client's ttft s", "client's tpot s")


@dataclass(frozen=True, slots=True)
class _Sums:
    """A frontend's histograms at one moment: sums and counts by column."""

    totals: dict[str, float]
    counts: dict[str, float]

    def means_since(self, before: "_Sums") -> list[float]:
        """Return the means of what was observed since."""
        return [
            (self.totals[column] - before.totals[column]) / (self.counts[column] - before.counts[column])
            for column in _SERIES
        ]


def capacity_per_s() -> float:
    """Return how many requests the engine can serve in a second: with all slots taken, by the formula of a step.

    In the time that a slot is taken by one reply, every slot is, and one prompt for each is computed.
    """
    reply_ms = _REPLY_TOKENS * (_BASE_MS + _SLOTS * _DECODE_MS) + _SLOTS * _PROMPT_TOKENS * _PREFILL_MS
    return _SLOTS / reply_ms * 1_000


def measure(rates: Sequence[float], lasts_s: float) -> Table:
    """Offer requests at one rate after the other, for so long each."""
    title = (
        f"Prompts of {_PROMPT_TOKENS} tokens, replies of {_REPLY_TOKENS}; capacity {capacity_per_s():.1f} requests/s"
    )
    table = Table(title, _COLUMNS)
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), _MODEL) as frontend,
        EngineProcess(
            *(f"--handshake-address={frontend.handshake_address}", f"--vllm-version={DEFAULT_VERSION}"),
            *("--load-model=vllm", f"--max-num-seqs={_SLOTS}", "--no-enable-prefix-caching", "--no-log-requests"),
            *("--timing=step", f"--step-base-ms={_BASE_MS}", f"--step-ms-per-prefill-token={_PREFILL_MS}"),
            f"--step-ms-per-decode={_DECODE_MS}",
        ) as engine,
    ):
        frontend.wait_healthy(besides=engine)
        for number, rate in enumerate(rates):
            before = _sums(frontend)
            said = _load(frontend, rate, lasts_s, seed=number)
            means = _sums(frontend).means_since(before)
            client_s = (said["mean_ttft_ms"] / 1_000, said["mean_tpot_ms"] / 1_000)
            table.add(float(rate), said["request_throughput"], *means, *client_s)
    return table


def _load(frontend: RustFrontend, rate: float, lasts_s: float, seed: int) -> dict[str, Any]:
    """Run the load generator to its end; return the result that it saves."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [
                *(str(rust_frontend(DEFAULT_VERSION)), "bench", "serve", "--backend=openai", "--disable-tqdm"),
                *(f"--base-url={frontend.url}", "--endpoint=/v1/completions"),
                *(f"--model={SERVED_MODEL_NAME}", f"--tokenizer={_MODEL}", "--ignore-eos", f"--seed={seed}"),
                *(f"--random-input-len={_PROMPT_TOKENS}", f"--random-output-len={_REPLY_TOKENS}"),
                *(f"--request-rate={rate}", f"--num-prompts={round(rate * lasts_s)}"),
                *("--save-result", f"--result-dir={directory}", "--result-filename=result.json"),
            ],
            capture_output=True,
            check=True,
        )
        result: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
        return result


def _sums(frontend: RustFrontend) -> _Sums:
    connection = http.client.HTTPConnection("127.0.0.1", frontend.http_port)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return _Sums(
        {column: _value(text, f"{series}_sum") for column, series in _SERIES.items()},
        {column: _value(text, f"{series}_count") for column, series in _SERIES.items()},
    )


def _value(text: str, series: str) -> float:
    found = re.search(rf"^vllm:{series}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def draw(path: Path, table: Table) -> None:
    """Write a PNG of throughput and of times against the offered load."""
    # Only here, so that whoever wants no picture needs no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415 - as said

    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    throughput, times = figure.subplots(1, 2)
    rows = table.named_rows()
    columns = {name: [float(row[name]) for row in rows] for name in table.columns}
    offered = columns["offered /s"]
    throughput.plot(offered, offered, color="lightgrey", label="all that is offered")
    throughput.plot(offered, columns["served /s"], color="tab:blue", marker="o", label="served")
    throughput.axhline(capacity_per_s(), color="tab:red", linestyle=":", label="capacity by the formula")
    throughput.set(title="Throughput", ylabel="requests per second", ylim=(0, max(offered)))
    looks = {
        "ttft s": ("tab:blue", "TTFT"),
        "queue s": ("tab:orange", "of it in the queue"),
        "tpot s": ("tab:green", "TPOT"),
    }
    for column, (colour, label) in looks.items():
        times.plot(offered, columns[column], color=colour, label=f"{label}, /metrics")
    times.plot(offered, columns["client's ttft s"], "o", color="tab:blue", fillstyle="none", label="TTFT, client")
    times.plot(offered, columns["client's tpot s"], "o", color="tab:green", fillstyle="none", label="TPOT, client")
    times.axvline(capacity_per_s(), color="tab:red", linestyle=":")
    times.set(title="Mean times", ylabel="seconds", yscale="log", ylim=(0.001, None))
    for axes in (throughput, times):
        _finish(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _finish(axes: "Axes") -> None:
    axes.set(xlabel="offered requests per second", xlim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.knee", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="draw there, as a PNG")
    parser.add_argument("--lasts-s", type=float, default=_LASTS_S, metavar="SECONDS", help="how long each rate lasts")
    args = parser.parse_args()
    table = measure(_RATES, args.lasts_s)
    print(table)
    draw(args.output, table)


if __name__ == "__main__":
    main()
