# SPDX-License-Identifier: Apache-2.0
"""Control routes of the real Python frontend, and adapters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mockengine.testing.frontends import PythonFrontend
from tests.support import control_checks
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL, Stack, serving

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return control_checks.make_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    python, flags = python_frontend(report=print), ["--enable-lora", "--max-loras", "1"]
    with (
        PythonFrontend(python, MODEL, env=control_checks.ENVIRONMENT, extra_args=flags) as frontend,
        serving(frontend, *control_checks.ENGINE_FLAGS) as stack,
    ):
        yield stack


def test_routes_answer_as_with_a_real_engine(stack: Stack, adapters: Path) -> None:
    control_checks.routes_answer_as_with_a_real_engine(stack, control_checks.PYTHON, adapters)


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
    control_checks.adapters_are_told_of_while_they_run(stack, adapters, is_waiting_told=False)
