# SPDX-License-Identifier: Apache-2.0
"""`make bench`: measures, prints tables, and writes them as JSON where `--json` says."""

import argparse
import os
import sys
from pathlib import Path

# As the engine itself does: threads for linear algebra that nobody does would be measured too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks import arrivals, frontend, lateness, memory, sink, steps
from benchmarks.report import as_json, machine

PARTS = {
    "steps": lambda: steps.measure((1, 16, 64, 256, 1_024, 4_096, 16_384), (1, 4), least_s=1.5),
    "sink": lambda: sink.measure((1, 64, 256, 1_024), (1, 4), tokens=6_000_000),
    "arrivals": lambda: arrivals.measure(5_000),
    "prompts": lambda: arrivals.measure_prompts((1_000, 44_000, 128_000)),
    "memory": lambda: memory.measure((0, 256, 4_096, 16_384)),
    "frontend": lambda: frontend.measure((1, 64, 256), (1, 4), (0.0, 10.0)),
    "lateness": lambda: lateness.measure((1, 64, 256, 1_024), itl_ms=5, lasts_s=10),
}


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure (default: everything)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    tables = []
    for name in args.parts or PARTS:
        tables.append(PARTS[name]())
        print(tables[-1], flush=True)
    if args.json is not None:
        args.json.write_text(as_json(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
