# SPDX-License-Identifier: Apache-2.0
"""Whatever dies, the stack of docker-compose.yml serves again by itself, and says so while it does not."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.compose import STREAM_ITL_MS, Project, Stream, project
from tests.support.docker import docker
from tests.support.stack import wait_until

pytestmark = pytest.mark.containers

NOTICED_WITHIN_S = 15.0
"""How long the frontend may call itself healthy without an engine: until the engine starts again, which tells it."""

CHECKS_LATER = 2
"""So many health checks more must a healed stack pass: its frontend's are what would take it down again."""

Disturbance = Callable[[Project], object]


@pytest.fixture(scope="module")
def running(engine_image: str, frontend_image: str) -> Iterator[Project]:  # noqa: ARG001 - they must be there
    """One stack for all: each test leaves it as it found it, serving."""
    with project(MOCKENGINE_ITL_MS=STREAM_ITL_MS) as stack:
        stack.up()
        yield stack


@pytest.fixture
def stack(running: Project) -> Iterator[Project]:
    """The stack, which serves; after the test it must do so again, and stay so."""
    running.wait_until_it_serves()
    yield running
    running.wait_until_it_serves()
    healed = _starts_and_joins(running)
    _wait_for_health_checks(running)
    assert running.serves()
    assert _starts_and_joins(running) == healed


def _starts_and_joins(stack: Project) -> tuple[str, str, int]:
    """When each container was started last, and how many frontends the engine has joined so far."""
    engine, frontend = stack.container("engine"), stack.container("frontend")
    return engine.state["StartedAt"], frontend.state["StartedAt"], _count(stack, "engine ready")


def _count(stack: Project, event: str) -> int:
    """How often the engine has logged this, in all its lives."""
    return len([entry for entry in stack.container("engine").json_log() if entry["event"] == event])


def _wait_for_health_checks(stack: Project) -> None:
    """Wait until the frontend's health has been checked twice more, from now on."""

    def begins() -> set[str]:
        return {check["Start"] for check in stack.container("frontend").state["Health"]["Log"]}

    before = begins()
    wait_until(begins, lambda now: len(now - before) >= CHECKS_LATER, "frontend's health checks")


def _restart(*services: str) -> Disturbance:
    return lambda stack: [docker("restart", stack.container(service).name) for service in services]


def _kill(*services: str) -> Disturbance:
    return lambda stack: stack.kill(*services)


@pytest.mark.parametrize(
    "disturb",
    [
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


def test_the_same_frontend_goes_on_after_its_engine_was_killed(stack: Project) -> None:
    before, resumed = stack.container("frontend").state["StartedAt"], _count(stack, "engine resumed")

    stack.kill("engine")

    wait_until(lambda: _count(stack, "engine resumed"), lambda count: count == resumed + 1, "how often it was resumed")
    stack.wait_until_it_serves()
    assert stack.container("frontend").state["StartedAt"] == before


def test_a_stream_that_loses_its_engine_ends(stack: Project) -> None:
    stream = Stream(stack.client())

    stack.kill("engine")

    assert stream.ending(NOTICED_WITHIN_S) == "APIError"


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

        frontend = stack.container("frontend")

        stack.kill("engine-2")

        def is_resumed() -> bool:
            return any(entry["event"] == "engine resumed" for entry in stack.container("engine-2").json_log())

        wait_until(is_resumed, bool, "whether the other engine's successor goes on")
        assert [stack.ask_rank(rank) for rank in range(4)] == [200] * 4
        assert stack.container("frontend").state["StartedAt"] == frontend.state["StartedAt"]
