# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of a deployment that is known: the truth that `mockengine fit` has to find.

The scheduler goes step by step and knows nothing of how the fit replays. To it comes what real deployments add: steps
jitter, batches are padded as CUDA graphs want it, every token travels for a while that differs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from mockengine.engine.timing import StepCoefficients, StepLoad
from mockengine.fit.simulator import Limits

LIMITS: Final = Limits(max_num_seqs=256, max_num_batched_tokens=8_192)
TRUTH: Final = StepCoefficients(base_s=6e-3, per_prefill_token_s=5e-5, per_decode_s=8e-5, per_context_token_s=3e-8)
PADDED_TO: Final = 8
TRAVEL_S: Final = 2e-3
_JITTER: Final = 0.05
Cost = Callable[[StepLoad], float]


@dataclass(slots=True, eq=False)
class Served:
    """A request: what it is, when it is sent after which delay it arrives, and when its tokens come."""

    prompt: int
    output: int
    sent_s: float
    delay_s: float
    tokens_s: list[float] = field(default_factory=list)
    scheduled: int = 0

    @property
    def left(self) -> int:
        """Prompt tokens that no step was told to compute yet."""
        return self.prompt - self.scheduled


class Deployment:
    """A client with so many connections, and an engine."""

    def __init__(self, requests: Sequence[Served], cost: Cost, limits: Limits, clients: int) -> None:
        self._unsent = deque(requests)
        self._cost = cost
        self._limits = limits
        self._clients = clients
        self._in_flight = 0
        self._now = self._ended_s = 0.0
        self._travelling: list[Served] = []
        self._waiting: deque[Served] = deque()
        self._running: list[Served] = []

    def serve(self) -> None:
        """Serve every request to its last token."""
        plan: list[tuple[Served, int]] = []
        while True:
            self._arrive()
            speaking = [request for request in self._running if request.tokens_s]
            if not self._limits.async_scheduling or not (plan or speaking):
                plan = self._schedule()
            if plan or speaking:
                # Asynchronously, the next step is decided on now, as if this one were over.
                following = self._schedule() if self._limits.async_scheduling else []
                self._step(plan, speaking, {id(request) for request, _ in following})
                plan = following
            elif self._travelling:
                self._now = min(request.sent_s + request.delay_s for request in self._travelling)
            else:
                return

    def _arrive(self) -> None:
        while self._unsent and self._in_flight < self._clients:
            request = self._unsent.popleft()
            request.sent_s = max(request.sent_s, self._ended_s)
            self._travelling.append(request)
            self._in_flight += 1
        arrived = [each for each in self._travelling if each.sent_s + each.delay_s <= self._now]
        self._waiting += sorted(arrived, key=lambda each: each.sent_s + each.delay_s)
        self._travelling = [each for each in self._travelling if each not in arrived]

    def _schedule(self) -> list[tuple[Served, int]]:
        """Choose the prompts for a step, and how much of each."""
        budget = self._limits.max_num_batched_tokens - sum(not each.left for each in self._running)
        while (
            self._waiting
            and len(self._running) < self._limits.max_num_seqs
            and budget > sum(each.left for each in self._running)
        ):
            self._running.append(self._waiting.popleft())
        chunks = []
        for request in [each for each in self._running if each.left]:
            chunk = min(request.left, budget)
            budget -= chunk
            request.scheduled += chunk
            chunks.append((request, chunk))
        return chunks

    def _step(self, plan: list[tuple[Served, int]], speaking: list[Served], unfinished: set[int]) -> None:
        context = sum(request.prompt + len(request.tokens_s) for request in speaking)
        self._now += self._cost(StepLoad(sum(chunk for _, chunk in plan), len(speaking), context))
        begun = [request for request, _ in plan if not request.left and id(request) not in unfinished]
        for request in [*speaking, *begun]:
            request.tokens_s.append(self._now)
            if len(request.tokens_s) == request.output:
                self._running.remove(request)
                self._in_flight -= 1
                self._ended_s = self._now


def bench(
    rate: float, seed: int, count: int = 150, limits: Limits = LIMITS, prompt: tuple[int, int] = (100, 900)
) -> dict[str, Any]:
    """Return what `vllm bench serve` would have saved of a run at that rate."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(*prompt, count).tolist(), rng.integers(30, 200, count).tolist()
    sent = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    delays = (TRAVEL_S * rng.lognormal(0, 0.3, count)).tolist()
    requests = [Served(*each) for each in zip(prompts, outputs, sent, delays, strict=True)]

    def cost(load: StepLoad) -> float:
        padded = replace(load, decodes=-(-load.decodes // PADDED_TO) * PADDED_TO)
        return float(TRUTH.duration_s(padded) * rng.gamma(_JITTER**-2, _JITTER**2))

    Deployment(requests, cost, limits, clients=count).serve()
    seen = [
        np.maximum.accumulate(np.array(each.tokens_s) + TRAVEL_S * rng.lognormal(0, 0.3, each.output))
        for each in requests
    ]
    return {
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": None,
        "input_lens": prompts,
        "output_lens": outputs,
        "ttfts": [float(times[0] - at) for times, at in zip(seen, sent, strict=True)],
        "itls": [np.diff(times).tolist() for times in seen],
        "start_times": [1_000 + at for at in sent],
    }
