# SPDX-License-Identifier: Apache-2.0
"""Measures what the engine costs; prints tables and bars, and writes them where it is told to."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# As the engine itself does: threads for linear algebra that nobody does would be measured too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks import (
    arrivals,
    expected,
    frontend,
    lateness,
    logprobs,
    memory,
    plot,
    rest,
    scheduling,
    short,
    sink,
    steps,
)
from benchmarks.report import Cell, Table, as_json, bar_table, machine

_RUNNING: Final = (1, 16, 64, 256, 1_024, 4_096, 16_384)
_ITL_MS: Final = 5.0

PARTS: Final[Mapping[str, Callable[[], Table]]] = {
    "steps": lambda: steps.measure(_RUNNING, (1, 4), least_s=1.5),
    "sink": lambda: sink.measure(_RUNNING, (1, 4), window_s=0.3),
    "scheduling": lambda: scheduling.measure((1, 64, 256, 1_024)),
    "logprobs": lambda: logprobs.measure((1, 16, 256, 1_024), (0, 5, 20), (32_000, 151_936), least_s=0.9),
    "arrivals": lambda: arrivals.measure(5_000),
    "prompts": lambda: arrivals.measure_prompts((1_000, 44_000, 128_000)),
    "rest": lambda: rest.measure(starts=5, idle_s=5),
    "memory": lambda: memory.measure((256, 4_096, 16_384)),
    "growth": lambda: memory.measure_growth(stages=10, requests=100_000),
    "lateness": lambda: lateness.measure((1, 64, 256, 1_024), _ITL_MS, lasts_s=10),
    "frontend": lambda: frontend.measure((1, 64, 256), (1, 4), (0.0, 10.0)),
}


def main() -> int:
    """Measure what is asked for."""
    parser = _parser()
    args = parser.parse_args()
    if args.plot is not None and (args.short or not {"steps", "sink"} <= set(_parts(args))):
        parser.error("--plot needs the parts steps and sink")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs the extra: pip install --editable '.[bench]'")
    facts = machine()
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    return _short(args, facts) if args.short or args.write_expected else _whole(args, facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        type=_part,
        metavar="PART",
        help=f"what to measure (default: everything): {', '.join(PARTS)}; docs/performance.md says what each is",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the cost of a token there, as a PNG")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="measure lateness and growth for so long; 10 shows a drift"
    )
    parser.add_argument("--short", action="store_true", help="measure few ratios; fail where one is worse than it was")
    parser.add_argument("--write-expected", action="store_true", help="write down the ratios of the short form")
    return parser


def _part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PARTS)}")
    return name


def _parts(args: argparse.Namespace) -> list[str]:
    return args.parts or ([] if args.soak else list(PARTS))


def _whole(args: argparse.Namespace, facts: Mapping[str, Cell]) -> int:
    tables: dict[str, Table] = {}
    measures = {name: PARTS[name] for name in _parts(args)}
    if args.soak:
        measures["soak"] = lambda: lateness.soak(args.soak, _ITL_MS)
    for name, measure in measures.items():
        tables[name] = measure()
        print(tables[name], flush=True)
    print(bar_table(list(tables.values())))
    _keep(args.json, as_json(facts, list(tables.values())))
    if args.plot is not None:
        plot.draw(args.plot, tables["steps"], tables["sink"])
    return 0


def _short(args: argparse.Namespace, facts: Mapping[str, Cell]) -> int:
    if args.write_expected:
        expected.write(expected.FILE, short.RATIOS)
        return 0
    table = expected.compare(short.RATIOS, expected.read(expected.FILE))
    print(table)
    _keep(args.json, as_json(facts, [table]))
    for hint in expected.hints(table):
        print(hint)
    complaints = expected.complaints(table)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def _keep(path: Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
