# SPDX-License-Identifier: Apache-2.0
"""An engine is killed under a live Rust frontend, and the next one goes on."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.stack import MODEL, MODEL_NAME, MOE_MODEL, wait_until

pytestmark = pytest.mark.rust_frontend

KILLS = 20
# New requests are to be served within this time of the start of the next engine; a busy machine may take longer to
# start a process, which is why most of them have to be, and not all.
SERVED_WITHIN_S = 2.0


class Engines:
    """Engines of one frontend, one after the other."""

    def __init__(self, frontend: RustFrontend, state_file: Path, *flags: str) -> None:
        self.frontend = frontend
        self._flags = (f"--handshake-address={frontend.handshake_address}", f"--state-file={state_file}", *flags)

    def start(self) -> EngineProcess:
        return EngineProcess(*self._flags)

    def status(self, deadline_s: float = 20.0) -> int:
        body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
        url = f"{self.frontend.url}/v1/completions"
        return httpx.post(url, json=body, timeout=deadline_s, trust_env=False).status_code

    def stream(self) -> Iterator[object]:
        client = openai.OpenAI(base_url=f"{self.frontend.url}/v1", api_key="none", max_retries=0, timeout=20)
        with client:
            yield from client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=20_000, stream=True)


@pytest.mark.parametrize(
    ("version", "ranks"), [("0.33.0", 1), ("0.33.0", 2), ("0.30.0", 1), ("0.27.1", 1), ("0.24.0", 1)]
)
def test_the_next_engine_serves_and_lost_requests_end(version: str, ranks: int, tmp_path: Path) -> None:
    with RustFrontend(rust_frontend(version), MODEL, data_parallel_size=ranks) as frontend:
        engines = Engines(frontend, tmp_path / "state.json", f"--engine-count={ranks}", "--itl-ms=20")
        with engines.start() as engine, ThreadPoolExecutor() as pool:
            frontend.wait_healthy(besides=engine)
            streams = [pool.submit(list, engines.stream()) for _ in range(4)]
            wait_until(lambda: len(engine.logged("request started")), (4).__le__, "requests that have started")
            engine.kill()
            with engines.start() as successor:
                resumed = successor.wait_for("engine resumed")
                assert resumed["requests_lost"] == 4
                for stream in streams:
                    assert isinstance(stream.exception(timeout=20), openai.APIError)
                assert [engines.status() for _ in range(4)] == [200] * 4
                assert frontend.is_healthy
                assert not successor.logged("engine ready")


@pytest.mark.failure_modes
def test_engines_are_killed_again_and_again_and_each_next_one_serves_soon(tmp_path: Path) -> None:
    took: list[float] = []
    with RustFrontend(rust_frontend("0.33.0"), MODEL) as frontend, ThreadPoolExecutor() as pool:
        engines = Engines(frontend, tmp_path / "state.json", "--itl-ms=20", "--no-log-requests")
        lost: list[Future[list[object]]] = []
        for _ in range(1 + KILLS):
            began = time.monotonic()
            with engines.start() as engine:
                if lost:
                    engine.wait_for("engine resumed")
                    assert engines.status() == 200
                    took.append(time.monotonic() - began)
                    assert isinstance(lost[-1].exception(timeout=20), openai.APIError)
                else:
                    frontend.wait_healthy(besides=engine)
                stream = engines.stream()
                next(stream)
                lost.append(pool.submit(list, stream))
                engine.kill()
        frontend.kill()
    assert len(took) == KILLS
    assert sorted(took)[KILLS // 2] < SERVED_WITHIN_S, took


def test_a_mixture_of_experts_goes_on_in_waves(tmp_path: Path) -> None:
    with RustFrontend(rust_frontend("0.33.0"), MOE_MODEL, data_parallel_size=2) as frontend:
        engines = Engines(frontend, tmp_path / "state.json", "--engine-count=2")
        with engines.start() as engine:
            frontend.wait_healthy(besides=engine)
            assert [engines.status() for _ in range(3)] == [200] * 3
            engine.kill()
        with engines.start() as successor:
            successor.wait_for("engine resumed")
            assert [engines.status() for _ in range(6)] == [200] * 6


def test_an_engine_that_may_not_resume_tells_the_frontend(tmp_path: Path) -> None:
    with RustFrontend(rust_frontend("0.33.0"), MODEL) as frontend:
        engines = Engines(frontend, tmp_path / "state.json", "--no-resume")
        with engines.start() as engine:
            frontend.wait_healthy(besides=engine)
            engine.kill()
        with engines.start() as successor:
            successor.wait_for("abandoned frontend told")
            wait_until(lambda: frontend.is_healthy, (False).__eq__, "health")
