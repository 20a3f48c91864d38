# SPDX-License-Identifier: Apache-2.0
"""A real frontend and the engine beside it, as one thing to test."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import openai

from mockengine.testing.engine import EngineProcess
from mockengine.testing.frontends import SERVED_MODEL_NAME, PythonFrontend, RustFrontend

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "deploy" / "model"
MOE_MODEL = ROOT / "deploy" / "model-moe"
MODEL_NAME = SERVED_MODEL_NAME
DEADLINE_S = 20.0

Frontend = RustFrontend | PythonFrontend
T = TypeVar("T")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


@dataclass(frozen=True)
class Stack:
    """A frontend that serves, and its engine.

    Attributes:
        frontend: serves.
        engine: answers it.
        clients: of whoever tests the two; a socket that is left open is an error in some later test.

    """

    frontend: Frontend
    engine: EngineProcess
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.frontend.url

    def client(self) -> openai.OpenAI:
        """Return a client, which is closed with the stack at the latest."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        self.clients.append(made)
        return made

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=DEADLINE_S)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name which carry these labels; 0 where there are none yet."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            sample = _SAMPLE.match(line)
            if sample is None or sample["name"] != name:
                continue
            if all(f'{key}="{value}"' in (sample["labels"] or "") for key, value in labels.items()):
                total += float(sample["value"])
        return total

    def wait_for_metric(self, name: str, condition: Callable[[float], bool]) -> float:
        """Wait until the sum of a metric's samples is as wanted."""
        return wait_until(lambda: self.metric(name), condition, name)


def wait_until(read: Callable[[], T], condition: Callable[[T], bool], what: str) -> T:
    """Read again and again until the condition holds."""
    end = time.monotonic() + DEADLINE_S
    while True:
        value = read()
        if condition(value):
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} is still {value} after {DEADLINE_S:g} s")
        time.sleep(0.02)


@contextmanager
def serving(frontend: Frontend, *engine_flags: str) -> Iterator[Stack]:
    """Start an engine beside a frontend that is already starting, and wait until the two serve."""
    flags = (f"--handshake-address={frontend.handshake_address}", *engine_flags)
    with EngineProcess(*flags) as engine:
        frontend.wait_healthy(besides=engine)
        stack = Stack(frontend, engine)
        try:
            yield stack
        finally:
            for client in stack.clients:
                client.close()
