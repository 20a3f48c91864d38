# SPDX-License-Identifier: Apache-2.0
"""A real Rust frontend under vLLM's own load generator, with the engine behind it: who uses how much CPU."""

import re
import resource
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.report import Table
from benchmarks.sink import cpu_seconds
from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import SERVED_MODEL_NAME, RustFrontend

_MODEL: Final = Path(__file__).parent.parent / "deploy" / "model"
_INPUT_TOKENS: Final = 32
_OUTPUT_TOKENS: Final = 512
_THROUGHPUT: Final = re.compile(r"Output token throughput \(tok/s\):\s+([0-9.]+)")


def measure(concurrency: tuple[int, ...], chunk_sizes: tuple[int, ...], itl_ms: tuple[float, ...]) -> Table:
    """Measure prompts of 32 tokens with replies of 512, by concurrency, chunk size and pace."""
    columns = (
        *("itl ms", "chunk", "concurrency", "tokens/s"),
        *("engine CPU s", "frontend CPU s", "client CPU s", "engine / frontend"),
    )
    table = Table(f"Rust frontend {DEFAULT_VERSION}, {_INPUT_TOKENS} tokens in and {_OUTPUT_TOKENS} out", columns)
    for pace in itl_ms:
        for chunk_size in chunk_sizes:
            for clients in concurrency:
                table.add(pace, chunk_size, clients, *_one(pace, chunk_size, clients))
    return table


def _one(itl_ms: float, chunk_size: int, concurrency: int) -> tuple[float, float, float, float, float]:
    executable = rust_frontend(DEFAULT_VERSION)
    # Paced replies take seconds each, whatever the machine.
    prompts = 2 * concurrency if itl_ms else max(64, 6 * concurrency)
    with (
        RustFrontend(executable, _MODEL) as frontend,
        EngineProcess(
            f"--handshake-address={frontend.handshake_address}",
            f"--vllm-version={DEFAULT_VERSION}",
            f"--output-token-chunk-size={chunk_size}",
            f"--itl-ms={itl_ms}",
            "--no-log-requests",
        ) as engine,
    ):
        frontend.wait_healthy(besides=engine)
        processes = (engine.process.pid, frontend.process.pid)
        before = [cpu_seconds(pid) for pid in processes]
        client_before = _children_s()
        done = subprocess.run(
            [
                *(str(executable), "bench", "serve", "--backend=openai", f"--base-url={frontend.url}"),
                *("--endpoint=/v1/completions", f"--model={SERVED_MODEL_NAME}", f"--tokenizer={_MODEL}"),
                *(f"--random-input-len={_INPUT_TOKENS}", f"--random-output-len={_OUTPUT_TOKENS}", "--ignore-eos"),
                *(f"--num-prompts={prompts}", f"--max-concurrency={concurrency}", "--disable-tqdm"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        client_s = _children_s() - client_before
        engine_s, frontend_s = (cpu_seconds(pid) - used for pid, used in zip(processes, before, strict=True))
    rate = float(_THROUGHPUT.findall(done.stdout)[0])
    return rate, engine_s, frontend_s, client_s, engine_s / frontend_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
