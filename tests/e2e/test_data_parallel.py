# SPDX-License-Identifier: Apache-2.0
"""Many ranks behind a real Rust frontend, one that comes late, and one that is killed."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import Frontend, RustFrontend
from tests.support.stack import MODEL, MODEL_NAME, serving

pytestmark = pytest.mark.rust_frontend

MOST_RANKS = 64


def _status(frontend: Frontend, rank: int, deadline_s: float = 20.0) -> int:
    body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
    headers = {"X-data-parallel-rank": str(rank)}
    url = f"{frontend.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=deadline_s, trust_env=False).status_code


def test_as_many_ranks_as_a_process_may_have_serve_and_cost_nothing_while_idle() -> None:
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, data_parallel_size=MOST_RANKS)
    with frontend, serving(frontend, f"--engine-count={MOST_RANKS}") as stack:
        with ThreadPoolExecutor(16) as pool:
            statuses = list(pool.map(lambda number: _status(frontend, number % MOST_RANKS), range(3 * MOST_RANKS)))
        assert statuses == [200] * 3 * MOST_RANKS
        started = Counter(entry["engine"] for entry in stack.engine.logged("request started"))
        assert started == dict.fromkeys(range(MOST_RANKS), 3)
        before = _cpu_ticks(stack.engine)
        time.sleep(1.0)
        assert _cpu_ticks(stack.engine) - before <= 2


def _cpu_ticks(engine: EngineProcess) -> int:
    """Return the CPU time of a process so far, in hundredths of a second."""
    with open(f"/proc/{engine.process.pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 - it is no file of a disk
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_rank_comes_late_and_is_killed_and_the_other_one_goes_on() -> None:
    with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, data_parallel_size=2) as frontend:
        flags = (f"--handshake-address={frontend.handshake_address}", "--data-parallel-size=2")
        with EngineProcess(*flags, "--start-rank=0") as first:
            first.wait_for("engine ready")
            assert not frontend.is_healthy
            with EngineProcess(*flags, "--start-rank=1") as late:
                frontend.wait_healthy(besides=late)
                assert [_status(frontend, rank) for rank in range(2)] == [200, 200]
                late.kill()
            with pytest.raises(httpx.ReadTimeout):
                _status(frontend, 1, deadline_s=0.5)
            assert _status(frontend, 0) == 200
            assert frontend.is_healthy
