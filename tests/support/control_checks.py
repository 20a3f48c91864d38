# SPDX-License-Identifier: Apache-2.0
"""The control routes of a real frontend: what they answer with a real engine behind it, and what requests meet.

`CONVERSATION` was had, but for what concerns workers, with vLLM's own engine core behind frontends of 0.33.0 (Rust) and
0.32.0 (Python); its answers are those.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.stack import DEADLINE_S, MODEL_NAME, Stack, wait_until

RUST, PYTHON = "rust", "python"
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": "/",
}
ENGINE_FLAGS: Final = (
    "--load-model=vllm",
    "--timing=step",
    "--step-base-ms=10",
    "--max-loras=1",
    "--max-cpu-loras=2",
    "--check-lora-paths",
    "--weight-transfer-backend=nccl",
    "--world-size=2",
)
_LONG_S: Final = 0.5
"""In this time a request of some tokens is served, if it is."""
_LORA_INFO: Final = re.compile(r"^vllm:lora_requests_info\{(?P<labels>.*)\} (?P<at>\S+)$")
_RPC: Final = "Call to collective_rpc method failed: "
_RELEASE: Final = "Call to release_kv_cache_memory method failed: release_kv_cache_memory() requires "


@dataclass(frozen=True)
class Exchange:
    """A call of a route and its answer.

    Attributes:
        asked: the body, or None.
        status: of the answer.
        answered: the whole JSON, text within the body, or None where it is of no interest.
        only: with which frontend; None is both.

    """

    method: str
    path: str
    status: int = 200
    answered: object = None
    asked: object = None
    only: str | None = None


def _get(path: str, answered: object) -> Exchange:
    return Exchange("GET", path, 200, answered)


def _post(path: str, answered: object = None, asked: object = None, only: str | None = None) -> Exchange:
    return Exchange("POST", path, 200, answered, asked, only)


def _fails(path: str, reason: str, asked: object = None) -> Exchange:
    return Exchange("POST", path, 500, reason, asked)


def _completion(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Hello there", "max_tokens": 2}


_PAUSES: Final = (
    _get("/is_paused", {"is_paused": False}),
    _get("/is_sleeping", {"is_sleeping": False}),
    _post("/pause", {"status": "paused"}),
    _get("/is_paused", {"is_paused": True}),
    _get("/is_sleeping", {"is_sleeping": True}),
    Exchange(
        "POST",
        "/v1/completions",
        503,
        "Generation is paused. Please retry after it resumes.",
        _completion(MODEL_NAME),
        only=RUST,
    ),
    _post("/resume", {"status": "resumed"}),
    _get("/is_paused", {"is_paused": False}),
    _post("/resume", {"status": "resumed"}),
    *(_post(f"/pause?mode={mode}", {"status": "paused"}) for mode in ("wait", "keep", "abort")),
    _post("/resume", {"status": "resumed"}),
    Exchange("POST", "/pause?mode=bogus", 400, "mode"),
    _post("/v1/completions", asked=_completion(MODEL_NAME)),
)
_SLEEPS: Final = (
    _post("/sleep?level=1", {"status": "sleeping", "level": 1}),
    _get("/is_sleeping", {"is_sleeping": True}),
    _get("/is_paused", {"is_paused": True}),
    _fails("/release_kv_cache_memory", f"{_RELEASE}all executor memory to be resident"),
    _post("/wake_up?tags=weights", {"status": "sleeping", "tags": ["weights"]}),
    _get("/is_sleeping", {"is_sleeping": True}),
    _post("/wake_up", {"status": "awake", "tags": None}),
    _get("/is_sleeping", {"is_sleeping": False}),
    _fails("/release_kv_cache_memory", f"{_RELEASE}a completed pause first"),
    _post("/pause?mode=keep", {"status": "paused"}),
    _post("/release_kv_cache_memory", {"status": "kv_cache_released"}),
    _post("/resume", {"status": "resumed"}),
    _get("/is_sleeping", {"is_sleeping": True}),
    _post("/wake_up?tags=kv_cache", {"status": "awake", "tags": ["kv_cache"]}),
    _post("/sleep?level=0", {"status": "sleeping", "level": 0}),
    _post("/wake_up?tags=scheduling", {"status": "awake", "tags": ["scheduling"]}),
    _post("/sleep?level=2&mode=wait", {"status": "sleeping", "level": 2}),
    _post("/sleep?level=1", {"status": "sleeping", "level": 1}),
    _post("/wake_up", {"status": "awake", "tags": None}),
    _get("/is_sleeping", {"is_sleeping": False}),
    _post("/v1/completions", asked=_completion(MODEL_NAME)),
)
_CACHES: Final = (
    _post("/reset_prefix_cache", {"success": True}),
    _post("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {"success": True}),
    _post("/reset_mm_cache"),
    _post("/reset_encoder_cache"),
)
_WEIGHTS: Final = (
    _post("/collective_rpc", {"results": [None, None]}, {"method": "anything"}),
    _get("/weight_info", {"weight_version": "default"}),
    _post("/update_weight_version", {"success": True, "new_version": "v2"}, {"new_version": "v2"}),
    _get("/weight_info", {"weight_version": "v2"}),
    _fails("/finish_weight_update", f"{_RPC}finish_weight_update called without a matching start_weight_update."),
    _post("/init_weight_transfer_engine", {"message": "Weight transfer initialized"}, {"init_info": {}}),
    _fails(
        "/update_weights",
        f"{_RPC}start_weight_update must be called before update_weights.",
        {"update_info": {}},
    ),
    _post("/start_weight_update", {"message": "Weight update started"}),
    _fails("/start_weight_update", f"{_RPC}start_weight_update called while a weight update is already active."),
    _fails("/start_draft_weight_update", f"{_RPC}start_weight_update called while a weight update is already active."),
    _post("/update_weights", {"message": "Weights updated"}, {"update_info": {"names": []}}),
    _post("/finish_weight_update", {"message": "Weight update finished"}, {"weight_version": "v3"}),
    _get("/weight_info", {"weight_version": "v3"}),
    _post("/shutdown_weight_transfer_engine", {"message": "Weight transfer shut down"}),
    _post("/weight_checker", "dp0:pp0:pcp0:tp1:lm_head.weight", {"action": "checksum"}),
    _post("/weight_checker", {"status": "reset"}, {"action": "reset"}),
)


def _adapters(folder: Path) -> Iterator[Exchange]:
    """Yield what becomes of adapters: `l1` and `l2` are in the folder, and another folder is empty."""

    def loads(name: str) -> dict[str, str]:
        return {"lora_name": name, "lora_path": str(folder / name)}

    # A Python frontend does not tell clients of paths.
    not_found = "Loading lora empty failed: No adapter found for "
    yield Exchange("POST", "/v1/completions", 404, "l1", _completion("l1"))
    yield _post("/v1/load_lora_adapter", "Success: LoRA adapter 'l1' added successfully.", loads("l1"))
    yield _post("/v1/completions", asked=_completion("l1"))
    yield Exchange("POST", "/v1/load_lora_adapter", 500, not_found, loads("empty"), only=RUST)
    yield Exchange("POST", "/v1/load_lora_adapter", 404, not_found, loads("empty"), only=PYTHON)
    yield _post("/v1/load_lora_adapter", "Success: LoRA adapter 'l2' added successfully.", loads("l2"))
    yield _post("/v1/completions", asked=_completion("l2"))
    yield _post("/v1/unload_lora_adapter", "Success: LoRA adapter 'l1' removed successfully.", {"lora_name": "l1"})
    yield Exchange("POST", "/v1/completions", 404, "l1", _completion("l1"))
    yield Exchange("POST", "/v1/unload_lora_adapter", 404, "l1", {"lora_name": "l1"})
    yield _post("/v1/completions", asked=_completion(MODEL_NAME))


def make_adapters(folder: Path) -> Path:
    """Put adapters `l1` and `l2` and an empty folder there."""
    for name in ("l1", "l2", "empty"):
        (folder / name).mkdir()
        if name != "empty":
            (folder / name / "adapter_config.json").write_text("{}")
    return folder


def routes_answer_as_with_a_real_engine(stack: Stack, frontend: str, adapters: Path) -> None:
    conversation: Sequence[Exchange] = [*_PAUSES, *_SLEEPS, *_CACHES, *_WEIGHTS, *_adapters(adapters)]
    for exchange in conversation:
        if exchange.only in (None, frontend):
            response = _say(stack, exchange.method, exchange.path, exchange.asked)
            told = f"{exchange.method} {exchange.path} {exchange.asked}: {response.status_code} {response.text}"
            assert response.status_code == exchange.status, told
            if isinstance(exchange.answered, str):
                assert exchange.answered in response.text, told
            elif exchange.answered is not None:
                assert response.json() == exchange.answered, told
    _is_drained(stack)


def kept_requests_go_on_when_resumed(stack: Stack) -> None:
    """Pause and keep, ask for more, resume: all of it is served, and nothing is left."""
    with _asking(stack) as ask:
        running = ask(MODEL_NAME, 100)
        stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 1)
        assert _say(stack, "POST", "/pause?mode=keep&clear_cache=false").status_code == 200
        said = stack.metric("vllm:generation_tokens_total")
        waiting = ask(MODEL_NAME, 10)
        assert not wait([running, waiting], _LONG_S).done
        assert _say(stack, "GET", "/is_paused").json() == {"is_paused": True}
        assert stack.metric("vllm:generation_tokens_total") - said <= 2
        assert _say(stack, "POST", "/resume").status_code == 200
        assert [_tokens(each) for each in (running, waiting)] == [100, 10]
    _is_drained(stack)


def pause_waits_until_all_have_ended(stack: Stack) -> None:
    with _asking(stack) as ask:
        running = ask(MODEL_NAME, 100)
        stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 1)
        assert _say(stack, "POST", "/pause?mode=wait").status_code == 200
        assert stack.metric("vllm:num_requests_running") == 0
        assert _tokens(running) == 100
        assert _say(stack, "POST", "/resume").status_code == 200
    _is_drained(stack)


def sleep_aborts_what_runs(stack: Stack) -> None:
    with _asking(stack) as ask:
        running = ask(MODEL_NAME, 10_000)
        stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 1)
        assert _say(stack, "POST", "/sleep?level=1").status_code == 200
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"
        waiting = ask(MODEL_NAME, 10)
        assert _say(stack, "POST", "/wake_up").json()["status"] == "awake"
        assert _tokens(waiting) == 10
    _is_drained(stack)


def adapters_are_told_of_while_they_run(stack: Stack, adapters: Path, *, is_waiting_told: bool) -> None:
    """One slot, two adapters: the second one waits, runs, and then there is none.

    A Python frontend hears of a request with its first output only, and lists an adapter that runs as waiting too.
    """
    for name in ("l1", "l2"):
        _say(stack, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapters / name)})
    with _asking(stack) as ask:
        first = ask("l1", 150)
        wait_until(lambda: _adapters_told(stack)[0], lambda told: told == "l1", "the adapter that runs")
        second = ask("l2", 100)
        if is_waiting_told:
            wait_until(lambda: _adapters_told(stack), lambda told: told == ("l1", "l2"), "adapters that run and wait")
        else:
            stack.wait_for_metric("vllm:num_requests_waiting", lambda value: value == 1)
        assert not first.done()
        wait_until(lambda: _adapters_told(stack)[0], lambda told: told == "l2", "the adapter that runs")
        assert first.done() or _tokens(first) == 150
        assert _tokens(second) == 100
    wait_until(lambda: _adapters_told(stack), lambda told: told == ("", ""), "adapters")
    _is_drained(stack)


@contextmanager
def _asking(stack: Stack) -> Iterator[Any]:
    """Yield a function that asks for so many tokens of a model and returns the future response."""
    with ThreadPoolExecutor() as pool:

        def ask(model: str, tokens: int) -> Future[httpx.Response]:
            asked = {"model": model, "prompt": "Hello there", "max_tokens": tokens, "ignore_eos": True}
            return pool.submit(_say, stack, "POST", "/v1/completions", asked)

        yield ask


def _say(stack: Stack, method: str, path: str, asked: object = None) -> httpx.Response:
    return httpx.request(method, f"{stack.url}{path}", json=asked, timeout=DEADLINE_S)


def _tokens(response: Future[httpx.Response]) -> int:
    answered = response.result()
    assert answered.status_code == 200, answered.text
    return int(answered.json()["usage"]["completion_tokens"])


def _is_drained(stack: Stack) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        stack.wait_for_metric(name, lambda value: value == 0)


def _adapters_told(stack: Stack) -> tuple[str, str]:
    """Return which adapters run and wait, as the series says that was written last."""
    found = [match for line in stack.get("/metrics").text.splitlines() if (match := _LORA_INFO.match(line))]
    if not found:
        return "", ""
    labels = dict(re.findall(r'(\w+)="([^"]*)"', max(found, key=lambda match: float(match["at"]))["labels"]))
    return labels["running_lora_adapters"], labels["waiting_lora_adapters"]
