# SPDX-License-Identifier: Apache-2.0
"""The load model behind a real Python frontend."""

from collections.abc import Callable, Iterator

import pytest

from mockengine.testing.frontends import PythonFrontend
from tests.support import load_checks, transfer_checks
from tests.support.load import fleet
from tests.support.load_checks import Fleet
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def python_fleet() -> Iterator[Fleet]:
    executable = python_frontend(report=print)

    def start(size: int) -> PythonFrontend:
        return PythonFrontend(
            executable,
            MODEL,
            data_parallel_size=size,
            api_server_count=1,
            extra_args=transfer_checks.FRONTEND_ARGS,
        )

    with fleet(start, load_checks.ENGINES | transfer_checks.ENGINES) as ranks:
        yield ranks


@pytest.mark.parametrize("check", load_checks.ALL, ids=lambda check: check.__name__)
def test_load(python_fleet: Fleet, check: Callable[[Fleet], None]) -> None:
    check(python_fleet)


@pytest.mark.parametrize("check", transfer_checks.ALL, ids=lambda check: check.__name__)
def test_transfers(python_fleet: Fleet, check: Callable[[Fleet], None]) -> None:
    check(python_fleet)
