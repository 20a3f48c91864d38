# SPDX-License-Identifier: Apache-2.0
"""Whatever dies, the stack of docker-compose.yml serves again by itself, and says so while it does not."""

import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from tests.support.compose import MODEL_NAME, Project, project
from tests.support.docker import docker
from tests.support.stack import wait_until

pytestmark = pytest.mark.containers

NOTICED_WITHIN_S = 15.0
"""How long the frontend may call itself healthy without an engine: until the engine starts again, which tells it."""

Disturbance = Callable[[Project], object]


@pytest.fixture(scope="module")
def running(engine_image: str, frontend_image: str) -> Iterator[Project]:  # noqa: ARG001 - they must be there
    """One stack for all: each test leaves it as it found it, serving."""
    with project() as stack:
        stack.up()
        yield stack


@pytest.fixture
def stack(running: Project) -> Project:
    running.wait_until_it_serves()
    return running


def _restart(*services: str) -> Disturbance:
    return lambda stack: [docker("restart", stack.container(service).name) for service in services]


def _kill(*services: str) -> Disturbance:
    return lambda stack: stack.kill(*services)


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(_kill("engine"), id="engine killed"),
        pytest.param(_kill("frontend"), id="frontend killed"),
        pytest.param(_kill("engine", "frontend"), id="engine killed, then frontend"),
        pytest.param(_kill("frontend", "engine"), id="frontend killed, then engine"),
        pytest.param(_restart("engine"), id="engine restarted"),
        pytest.param(_restart("frontend"), id="frontend restarted"),
        pytest.param(_restart("engine", "frontend"), id="engine restarted, then frontend"),
        pytest.param(_restart("frontend", "engine"), id="frontend restarted, then engine"),
    ],
)
def test_it_serves_again_with_a_frontend_begun_anew(stack: Project, disturb: Disturbance) -> None:
    before = stack.container("frontend").state["StartedAt"]

    disturb(stack)

    begin = time.monotonic()
    wait_until(lambda: stack.container("frontend").state["StartedAt"], lambda now: now != before, "frontend's start")
    assert time.monotonic() - begin < NOTICED_WITHIN_S
    stack.wait_until_it_serves()
    # It stays so: nothing that came late takes it down again.
    assert all(stack.serves() for _ in range(5))


def test_the_frontend_does_not_call_itself_healthy_for_long_without_its_engine(stack: Project) -> None:
    stack.kill("engine")

    begin = time.monotonic()
    wait_until(stack.health, lambda status: status != 200, "health")
    assert time.monotonic() - begin < NOTICED_WITHIN_S
    log = stack.container("engine").json_log()
    stack.wait_until_it_serves()
    assert any("abandoned" in entry["event"] for entry in log)


def test_a_stream_that_loses_its_engine_ends(stack: Project) -> None:
    started = threading.Event()
    ended: list[str] = []

    def read() -> None:
        try:
            for _ in stack.client().completions.create(
                model=MODEL_NAME, prompt="Hello", max_tokens=30_000, stream=True, timeout=60
            ):
                started.set()
            ended.append("in full")
        except (openai.OpenAIError, httpx.HTTPError) as error:
            ended.append(type(error).__name__)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert started.wait(10)

    stack.kill("engine")

    reader.join(NOTICED_WITHIN_S)
    assert ended != []
    assert ended != ["in full"], "the engine was killed too late to show anything"


def test_a_container_that_was_stopped_by_hand_stays_so_until_it_is_started(stack: Project) -> None:
    stack.compose("stop", "engine")
    assert stack.exit_codes("engine") == {"engine": 0}
    wait_until(stack.health, lambda status: status != 200, "health")

    stack.compose("start", "engine")

    stack.wait_until_it_serves()


@pytest.mark.usefixtures("engine_image", "frontend_image")
def test_one_of_two_engines_killed() -> None:
    with project("scale") as stack:
        stack.up()

        stack.kill("engine-2")

        wait_until(stack.health, lambda status: status != 200, "health")
        stack.wait_until_it_serves()
        assert [stack.ask_rank(rank) for rank in range(4)] == [200] * 4
