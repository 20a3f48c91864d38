# SPDX-License-Identifier: Apache-2.0
"""Real Rust frontends with the engine behind them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support import checks
from tests.support.stack import MODEL, MODEL_NAME, MOE_MODEL, Stack, serving, wait_until

pytestmark = pytest.mark.rust_frontend


@pytest.mark.parametrize("check", checks.BASIC, ids=lambda check: check.__name__)
def test_every_release(any_rust_stack: Stack, check: Callable[[Stack], None]) -> None:
    check(any_rust_stack)


@pytest.mark.parametrize(
    "check",
    [
        checks.metrics_count_exactly,
        checks.many_streams_at_once,
        checks.same_prompt_gives_the_same_tokens_as_on_the_double,
    ],
    ids=lambda check: check.__name__,
)
def test_newest_release(rust_stack: Stack, check: Callable[[Stack], None]) -> None:
    check(rust_stack)


@pytest.mark.parametrize("version", ["0.27.1", "0.24.0"])
def test_release_that_requests_do_not_tell_counts_exactly_once_it_is_named(version: str) -> None:
    with (
        RustFrontend(rust_frontend(version), MODEL) as frontend,
        serving(frontend, f"--vllm-version={version}") as stack,
    ):
        checks.metrics_count_exactly(stack)


@pytest.mark.parametrize("version", ["0.33.0", "0.30.0", "0.27.1", "0.24.0"])
def test_every_release_counts_drafts(version: str) -> None:
    flags = ("--spec-tokens=3", "--acceptance-rate=1,1,0", "--per-request-spec-decode-metrics=detailed")
    with RustFrontend(rust_frontend(version), MODEL) as frontend, serving(frontend, *flags) as stack:
        checks.drafts_are_counted(stack)
        checks.streamed_chat(stack)
        checks.many_streams_at_once(stack)
        checks.health_and_models(stack)


def test_drafts_of_a_request_are_in_its_response() -> None:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, extra_args=["--enable-scale-out"]) as frontend,
        serving(frontend, "--spec-tokens=3", "--acceptance-rate=1,1,0") as stack,
    ):
        asked = {"model": MODEL_NAME, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 31}}
        response = httpx.post(f"{stack.url}/inference/v1/generate", json=asked, timeout=20)
        assert response.status_code == 200, response.text
        told = response.json()["metrics"]["speculative_decoding"]
        assert told["acceptance_histogram"] == [0, 0, 10, 0]
        assert (told["num_draft_tokens"], told["mean_acceptance_length"]) == (30, 3)


def test_four_ranks_share_the_work() -> None:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, data_parallel_size=4) as frontend,
        serving(frontend, "--engine-count=4") as stack,
    ):
        checks.many_requests_are_shared_evenly(stack, 4)
        for rank in range(4):
            # Lengths that nothing else here has: the line of the log may come after the response.
            max_tokens = 41 + rank
            response = httpx.post(
                f"{stack.url}/v1/completions",
                json={"model": MODEL_NAME, "prompt": checks.PROMPT, "max_tokens": max_tokens},
                headers={"X-data-parallel-rank": str(rank)},
                timeout=20,
            )
            assert response.status_code == 200
            assert _asked_for(stack, max_tokens)["engine"] == rank


def _asked_for(stack: Stack, max_tokens: int) -> dict[str, Any]:
    return stack.engine.wait_for("request started", lambda entry: entry["max_tokens"] == max_tokens)


def test_mixture_of_experts_with_two_ranks_runs_in_waves() -> None:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MOE_MODEL, data_parallel_size=2) as frontend,
        serving(frontend, "--engine-count=2") as stack,
    ):
        assert stack.engine.wait_for("engine ready")["coordinator"] is True
        for _ in range(3):
            checks.completion(stack)
        checks.many_streams_at_once(stack)


def test_chunks_of_four() -> None:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, "--output-token-chunk-size=4") as stack,
    ):
        checks.completion(stack)
        checks.streamed_chat(stack)
        stream = stack.client().completions.create(model=MODEL_NAME, prompt=checks.PROMPT, max_tokens=10, stream=True)
        texts = [chunk.choices[0].text for chunk in stream if chunk.choices[0].text]
        assert len(texts) == 3
        checks.metrics_count_exactly(stack)


def test_engine_first() -> None:
    port = free_port()
    with EngineProcess(f"--handshake-address=tcp://127.0.0.1:{port}") as engine:
        engine.wait_for("engine joining")
        with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, handshake_port=port) as frontend:
            frontend.wait_healthy()
            checks.completion(Stack(frontend, engine))


def test_frontend_restarted_under_the_engine() -> None:
    port = free_port()
    texts = set()
    with EngineProcess(f"--handshake-address=tcp://127.0.0.1:{port}", "--rejoin-grace-s=0.2") as engine:
        for lost in (1, 2, 3):
            with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, handshake_port=port) as frontend:
                frontend.wait_healthy()
                stack = Stack(frontend, engine)
                reply = stack.client().completions.create(model=MODEL_NAME, prompt=checks.PROMPT, max_tokens=9)
                texts.add(reply.choices[0].text)
            wait_until(lambda: len(engine.logged("frontend lost")), lost.__eq__, "lost frontends")
        assert len(texts) == 1
        assert "Traceback" not in engine.output


def test_killed_frontend_is_followed_by_the_next() -> None:
    port = free_port()
    with EngineProcess(f"--handshake-address=tcp://127.0.0.1:{port}", "--rejoin-grace-s=0.2") as engine:
        with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, handshake_port=port) as frontend:
            frontend.wait_healthy()
            frontend.kill()
            engine.wait_for("frontend lost")
        with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, handshake_port=port) as frontend:
            frontend.wait_healthy()
            checks.completion(Stack(frontend, engine))


def test_every_stream_ends_when_the_engine_leaves() -> None:
    # At a pace: without one the engine has said everything before the last of the streams has begun.
    with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend, serving(frontend, "--itl-ms=20") as stack:
        checks.every_stream_ends_when_the_engine_leaves(stack)
        # The notice is what lets a liveness probe restart the frontend.
        wait_until(lambda: stack.get("/health").status_code, lambda status: status == 503, "health")
