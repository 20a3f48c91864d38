# SPDX-License-Identifier: Apache-2.0
"""What becomes of the process of an engine that fails on purpose, beside a real Rust frontend."""

import json
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving, wait_until

pytestmark = pytest.mark.rust_frontend


def _faults(*rules: Mapping[str, Any]) -> str:
    return f"--faults={json.dumps(rules)}"


def _frontend(ranks: int = 1) -> RustFrontend:
    return RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, data_parallel_size=ranks)


def _ask(stack: Stack, request_id: str, max_tokens: int = 2) -> int:
    """Return how many tokens a reply has."""
    with stack.client() as client:
        made = client.completions.create(
            model=MODEL_NAME, prompt="Hi", max_tokens=max_tokens, extra_headers={"X-Request-Id": request_id}
        )
    assert made.usage is not None
    return made.usage.completion_tokens


def _post(stack: Stack, request_id: str, deadline_s: float = 1.0) -> httpx.Response:
    body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
    headers = {"X-Request-Id": request_id}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=deadline_s, trust_env=False)


def test_a_crash_has_the_exit_code_and_the_last_word_that_its_rule_says() -> None:
    rule = {"what": {"fault": "crash", "exit_code": 137}, "when": {"after": 1, "nth": 1}}
    with _frontend() as frontend, serving(frontend, _faults(rule)) as stack:
        assert _ask(stack, "first") == 2
        assert _post(stack, "second", 20.0).status_code == httpx.codes.INTERNAL_SERVER_ERROR
        assert stack.engine.wait() == 137
        (left,) = stack.engine.logged("engine left")
        assert (left["exit_code"], left["reason"]) == (137, "a fault has it crash")
        wait_until(lambda: stack.get("/health").status_code, (503).__eq__, "health")


def test_memory_grows_and_shrinks() -> None:
    rule = {"what": {"fault": "grow_memory", "megabytes": 200, "for_s": 1}, "when": {"request_id": "now"}}
    with _frontend() as frontend, serving(frontend, _faults(rule)) as stack:
        _ask(stack, "first")
        before = _resident_mb(stack)
        _ask(stack, "now")
        wait_until(lambda: _resident_mb(stack) - before, lambda grown: grown > 180, "what it has grown by, in MB")
        wait_until(lambda: _resident_mb(stack) - before, lambda grown: grown < 50, "what it has grown by, in MB")


def _resident_mb(stack: Stack) -> float:
    status = Path(f"/proc/{stack.engine.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1_000


def test_a_frozen_engine_still_leaves_when_it_is_told_to() -> None:
    rule = {"what": "freeze", "when": {"request_id": "now"}}
    with _frontend() as frontend, serving(frontend, _faults(rule)) as stack:
        with pytest.raises(httpx.ReadTimeout):
            _post(stack, "now")
        stack.engine.send_signal(signal.SIGTERM)
        assert stack.engine.wait() == 0


def test_one_rank_freezes_and_the_other_one_serves() -> None:
    rule = {"what": {"fault": "freeze_rank", "for_s": 2}, "when": {"request_id": "now", "times": 1}}
    with _frontend(ranks=2) as frontend, serving(frontend, _faults(rule), "--engine-count=2") as stack:
        with pytest.raises(httpx.ReadTimeout):
            _post(stack, "now")
        served = 0
        for _ in range(4):
            try:
                served += _post(stack, "other", 0.3).status_code == httpx.codes.OK
            except httpx.ReadTimeout:
                continue
        assert served
        # What waited is served when the rank goes on.
        wait_until(lambda: [_ask(stack, f"late-{number}") for number in range(4)], [2, 2, 2, 2].__eq__, "replies")


def test_a_full_cache_shows_in_the_frontend_s_metrics_and_what_waited_goes_on() -> None:
    rule = {"what": {"fault": "kv_cache_full", "for_s": 3}, "when": {"request_id": "now"}}
    flags = ("--load-model=vllm", "--timing=per_request", "--itl-ms=50", _faults(rule))
    with (
        _frontend() as frontend,
        serving(frontend, *flags) as stack,
        stack.client() as client,
        ThreadPoolExecutor() as pool,
    ):
        # Something has to be said meanwhile, or the frontend hears of nothing.
        stream = client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=100, stream=True)
        next(iter(stream))
        waiting = pool.submit(_ask, stack, "now")
        stack.wait_for_metric("vllm:kv_cache_usage_perc", (1.0).__eq__)
        assert waiting.result() == 2
        stack.wait_for_metric("vllm:kv_cache_usage_perc", lambda usage: usage < 0.01)
        stream.close()


def test_a_lost_connection_comes_back_and_nothing_is_lost() -> None:
    rule = {"what": {"fault": "disconnect", "for_s": 1}, "when": {"request_id": "now"}}
    with _frontend() as frontend, serving(frontend, _faults(rule), "--itl-ms=50") as stack, stack.client() as client:
        stream = client.completions.create(
            model=MODEL_NAME, prompt="Hi", max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
        began = time.monotonic()
        assert _ask(stack, "now") == 2
        # Nothing came while there was no connection.
        assert time.monotonic() - began > 0.9
        *_, last = stream
        assert last.usage is not None
        assert last.usage.completion_tokens == 60
        assert _ask(stack, "after") == 2
        assert not stack.engine.logged("frontend lost")


def test_a_share_of_requests_fails_as_a_rule_says() -> None:
    rule = {"what": {"fault": "error", "retryable": True, "message": "overloaded"}, "when": {"every": 2}}
    with _frontend() as frontend, serving(frontend, _faults(rule)) as stack:
        statuses = [_post(stack, f"r{number}", 20.0).status_code for number in range(6)]
        assert statuses == [200, 503] * 3
