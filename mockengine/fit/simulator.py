# SPDX-License-Identifier: Apache-2.0
"""Replays a run with given coefficients: continuous batching as vLLM's scheduler does it, on a virtual clock.

In each step every decoding request gets a token, then what is left of `max_num_batched_tokens` goes to prompts, first
come, first served, long ones in chunks; at most `max_num_seqs` requests run. A prompt's last chunk gives the first
token. Where scheduling is asynchronous, which prompts a step computes is decided when the step before it begins. There
is no prefix cache, no preemption and no jitter.

Steps without prefill follow each other until a request ends or another can begin. The time of k of them is a
polynomial in k, so all are taken at once and a run costs so much a request, not so much a token.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import Final

import numpy as np

from mockengine.engine.timing import StepCoefficients
from mockengine.fit.results import Floats, Run

# Steps that would take no time at all still have to come to an end.
_ALMOST_NOTHING_S: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Limits:
    """What the real scheduler was set to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """What is fitted.

    Attributes:
        steps: coefficients of the step model.
        overhead_s: what a first token takes besides the engine: network and frontend.

    """

    steps: StepCoefficients
    overhead_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """When things happened, in seconds, by request in the order of the run."""

    sent_s: Floats
    first_token_s: Floats
    last_token_s: Floats


def replay(run: Run, model: Model, limits: Limits) -> Replay:
    """Return when the requests of `run` would be served if steps took what `model` says."""
    return _Replay(run, model, limits).run()


@dataclass(slots=True)
class _Plan:
    """The prompt tokens that a step computes, and whose first tokens come of it."""

    tokens: int = 0
    begun: list[int] = field(default_factory=list)


_NOTHING: Final = _Plan()


class _Replay:
    def __init__(self, run: Run, model: Model, limits: Limits) -> None:
        self._limits = limits
        steps = model.steps
        # Never 0, so that time goes on.
        self._base_s = max(steps.base_s, _ALMOST_NOTHING_S)
        self._per_prefill_s, self._per_decode_s = steps.per_prefill_token_s, steps.per_decode_s
        self._per_context_s = steps.per_context_token_s
        self._overhead_s = model.overhead_s
        self._prompts, self._outputs = run.prompt_tokens.tolist(), run.output_tokens.tolist()
        self._wanted = [*run.wanted_s.tolist(), inf]
        count = len(self._prompts)
        self._sent, self._first, self._last = [0.0] * count, [0.0] * count, [0.0] * count
        # The client: who is next, how many are in flight, and since when there is room for another, if there was none.
        self._next = 0
        self._most_in_flight = run.max_concurrency or count
        self._in_flight = 0
        self._free_since = 0.0
        # On their way to the engine, and there; a prompt is with how much of it is still to be computed.
        self._travelling: deque[tuple[float, int]] = deque()
        self._waiting: deque[int] = deque()
        self._chunked: tuple[int, int] | None = None
        # The decoding requests, as a whole: they differ only in when they end, counted in steps.
        self._now = 0.0
        self._step = 0
        self._decodes = 0
        self._context = 0
        self._ends: list[tuple[int, int]] = []

    def run(self) -> Replay:
        """Serve everyone."""
        plan = _NOTHING
        while True:
            self._arrive()
            if not self._limits.async_scheduling or not (plan.tokens or self._decodes):
                plan = self._plan(beside=0)
            if plan.tokens or self._decodes:
                following = self._plan(beside=len(plan.begun)) if self._limits.async_scheduling else _NOTHING
                steps = 1 if plan.tokens or following.tokens else self._steps_of_decodes()
                self._pass(steps, self._per_prefill_s * plan.tokens)
                if plan.begun:
                    self._begin(plan.begun)
                self._end()
                plan = following
            elif self._travelling:
                self._now = self._travelling[0][0]
            else:
                return Replay(np.array(self._sent), np.array(self._first), np.array(self._last))

    def _arrive(self) -> None:
        """Let the client send what it wants to by now, and one more, which says when there will be something to do."""
        while self._in_flight < self._most_in_flight:
            wanted = self._wanted[self._next]
            is_ahead = bool(self._travelling) and self._travelling[-1][0] > self._now
            if wanted == inf or (wanted > self._now and is_ahead):
                break
            sent = max(wanted, self._free_since)
            self._sent[self._next] = sent
            self._travelling.append((sent + self._overhead_s, self._next))
            self._next += 1
            self._in_flight += 1
        while self._travelling and self._travelling[0][0] <= self._now:
            self._waiting.append(self._travelling.popleft()[1])

    def _plan(self, beside: int) -> _Plan:
        """Take prompts for a step in which, `beside` those that decode now, so many more will."""
        if not self._chunked and not self._waiting:
            return _NOTHING
        decodes = self._decodes + beside
        budget, seats = self._limits.max_num_batched_tokens - decodes, self._limits.max_num_seqs - decodes
        plan = _Plan()
        while budget > plan.tokens and seats > 0 and (self._chunked or self._waiting):
            if self._chunked:
                request, left = self._chunked
            else:
                request = self._waiting.popleft()
                left = self._prompts[request]
            chunk = min(left, budget - plan.tokens)
            plan.tokens += chunk
            self._chunked = (request, left - chunk) if chunk < left else None
            if not self._chunked:
                plan.begun.append(request)
                seats -= 1
        return plan

    def _begin(self, begun: list[int]) -> None:
        for request in begun:
            self._first[request] = self._now
            self._decodes += 1
            self._context += self._prompts[request] + 1
            heappush(self._ends, (self._step + self._outputs[request] - 1, request))

    def _steps_of_decodes(self) -> int:
        """Return how many steps it takes until something happens that is not one more token for each."""
        steps = self._ends[0][0] - self._step
        if self._travelling and self._decodes < self._limits.max_num_seqs:
            steps = min(steps, self._steps_until(self._travelling[0][0]))
        return steps

    def _steps_until(self, moment: float) -> int:
        """Return how many steps of the present decodes it takes to reach `moment`: it solves what `_pass` computes."""
        growth = self._per_context_s * self._decodes / 2
        first = self._base_s + self._per_decode_s * self._decodes + self._per_context_s * self._context - growth
        wait = moment - self._now
        steps = 2 * wait / (first + sqrt(first * first + 4 * growth * wait))
        return max(1, ceil(steps))

    def _pass(self, steps: int, prefill_s: float) -> None:
        """Let time go on by so many steps of the present decodes, each of which makes every context longer by one."""
        contexts = steps * self._context + self._decodes * steps * (steps - 1) // 2
        each_s = self._base_s + self._per_decode_s * self._decodes
        self._now += steps * each_s + self._per_context_s * contexts + prefill_s
        self._step += steps
        self._context += steps * self._decodes

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            _, request = heappop(self._ends)
            self._last[request] = self._now
            self._decodes -= 1
            self._context -= self._prompts[request] + self._outputs[request]
            if self._in_flight == self._most_in_flight:
                self._free_since = self._now
            self._in_flight -= 1
