# SPDX-License-Identifier: Apache-2.0
"""A real frontend before engines that differ in their settings, clients that take the time, and what `/metrics` says.

A frontend takes seconds to start, so one serves all tests: each engine is a rank of its own, requests name the rank
they want, and the frontend's series carry it as the label `engine`.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import httpx

from mockengine.testing.engine import EngineProcess
from tests.support.stack import MODEL_NAME, Frontend, wait_until

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 20_480
NUM_GPU_BLOCKS = MAX_MODEL_LEN // BLOCK_TOKENS + 1
"""As few as such a context can do with: one is never used."""

_COMMON = (
    "--load-model=vllm",
    f"--block-size={BLOCK_TOKENS}",
    f"--max-model-len={MAX_MODEL_LEN}",
    f"--num-gpu-blocks={NUM_GPU_BLOCKS}",
    "--no-log-requests",
)
_PATIENCE_S = 120.0
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)\{(?P<labels>.*)\} (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram's observations: how many, their sum, and how many up to each bound."""

    count: float = 0.0
    total: float = 0.0
    up_to: Mapping[float, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return self.total / self.count

    def since(self, before: Self) -> "Histogram":
        """Return the observations made since."""
        up_to = {bound: count - before.up_to.get(bound, 0) for bound, count in self.up_to.items()}
        return Histogram(self.count - before.count, self.total - before.total, up_to)


class Metrics:
    """What a frontend says of one rank at one moment."""

    def __init__(self, text: str, rank: int) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if f'engine="{rank}"' in line and (sample := _SAMPLE.match(line)):
                self._samples.append((sample["name"], dict(_LABEL.findall(sample["labels"])), float(sample["value"])))

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with that name and these labels; 0 where there are none yet."""
        return sum(value for found, its, value in self._samples if found == name and labels.items() <= its.items())

    def histogram(self, name: str) -> Histogram:
        up_to = {float(labels["le"]): value for found, labels, value in self._samples if found == f"{name}_bucket"}
        return Histogram(self.value(f"{name}_count"), self.value(f"{name}_sum"), up_to)

    @property
    def running(self) -> float:
        return self.value("vllm:num_requests_running")

    @property
    def waiting(self) -> float:
        return self.value("vllm:num_requests_waiting")

    @property
    def usage(self) -> float:
        return self.value("vllm:kv_cache_usage_perc")

    @property
    def is_idle(self) -> bool:
        return not any(self.value(name) for name in _GAUGES)

    def __str__(self) -> str:
        return f"running {self.running:g}, waiting {self.waiting:g}, usage {self.usage:.3f}"


@dataclass(frozen=True, slots=True)
class Timed:
    """What a client saw of one reply; moments are of its own clock, in seconds."""

    sent_s: float
    first_s: float
    last_s: float
    tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the engines behind a frontend."""

    frontend: Frontend
    number: int

    def metrics(self) -> Metrics:
        return Metrics(httpx.get(f"{self.frontend.url}/metrics", timeout=_PATIENCE_S).text, self.number)

    def wait_for(self, condition: Callable[[Metrics], bool], what: str) -> Metrics:
        """Wait until the frontend says so of this rank."""
        return wait_until(self.metrics, condition, f"{what}: rank {self.number}")

    async def soon(self, condition: Callable[[Metrics], bool], what: str) -> Metrics:
        """Wait likewise, while requests of this event loop go on."""
        return await asyncio.to_thread(self.wait_for, condition, what)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Have one reply, whole."""
        assert self.ask(prompt, max_tokens)["usage"]["completion_tokens"] == max_tokens

    def ask(
        self, prompt: Sequence[int], max_tokens: int, patience_s: float = _PATIENCE_S, **fields: object
    ) -> dict[str, Any]:
        """Have one reply, and return what it comes in."""
        body = _body(prompt, max_tokens) | fields
        response = httpx.post(self._url, json=body, headers=self._headers, timeout=patience_s)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def stream(self, client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int) -> Timed:
        """Have one reply, token by token."""
        body = _body(prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        sent_s = 0.0
        moments: list[float] = []
        tokens = 0

        async def trace(event: str, _details: object) -> None:
            nonlocal sent_s
            # Not before, when this process is still busy with connections for all the others.
            if event == "http11.send_request_headers.started":
                sent_s = time.monotonic()

        extensions = {"trace": trace}
        async with client.stream(
            "POST", self._url, json=body, headers=self._headers, extensions=extensions
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("choices"):
                    moments.append(now)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        return Timed(sent_s, moments[0], moments[-1], tokens)

    def outputs(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Have one reply, output by output; return the number of tokens in each."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = _body(prompt, max_tokens) | {"stream": True, "stream_options": options}
        with httpx.stream("POST", self._url, json=body, headers=self._headers, timeout=_PATIENCE_S) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
        said = [0, *(json.loads(line)["usage"]["completion_tokens"] for line in lines)]
        assert said[-1] == max_tokens
        # Some chunks say something else than tokens.
        return [later - earlier for earlier, later in pairwise(said) if later > earlier]

    @property
    def _url(self) -> str:
        return f"{self.frontend.url}/v1/completions"

    @property
    def _headers(self) -> dict[str, str]:
        return {"X-data-parallel-rank": str(self.number)}


def http_client() -> httpx.AsyncClient:
    """Return a client that opens as many connections as it is asked for."""
    return httpx.AsyncClient(timeout=_PATIENCE_S, limits=httpx.Limits(max_connections=None), trust_env=False)


@contextmanager
def fleet(start: Callable[[int], Frontend], engines: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Rank]]:
    """Start a frontend and an engine for each set of flags; yield the ranks by the names of these sets.

    Args:
        start: starts a frontend that waits for so many engines.
        engines: flags by name.

    """
    size = len(engines)
    with start(size) as frontend, ExitStack() as processes:
        address = f"--handshake-address={frontend.handshake_address}"
        started = [
            processes.enter_context(
                EngineProcess(address, f"--start-rank={rank}", f"--data-parallel-size={size}", *_COMMON, *flags)
            )
            for rank, flags in enumerate(engines.values())
        ]
        frontend.wait_healthy(besides=started[-1])
        yield {name: Rank(frontend, number) for number, name in enumerate(engines)}


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    return {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
