# SPDX-License-Identifier: Apache-2.0
"""A real Rust frontend under vLLM's own load generator, with the engine behind it: who uses how much CPU."""

import re
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.report import Table
from benchmarks.rig import cpu_seconds
from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import SERVED_MODEL_NAME, RustFrontend

_MODEL: Final = Path(__file__).parent.parent / "deploy" / "model"
_INPUT_TOKENS: Final = 32
_OUTPUT_TOKENS: Final = 512
_THROUGHPUT: Final = re.compile(r"Output token throughput \(tok/s\):\s+([0-9.]+)")
# The bar: clients that are full load, and the engine's CPU in that of the frontend.
_BAR_CONCURRENCY: Final = 256
_BAR_SHARE: Final = 0.15


@dataclass(frozen=True, slots=True)
class _Case:
    """How the load is, and what the engine is told."""

    itl_ms: float
    chunk_size: int
    concurrency: int

    @property
    def prompts(self) -> int:
        """How many requests are made; paced replies take seconds each, whatever the machine."""
        return max(8, 2 * self.concurrency) if self.itl_ms else max(200, 20 * self.concurrency)


def measure(concurrency: tuple[int, ...], chunk_sizes: tuple[int, ...], itl_ms: tuple[float, ...]) -> Table:
    """Measure prompts of 32 tokens with replies of 512, by concurrency, chunk size and pace."""
    columns = (
        *("itl ms", "chunk", "concurrency", "tokens/s"),
        *("engine CPU s", "frontend CPU s", "client CPU s", "engine / frontend"),
    )
    table = Table(f"Rust frontend {DEFAULT_VERSION}, {_INPUT_TOKENS} tokens in and {_OUTPUT_TOKENS} out", columns)
    cases = [_Case(pace, size, clients) for pace in itl_ms for size in chunk_sizes for clients in concurrency]
    for case in cases:
        rate, engine_s, frontend_s, client_s = _one(case)
        share = engine_s / frontend_s
        row = (case.itl_ms, case.chunk_size, case.concurrency)
        table.add(*row, rate, engine_s, frontend_s, client_s, share)
        if case.concurrency == _BAR_CONCURRENCY:
            what = f"itl_ms {case.itl_ms:g}, chunk {case.chunk_size}, concurrency {case.concurrency}"
            table.hold(f"engine CPU in the frontend's, {what}", share, _BAR_SHARE)
    return table


def _one(case: _Case) -> tuple[float, float, float, float]:
    """Return tokens per second, and CPU seconds of engine, frontend and client while the load lasts."""
    executable = rust_frontend(DEFAULT_VERSION)
    with (
        RustFrontend(executable, _MODEL) as frontend,
        EngineProcess(
            f"--handshake-address={frontend.handshake_address}",
            f"--vllm-version={DEFAULT_VERSION}",
            f"--output-token-chunk-size={case.chunk_size}",
            f"--itl-ms={case.itl_ms}",
            "--no-log-requests",
        ) as engine,
    ):
        frontend.wait_healthy(besides=engine)
        processes = (engine.process.pid, frontend.process.pid)
        before = [cpu_seconds(pid) for pid in processes]
        client_before = _children_s()
        said = _load(executable, frontend.url, case)
        client_s = _children_s() - client_before
        engine_s, frontend_s = (cpu_seconds(pid) - used for pid, used in zip(processes, before, strict=True))
    return float(_THROUGHPUT.findall(said)[0]), engine_s, frontend_s, client_s


def _load(executable: Path, url: str, case: _Case) -> str:
    """Run the load generator to its end; return what it wrote."""
    return subprocess.run(
        [
            *(str(executable), "bench", "serve", "--backend=openai", f"--base-url={url}"),
            *("--endpoint=/v1/completions", f"--model={SERVED_MODEL_NAME}", f"--tokenizer={_MODEL}"),
            *(f"--random-input-len={_INPUT_TOKENS}", f"--random-output-len={_OUTPUT_TOKENS}", "--ignore-eos"),
            *(f"--num-prompts={case.prompts}", f"--max-concurrency={case.concurrency}", "--disable-tqdm"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
