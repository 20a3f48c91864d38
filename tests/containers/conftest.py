# SPDX-License-Identifier: Apache-2.0
"""Real images on a real Docker engine; both are built once, before the first test that needs them."""

from pathlib import Path

import pytest

from tests.support.docker import NoEngineError, build_engine_image, build_frontend_image, check_engine

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a test's time begin when the images are there: to build them takes minutes where nothing is cached."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(func_only=True))


@pytest.fixture(scope="session", autouse=True)
def docker_engine() -> None:
    """A Docker engine, without which no test here can run, and none may pass."""
    try:
        check_engine()
    except NoEngineError as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def engine_image(docker_engine: None) -> str:  # noqa: ARG001 - its order
    """The name of the engine's image."""
    return build_engine_image()


@pytest.fixture(scope="session")
def frontend_image(docker_engine: None) -> str:  # noqa: ARG001 - its order
    """The name of the frontend's image."""
    return build_frontend_image()
