# SPDX-License-Identifier: Apache-2.0
"""Control routes of a real Rust frontend, and adapters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support import checks, control_checks
from tests.support.stack import MODEL, Stack, serving

pytestmark = pytest.mark.rust_frontend


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return control_checks.make_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, env=control_checks.ENVIRONMENT) as frontend,
        serving(frontend, *control_checks.ENGINE_FLAGS) as stack,
    ):
        yield stack


def test_routes_answer_as_with_a_real_engine(stack: Stack, adapters: Path) -> None:
    control_checks.routes_answer_as_with_a_real_engine(stack, control_checks.RUST, adapters)
    # Asked for by settings, and told by the engine.
    assert stack.get("/get_world_size").json() == {"world_size": 2}


@pytest.mark.parametrize(
    "check",
    [
        control_checks.kept_requests_go_on_when_resumed,
        control_checks.pause_waits_until_all_have_ended,
        control_checks.sleep_aborts_what_runs,
    ],
    ids=lambda check: check.__name__,
)
def test_requests_meet_pauses_and_sleep(stack: Stack, check: Callable[[Stack], None]) -> None:
    check(stack)


def test_adapters_are_told_of_while_they_run(stack: Stack, adapters: Path) -> None:
    control_checks.adapters_are_told_of_while_they_run(stack, adapters, is_waiting_told=True)


def test_slow_operations_take_their_time_and_keep_nobody_from_health(adapters: Path) -> None:
    flags = ("--sleep-ms=300", "--wake-up-ms=200", "--lora-load-ms=250", "--startup-ms=400", "--max-loras=1")
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, env=control_checks.ENVIRONMENT) as frontend,
        serving(frontend, *flags) as stack,
    ):
        assert stack.engine.wait_for("engine ready")["join_s"] >= 0.4
        lora = {"lora_name": "l1", "lora_path": str(adapters / "l1")}
        calls = [("/sleep", None, 0.3), ("/wake_up", None, 0.2), ("/v1/load_lora_adapter", lora, 0.25)]
        for path, asked, least_s in calls:
            response = httpx.post(f"{stack.url}{path}", json=asked, timeout=20)
            assert response.status_code == 200
            assert response.elapsed.total_seconds() >= least_s
            assert stack.get("/health").elapsed.total_seconds() < 0.2
        checks.completion(stack)


def test_next_frontend_finds_an_engine_that_is_not_paused() -> None:
    port, environment = free_port(), {"VLLM_SERVER_DEV_MODE": "1"}
    with EngineProcess(f"--handshake-address=tcp://127.0.0.1:{port}", "--rejoin-grace-s=0.2") as engine:
        for _ in range(2):
            with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, handshake_port=port, env=environment) as frontend:
                frontend.wait_healthy(besides=engine)
                stack = Stack(frontend, engine)
                assert stack.get("/is_sleeping").json() == {"is_sleeping": False}
                assert stack.get("/weight_info").json() == {"weight_version": "default"}
                checks.completion(stack)
                httpx.post(f"{stack.url}/update_weight_version", json={"new_version": "v2"}, timeout=20)
                httpx.post(f"{stack.url}/sleep?level=2", timeout=20)
                assert stack.get("/is_sleeping").json() == {"is_sleeping": True}
            engine.wait_for("frontend lost")
