# SPDX-License-Identifier: Apache-2.0
"""The admin port under requests that are made to break it, out of its own description."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support.stack import MODEL, MODEL_NAME, serving

pytestmark = [pytest.mark.security, pytest.mark.timeout(300)]

# Not: what conforms to a schema may contradict itself, "1" is taken for 1, and methods are told route by route.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    "response_headers_conformance",
)
EXAMPLES = 60
MOST_GROWTH_KB = 40_000


def test_whatever_is_asked_is_answered_as_described_and_costs_nothing_else() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, f"--admin-port={port}") as stack,
    ):
        before = _resident_kb(stack.engine.process.pid)
        command = [
            *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"),
            # It would end the engine.
            *("--exclude-path-regex", "crash"),
            *("--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES), "--seed", "1"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-5_000:]
        assert stack.engine.process.poll() is None
        assert [entry for entry in stack.engine.log if entry["level"] == "error"] == []
        httpx.delete(f"{url}/v1/faults", trust_env=False)
        httpx.post(f"{url}/v1/engines/0/rejoin", trust_env=False)
        body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=20, trust_env=False)
        assert answer.status_code == httpx.codes.OK
        assert _resident_kb(stack.engine.process.pid) - before < MOST_GROWTH_KB


def _resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
