# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench serve --save-result --save-detailed` saved, as arrays.

The Python and the Rust frontend write the same fields. A file may hold several results, one after another, as
`--append-result` makes them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_DETAILED: Final = ("input_lens", "output_lens", "ttfts", "itls")
_HOW: Final = "save it with `vllm bench serve --save-result --save-detailed`"
# Fewer say nothing about a 99th percentile, and little about anything else.
_FEWEST_REQUESTS: Final = 20


class ResultsError(Exception):
    """The files cannot be used; the text names file, cause, value and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One benchmark: the requests that succeeded, in the order in which they were sent. Times are in seconds.

    Attributes:
        name: the file, and the number of the result in it unless it is the only one.
        request_rate: requests per second that the client aimed at; infinite where it sent all at once.
        max_concurrency: most requests that the client had in flight; None where it set no limit.
        wanted_s: when the client would have sent each request had it no such limit; the first one at 0.
        sent_s: when it did send it; where `are_arrivals_measured` is false, when it may have.
        are_arrivals_measured: whether the result says when requests were sent.
        prompt_tokens: length of each prompt.
        output_tokens: length of each reply.
        ttft_s: from sending to the first token.
        gaps_s: times between chunks of each reply.
        failed: requests that did not succeed.

    """

    name: str
    request_rate: float
    max_concurrency: int | None
    wanted_s: Floats
    sent_s: Floats
    are_arrivals_measured: bool
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_s: Floats
    gaps_s: tuple[Floats, ...]
    failed: int

    @property
    def decode_s(self) -> Floats:
        """From the first token of each reply to its last."""
        return np.array([gaps.sum() for gaps in self.gaps_s])

    @property
    def load(self) -> tuple[float, int | None]:
        """What sets this run apart from runs under another load."""
        return self.request_rate, self.max_concurrency


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read all results of all files; raises `ResultsError` for the first one that cannot be used."""
    runs = []
    for path in paths:
        found = list(_documents(path))
        for number, document in enumerate(found, start=1):
            name = str(path) if len(found) == 1 else f"{path}#{number}"
            runs.append(_run(name, document))
    return runs


def _documents(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror} (give the path of a readable file)") from None
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path}: byte {error.start} is not UTF-8, so this is no JSON ({_HOW})") from None
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text) or not text:
        try:
            document, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path}: not JSON: {error} ({_HOW})") from None
        yield document
        while position < len(text) and text[position].isspace():
            position += 1


def _run(name: str, document: Any) -> Run:
    if not isinstance(document, dict) or "request_rate" not in document:
        kind = "has no request_rate" if isinstance(document, dict) else f"holds a {type(document).__name__}"
        raise ResultsError(f"{name}: no result of a serving benchmark, it {kind} ({_HOW})")
    missing = [field for field in _DETAILED if not document.get(field)]
    if missing:
        raise ResultsError(
            f"{name}: {', '.join(missing)} missing or empty, so it says nothing of single requests ({_HOW})"
        )
    try:
        return _with_arrivals(name, document)
    except (TypeError, ValueError, OverflowError) as error:
        raise ResultsError(f"{name}: a field has not the form that vLLM gives it: {error} ({_HOW})") from None


def _with_arrivals(name: str, document: dict[str, Any]) -> Run:
    prompts = np.array(document["input_lens"], np.int64)
    outputs = np.array(document["output_lens"], np.int64)
    ttfts = np.array(document["ttfts"], np.float64)
    gaps = [np.array(each, np.float64) for each in document["itls"]]
    rate, limit = float(document["request_rate"]), document.get("max_concurrency")
    wanted, sent, are_measured = _arrivals(document, len(prompts), rate)
    lengths = {len(array) for array in (prompts, outputs, ttfts, gaps, sent)}
    if len(lengths) != 1 or any(array.ndim != 1 for array in (prompts, outputs, ttfts, *gaps)):
        raise ValueError(f"the lists of requests differ in length: {sorted(lengths)}")
    if not rate > 0 or not all(np.isfinite(array).all() for array in (ttfts, sent, wanted, *gaps)):
        raise ValueError("request_rate, a time or a length is negative, infinite or no number")
    usable = (outputs > 0) & (ttfts > 0) & (prompts > 0)
    if usable.sum() < _FEWEST_REQUESTS:
        raise ResultsError(
            f"{name}: {usable.sum()} requests succeeded, at least {_FEWEST_REQUESTS} are needed "
            "(use a larger --num-prompts)"
        )
    order = np.argsort(sent, kind="stable")
    order = order[usable[order]]
    start = min(wanted[order])
    return Run(
        name=name,
        request_rate=rate,
        max_concurrency=None if limit is None else int(limit),
        wanted_s=wanted[order] - start,
        sent_s=sent[order] - start,
        are_arrivals_measured=are_measured,
        prompt_tokens=prompts[order],
        output_tokens=outputs[order],
        ttft_s=ttfts[order],
        gaps_s=tuple(gaps[index] for index in order),
        failed=int(len(prompts) - usable.sum()),
    )


def _arrivals(document: dict[str, Any], count: int, rate: float) -> tuple[Floats, Floats, bool]:
    """Return when requests were wanted and when sent, and whether that is measured."""
    if document.get("start_times"):
        sent = np.array(document["start_times"], np.float64)
        queued = document.get("queue_times")
        if queued and len(queued) == len(sent):
            return sent - np.array(queued, np.float64), sent, True
        return (sent if isfinite(rate) else np.full(len(sent), sent.min())), sent, True
    drawn = _drawn_arrivals(count, rate, float(document.get("burstiness") or 1.0))
    return drawn, drawn, False


def _drawn_arrivals(count: int, rate: float, burstiness: float) -> Floats:
    """Draw arrivals as vLLM's client does: gamma gaps, stretched so that the last one is sent at count / rate."""
    if rate == inf:
        return np.zeros(count)
    gaps = np.full(count, 1 / rate)
    if isfinite(burstiness):
        gaps = np.random.default_rng(0).gamma(burstiness, 1 / (rate * burstiness), count)
    arrivals = np.cumsum(gaps)
    return np.asarray(arrivals * (count / rate / arrivals[-1]), np.float64)
