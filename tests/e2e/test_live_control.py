# SPDX-License-Identifier: Apache-2.0
"""A running engine behind a real Rust frontend is asked about itself and changed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving, wait_until

pytestmark = pytest.mark.rust_frontend


@dataclass(frozen=True)
class Live:
    """A stack, and the admin port of its engine."""

    stack: Stack
    admin: httpx.Client

    def change(self, **settings: Any) -> httpx.Response:
        return self.admin.patch("/v1/settings", json=settings)

    def put(self, what: Any, name: str = "trial", **when: Any) -> httpx.Response:
        return self.admin.post("/v1/faults", json={"name": name, "what": what, "when": when})

    def ask(self, max_tokens: int = 3) -> Any:
        with self.stack.client() as client:
            return client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=max_tokens)

    def status(self, max_tokens: int = 3) -> int:
        """Return the status that a request gets."""
        body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": max_tokens}
        return httpx.post(f"{self.stack.url}/v1/completions", json=body, timeout=20, trust_env=False).status_code


@pytest.fixture(scope="module")
def whole() -> Iterator[Live]:
    port = free_port()
    flags = (f"--admin-port={port}", "--engine-count=2")
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, data_parallel_size=2)
    admin = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
    with frontend, admin, serving(frontend, *flags) as stack:
        yield Live(stack, admin)


@pytest.fixture
def live(whole: Live) -> Iterator[Live]:
    """The stack, as it is at the start of every test."""
    yield whole
    assert whole.admin.delete("/v1/faults").json() == []
    assert whole.change(itl_ms=None, ttft_ms=None, output_length=None, log_requests=None).status_code == 200
    for rank in range(2):
        assert whole.admin.post(f"/v1/engines/{rank}/rejoin").status_code == 200


def test_faults_are_switched_on_and_off_for_the_next_request(live: Live) -> None:
    assert live.status() == 200
    response = live.put({"fault": "error", "retryable": True}, probability=0.8)
    assert response.status_code == 200, response.text
    statuses = [live.status() for _ in range(50)]
    assert set(statuses) == {200, 503}
    assert 30 <= statuses.count(503) <= 48
    (state,) = live.admin.get("/v1/faults").json()
    assert state["struck"] == statuses.count(503)
    assert state["rule"] == {
        "name": "trial",
        "enabled": True,
        "when": {"probability": 0.8, "steered": False, "at_join": False},
        "what": {"fault": "error", "message": "the engine failed on purpose", "retryable": True, "after_tokens": 0},
    }
    assert live.admin.delete("/v1/faults/trial").json() == []
    assert [live.status() for _ in range(20)] == [200] * 20


def test_a_rule_is_let_strike(live: Live) -> None:
    live.put({"fault": "error", "retryable": True}, probability=0)
    assert live.status() == 200
    assert live.admin.post("/v1/faults/trial/fire").status_code == 202
    assert [live.status() for _ in range(3)] == [503, 200, 200]


def test_an_engine_freezes_until_its_rule_is_removed(live: Live) -> None:
    live.put("freeze")
    live.admin.post("/v1/faults/trial/fire")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(live.status)
        wait_until(lambda: live.admin.get("/health").status_code, (503).__eq__, "health")
        assert live.admin.get("/v1/requests").status_code == 503
        assert not waiting.done()
        live.admin.delete("/v1/faults/trial")
        assert waiting.result() == 200
    assert live.admin.get("/health").status_code == 200


def test_settings_change_for_the_next_step(live: Live) -> None:
    assert live.change(itl_ms=30).json()["itl_ms"] == 30
    began = time.monotonic()
    live.ask(max_tokens=11)
    assert time.monotonic() - began > 0.3
    with live.stack.client() as client:
        stream = client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=10_000, stream=True)
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
        assert live.change(itl_ms="0").status_code == 200
        assert sum(1 for _ in chunks) > 100
    assert [entry["changes"] for entry in live.stack.engine.logged("settings changed")][-2:] == [
        {"itl_ms": 30.0},
        {"itl_ms": 0.0},
    ]


def test_replies_and_logs_change(live: Live) -> None:
    assert live.change(output_length=2, log_requests=False).status_code == 200
    before = len(live.stack.engine.logged("request started"))
    reply = live.ask(max_tokens=50)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", 2)
    assert live.change(output_length=None, log_requests=True).status_code == 200
    assert live.ask(max_tokens=50).usage.completion_tokens == 50
    live.stack.engine.wait_for("request started", lambda entry: entry["max_tokens"] == 50)
    assert len(live.stack.engine.logged("request started")) == before + 1


def test_settings_that_are_wrong_are_refused_as_a_whole_with_all_that_is_wrong(live: Live) -> None:
    before = live.admin.get("/v1/settings").json()
    response = live.change(itl_ms=20, ttft_ms="soon", seed=5, itl_mss=3, max_num_seqs=100_000_000)
    assert response.status_code == 422
    detail = response.json()["detail"]
    assert len(detail) == 4, detail
    assert any("ttft_ms: soon is not allowed" in each for each in detail)
    assert "seed: it does not change while the engine runs (start the engine with it)" in detail
    assert any(each.startswith("itl_mss: there is no such setting (did you mean itl_ms?)") for each in detail)
    assert any(each.startswith("max_num_seqs") for each in detail)
    assert live.admin.get("/v1/settings").json() == before


def test_ranks_and_requests_are_shown(live: Live) -> None:
    live.change(itl_ms=50)
    with live.stack.client() as client:
        stream = client.completions.create(
            model=MODEL_NAME, prompt="Hi", max_tokens=500, stream=True, extra_headers={"X-Request-Id": "look-at-me"}
        )
        for _, _ in zip(range(3), stream, strict=False):
            pass
        (request,) = live.admin.get("/v1/requests").json()
        assert "look-at-me" in request["request_id"]
        assert (request["max_tokens"], request["client"]) == (500, 0)
        assert 2 <= request["output_tokens"] <= 100
        assert 0 < request["age_s"] < 20
        engines = live.admin.get("/v1/engines").json()
        assert [(each["engine"], each["running"]) for each in engines] == [
            (rank, int(rank == request["engine"])) for rank in range(2)
        ]
        stream.close()
    wait_until(lambda: live.admin.get("/v1/requests").json(), [].__eq__, "requests in flight")


def test_a_drained_rank_refuses_new_requests_and_finishes_what_runs(live: Live) -> None:
    live.change(itl_ms=50)
    with live.stack.client() as client:
        stream = client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=20, stream=True)
        next(iter(stream))
        for rank in range(2):
            assert live.admin.post(f"/v1/engines/{rank}/drain").json()["is_draining"] is True
        assert live.status() == 503
        assert sum(len(chunk.choices) for chunk in stream) >= 18
    live.admin.post("/v1/engines/0/rejoin")
    live.admin.post("/v1/engines/1/rejoin")
    assert live.status() == 200


def test_what_does_not_exist_is_told(live: Live) -> None:
    for path in ("/v1/faults/absent/fire", "/v1/engines/7/drain", "/v1/engines/7/crash"):
        response = live.admin.post(path)
        assert response.status_code == 404
        assert "there " in response.json()["detail"]
    assert live.admin.delete("/v1/faults/absent").status_code == 404


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"what": "explode"}, "what"),
        ({"what": "error", "when": {"probability": 2}}, "when.probability"),
        ({"what": "error", "when": {"prompt_contains": "a"}}, "takes tokenizer"),
        ({"what": "kv_cache_full"}, "takes load_model=vllm"),
        ([], "valid dictionary"),
    ],
)
def test_rules_that_are_wrong_are_refused(live: Live, rule: Any, problem: str) -> None:
    response = live.admin.post("/v1/faults", json=rule)
    assert response.status_code == 422
    assert any(problem in each for each in response.json()["detail"]), response.text
    assert live.admin.get("/v1/faults").json() == []


def test_what_is_too_large_is_not_read(live: Live) -> None:
    response = live.admin.post("/v1/faults", content=b" " * 2**20 + b"{}", headers={"Content-Type": "application/json"})
    assert response.status_code == 413


def test_settings_change_under_load_without_holding_steps_up(live: Live) -> None:
    live.change(itl_ms=5)
    with live.stack.client() as client, ThreadPoolExecutor() as pool:

        def gaps() -> list[float]:
            stream = client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=400, stream=True)
            return [later - earlier for earlier, later in pairwise([time.monotonic() for _ in stream])]

        reading = pool.submit(gaps)
        changes = 0
        while not reading.done():
            changes += 1
            assert live.change(itl_ms=5 + changes % 2).status_code == 200
    assert changes > 20
    # A busy machine has pauses of its own; a change that held steps up would do so in most of them.
    assert median(reading.result()) < 0.015


# From a shell.


def _ctl(live: Live, *words: str) -> tuple[int, Any, str]:
    flags = (f"--admin-port={live.admin.base_url.port}",)
    command = [sys.executable, "-m", "mockengine", "ctl", *flags, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_orders_from_a_shell(live: Live, tmp_path: Path) -> None:
    assert _ctl(live, "settings", "itl-ms=7", "output_length=3") == (0, {"itl_ms": 7.0, "output_length": "3"}, "")
    assert _ctl(live, "settings", "itl_ms=", "output_length=")[1] == {"itl_ms": 0.0, "output_length": "max_tokens"}
    assert _ctl(live, "settings")[1] == live.admin.get("/v1/settings").json()
    file = tmp_path / "faults.yaml"
    file.write_text(
        "- {name: a, what: {fault: error, retryable: true}, when: {nth: [2]}}\n- {what: hang, when: {lora: x}}\n"
    )
    code, states, _ = _ctl(live, "faults", "put", str(file))
    assert (code, [each["rule"]["name"] for each in states]) == (0, ["a", "hang"])
    assert [live.status() for _ in range(3)] == [200, 503, 200]
    assert _ctl(live, "faults", "fire", "a")[0] == 0
    assert [live.status() for _ in range(2)] == [503, 200]
    assert _ctl(live, "faults")[1][0]["struck"] == 2
    assert len(_ctl(live, "faults", "remove", "hang")[1]) == 1
    assert _ctl(live, "faults", "clear")[1] == []
    assert [each["engine"] for each in _ctl(live, "engines")[1]] == [0, 1]
    assert _ctl(live, "requests")[1] == []
    assert _ctl(live, "drain", "1")[1]["is_draining"] is True
    assert _ctl(live, "rejoin", "1")[1]["is_draining"] is False


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "there is no order '' (use settings, faults,"),
        (["explode"], 2, "there is no order 'explode'"),
        (["settings", "itl_ms"], 2, "itl_ms: a change is NAME=VALUE"),
        (["settings", "itl_ms=soon", "seed=1"], 1, "the engine refuses:\n  seed: it does not change"),
        (["faults", "put", '[{"what": "explode"}]'], 2, "no fault has that name"),
        (["faults", "put", "absent.yaml"], 2, "absent.yaml: No such file"),
        (["faults", "fire", "absent"], 1, "there is no rule absent (there is none)"),
        (["faults", "explode"], 2, "faults takes nothing, put RULES"),
        (["drain", "x"], 2, "drain takes the number of a rank"),
        (["drain", "9"], 1, "there is no rank 9 here (there are 0, 1)"),
        (["crash"], 2, "crash takes the number of a rank"),
        (["engines", "1"], 2, "1: not expected here"),
    ],
)
def test_orders_that_are_wrong_are_explained(live: Live, words: list[str], code: int, said: str) -> None:
    got, answer, stderr = _ctl(live, *words)
    assert (got, answer) == (code, None)
    assert said in stderr


def test_a_scenario_changes_the_engine_and_leaves_it_as_it_was(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    rule = "{name: trial, what: {fault: error, retryable: true}}"
    steps = (f"- {{at_s: 0, faults: [{rule}]}}", "- {at_s: 30, settings: {itl_ms: 1}}")
    file.write_text("\n".join(["about: All fails.", "steps:", *steps]))
    command = [sys.executable, "-m", "mockengine", "scenario", f"--admin-port={live.admin.base_url.port}", str(file)]
    before = live.admin.get("/v1/settings").json()
    with subprocess.Popen([*command, "--speed", "10"], stderr=subprocess.PIPE, text=True) as running:
        wait_until(live.status, (503).__eq__, "the status of a request")
        _, said = running.communicate(timeout=60)
    assert running.returncode == 0
    assert said.splitlines() == ["[1/2]     0.0 s  +trial (error)", "[2/2]    30.0 s  itl_ms=1"]
    assert live.status() == 200
    assert live.admin.get("/v1/settings").json() == before


def test_an_engine_that_does_not_answer_is_told() -> None:
    command = [sys.executable, "-m", "mockengine", "ctl", f"--admin-port={free_port()}", "engines"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "does not answer: Connection refused" in done.stderr) == (1, True)


# Who may.


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[RustFrontend, str]]:
    port = free_port()
    with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend:
        flags = (f"--admin-port={port}", "--admin-host=0.0.0.0", "--admin-token=secret-enough")
        with serving(frontend, *flags):
            yield frontend, f"http://127.0.0.1:{port}"


def test_changes_take_the_token_and_questions_do_not(guarded: tuple[RustFrontend, str]) -> None:
    _, url = guarded
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-enough"}):
        response = httpx.patch(f"{url}/v1/settings", json={"itl_ms": 1}, headers=headers, trust_env=False)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    response = httpx.get(f"{url}/v1/settings", trust_env=False)
    assert response.status_code == 200
    assert "secret-enough" not in response.text
    headers = {"Authorization": "Bearer secret-enough"}
    assert httpx.patch(f"{url}/v1/settings", json={"itl_ms": 1}, headers=headers, trust_env=False).status_code == 200


@pytest.mark.parametrize(("flags", "status"), [((), 403), (("--admin-insecure",), 200)])
def test_beyond_this_machine_nobody_changes_anything_without_a_token(flags: tuple[str, ...], status: int) -> None:
    port = free_port()
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL)
    with frontend, serving(frontend, f"--admin-port={port}", "--admin-host=0.0.0.0", *flags):
        url = f"http://127.0.0.1:{port}"
        for method, path in (("PATCH", "/v1/settings"), ("DELETE", "/v1/faults"), ("POST", "/v1/engines/0/drain")):
            body = {"itl_ms": 1} if method == "PATCH" else None
            assert httpx.request(method, url + path, json=body, trust_env=False).status_code == status
        assert httpx.get(f"{url}/v1/engines", trust_env=False).status_code == 200


def test_pages_of_others_change_nothing(live: Live) -> None:
    for headers in ({"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}, {"Origin": "null"}):
        assert live.admin.post("/v1/engines/0/drain", headers=headers).status_code == 403
    own = {"Origin": str(live.admin.base_url).rstrip("/")}
    assert live.admin.post("/v1/engines/0/rejoin", headers=own).status_code == 200


@pytest.mark.parametrize("how", ["engines/0/crash", "faults/end/fire"])
def test_a_rank_is_told_to_crash(how: str) -> None:
    port = free_port()
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL)
    with frontend, serving(frontend, f"--admin-port={port}") as stack:
        url = f"http://127.0.0.1:{port}/v1/"
        rule = {"name": "end", "when": {"probability": 0}, "what": {"fault": "crash", "exit_code": 7}}
        assert httpx.post(url + "faults", json=rule, trust_env=False).status_code == 200
        assert httpx.post(url + how, json={"exit_code": 7}, trust_env=False).status_code == 202
        assert stack.engine.wait() == 7
        with stack.client() as client, pytest.raises(openai.InternalServerError):
            client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=1)
