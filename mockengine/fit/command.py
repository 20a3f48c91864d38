# SPDX-License-Identifier: Apache-2.0
"""The command `mockengine fit`: files in, a profile and a table of errors out."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

from mockengine.fit.estimate import context_spread, first_guess, jitter, most_decodes
from mockengine.fit.profile import Coefficients, Profile, ProfileError, save
from mockengine.fit.report import Comparison, compare, measured, modelled, table
from mockengine.fit.results import ResultsError, Run, read_runs
from mockengine.fit.search import refine
from mockengine.fit.simulator import Limits, Model, replay

_FAILED: Final = 1
_MS_PER_S: Final = 1e3
_DEFAULT_OUTPUT: Final = "timing-profile.yaml"
# What mockengine itself begins with, so that a profile is made for what plays it unless someone says otherwise.
_DEFAULT_MAX_NUM_SEQS: Final = 256
_DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 8_192
_MOST_FAILED: Final = 0.01
_LEAST_CONTEXT_SPREAD: Final = 0.1
_GOAL: Final = {"TPOT": 0.05, "TTFT": 0.1}


@dataclass(frozen=True, slots=True)
class Fit:
    """The outcome: a model, and how it compares to every run, first those it was made from.

    `loss` says how unlike these the replays of the model are; 0 is no difference.
    """

    model: Model
    loss: float
    profile: Profile
    sections: list[tuple[str, list[Comparison]]]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 and a profile, 1 and why there is none, or 2 for a wrong flag."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as finished:  # argparse has answered --help or named the wrong flag
        return int(finished.code or 0)
    try:
        candidates = _candidates(args)
        runs, held_out = read_runs(args.results), read_runs(args.hold_out)
        outcomes = [fit(runs, held_out, limits) for limits in candidates]
        outcome = min(outcomes, key=lambda outcome: outcome.loss)
        save(outcome.profile, args.output)
    except (ResultsError, ProfileError) as error:
        sys.stderr.write(f"mockengine fit: {error}\n")
        return _FAILED
    sys.stdout.write(_for_person(outcome, args.output))
    return 0


def fit(runs: list[Run], held_out: list[Run], limits: Limits) -> Fit:
    """Fit the step model to `runs` and judge it on these and on `held_out`.

    Raises `ResultsError` where the runs do not tell the coefficients.
    """
    _check(runs)
    found = refine(runs, first_guess(runs, limits), limits)
    model = found.model
    sections = []
    records = []
    for run in [*runs, *held_out]:
        lines = compare(measured(run), modelled(run, replay(run, model, limits)))
        is_held_out = run in held_out
        sections.append((f"{run.name} (held out)" if is_held_out else run.name, lines))
        records.append(_record(run, lines, is_held_out=is_held_out))
    steps = model.steps
    profile = Profile(
        coefficients=Coefficients(
            step_base_ms=_MS_PER_S * steps.base_s,
            step_ms_per_prefill_token=_MS_PER_S * steps.per_prefill_token_s,
            step_ms_per_decode=_MS_PER_S * steps.per_decode_s,
            step_ms_per_context_token=_MS_PER_S * steps.per_context_token_s,
            step_jitter=jitter(runs, steps),
        ),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        async_scheduling=limits.async_scheduling,
        overhead_ms=_MS_PER_S * model.overhead_s,
        most_decodes=most_decodes(runs),
        runs=records,
        notes=[*_notes(runs, limits), *_doubts(sections)],
    )
    return Fit(model, found.loss, profile, sections)


def _candidates(args: argparse.Namespace) -> list[Limits]:
    """Return what the scheduler may have been set to; raises `ResultsError` for what it cannot."""
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ResultsError(
            f"--max-num-batched-tokens {args.max_num_batched_tokens}: fewer than --max-num-seqs {args.max_num_seqs}, "
            "which vLLM refuses (give what the deployment was started with)"
        )
    kinds = (True, False) if args.async_scheduling is None else (args.async_scheduling,)
    return [Limits(args.max_num_seqs, args.max_num_batched_tokens, is_async) for is_async in kinds]


def _check(runs: list[Run]) -> None:
    if len({run.load for run in runs}) == 1:
        rate, concurrency = runs[0].load
        limit = "" if concurrency is None else f" and max_concurrency {concurrency}"
        raise ResultsError(
            f"{', '.join(run.name for run in runs)}: all at request_rate {rate:g}{limit}, so how a step grows with the "
            "batch cannot be told (give results at two or more rates, from nearly idle to saturated)"
        )
    if not any((run.output_tokens > 1).any() and run.decode_s.any() for run in runs):
        raise ResultsError(
            f"{', '.join(run.name for run in runs)}: no reply has a second token in a chunk of its own, so steps "
            "cannot be told apart (benchmark replies of many tokens, streamed)"
        )


def _notes(runs: list[Run], limits: Limits) -> Iterator[str]:
    most = most_decodes(runs)
    if most < limits.max_num_seqs:
        yield f"At most {most} requests decoded at a time, of {limits.max_num_seqs} that may; more is extrapolation."
    if context_spread(runs) < _LEAST_CONTEXT_SPREAD:
        yield (
            "All replies had much the same context, so what a decode and what its context costs are only known "
            "together: benchmark prompts of different lengths to tell them apart."
        )
    for run in runs:
        if not run.are_arrivals_measured and run.request_rate < inf:
            yield f"{run.name} does not say when requests were sent (start_times), so arrivals at its rate were drawn."
        if run.failed > _MOST_FAILED * (run.failed + len(run.sent_s)):
            yield f"{run.name}: {run.failed} requests failed; what they did to the others is not in the model."


def _doubts(sections: Sequence[tuple[str, Sequence[Comparison]]]) -> Iterator[str]:
    wrong = [
        name
        for name, lines in sections
        if any(line.statistic == "mean" and abs(line.error) > _GOAL.get(line.what, inf) for line in lines)
    ]
    if wrong:
        yield (
            f"The model is off by more than 5 % in mean TPOT or 10 % in mean TTFT for {', '.join(wrong)}. Were "
            "--max-num-seqs and --max-num-batched-tokens those of the deployment? Was it one engine, without cached "
            "prefixes and preemption?"
        )


def _record(run: Run, lines: Sequence[Comparison], *, is_held_out: bool) -> dict[str, Any]:
    """Return what the profile keeps of a run."""
    return {
        "file": run.name,
        "held_out": is_held_out,
        "request_rate": run.request_rate,
        "max_concurrency": run.max_concurrency,
        "requests": len(run.sent_s),
        "failed": run.failed,
        "errors": {f"{line.what.lower()}_{line.statistic}": line.error for line in lines},
    }


def _for_person(outcome: Fit, output: Path) -> str:
    coefficients = outcome.profile.coefficients
    sentence = (
        f"A step takes {coefficients.step_base_ms:.4g} ms"
        f" + {coefficients.step_ms_per_prefill_token:.4g} ms for each prompt token"
        f" + {coefficients.step_ms_per_decode:.4g} ms for each decoding request"
        f" + {coefficients.step_ms_per_context_token:.4g} ms for each token of their context,"
        f" give or take {100 * coefficients.step_jitter:.1f} %."
    )
    flags = (
        f"--load-model vllm --timing fitted --timing-profile {output} --max-num-seqs {outcome.profile.max_num_seqs} "
        f"--max-num-batched-tokens {outcome.profile.max_num_batched_tokens}"
    )
    kind = "asynchronous" if outcome.profile.async_scheduling else "synchronous"
    return "\n".join(
        [
            *(table(outcome.sections), "", sentence),
            f"Scheduling is {kind}. Network and frontend took {outcome.profile.overhead_ms:.4g} ms besides.",
            *(f"Note: {note}" for note in outcome.profile.notes),
            f"Written to {output}: play it with {flags}",
            "",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mockengine fit",
        description="Finds how long the steps of a real deployment take, from benchmarks of it at several rates.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "results",
        metavar="RESULTS",
        nargs="+",
        type=Path,
        help="files that `vllm bench serve --save-result --save-detailed` wrote, at two or more request rates",
    )
    parser.add_argument(
        "--hold-out",
        nargs="+",
        action="extend",
        type=Path,
        default=[],
        metavar="FILE",
        help="more such files, not to learn from but to judge the outcome by",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(_DEFAULT_OUTPUT), metavar="FILE", help="the profile (default: %(default)s)"
    )
    for flag, default in (
        ("--max-num-seqs", _DEFAULT_MAX_NUM_SEQS),
        ("--max-num-batched-tokens", _DEFAULT_MAX_NUM_BATCHED_TOKENS),
    ):
        parser.add_argument(
            flag,
            type=_positive,
            default=default,
            metavar="N",
            help="what the deployment was started with; vLLM's own default depends on the GPU (default: %(default)s)",
        )
    parser.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="whether the deployment scheduled a step while the one before it was computed (default: try both)",
    )
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text} is not allowed (use a whole number from 1 to {2**31 - 1})")
    return int(text)
