# SPDX-License-Identifier: Apache-2.0
"""The Python frontend's environment: what goes into it, and when it is built."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import python_frontend
from tests.support.python_frontend import EnvironmentBuildError


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every environment that was built; building is only making a folder."""
    environments = list[Path]()

    def build(environment: Path, _report: Callable[[str], None]) -> None:
        environment.mkdir()
        environments.append(environment)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(python_frontend, "_build", build)
    return environments


def test_an_environment_is_built_once(built: list[Path]) -> None:
    python = python_frontend.python_frontend()
    assert python_frontend.python_frontend() == python
    assert [environment / "bin" / "python" for environment in built] == [python]


def test_an_interrupted_build_is_begun_anew(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(environment: Path, _report: Callable[[str], None]) -> None:
        environment.mkdir()
        (environment / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(python_frontend, "_build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            python_frontend.python_frontend()
    environment = python_frontend.python_frontend().parent.parent
    assert built == [environment]
    assert not (environment / "half").exists()


def test_another_recipe_is_another_environment(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    python_frontend.python_frontend()
    monkeypatch.setattr(python_frontend, "_REVISION", 1_000)
    python_frontend.python_frontend()
    assert len(set(built)) == 2


def test_requirements_are_those_of_this_platform_without_what_only_engines_need() -> None:
    declared = [
        "regex",
        "transformers<5.20.0,>=5.16.1",
        "mistral_common[image]>=1.11.6",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "intel_openmp==2024.2.1",
        "numba==0.65.0; python_version < '3'",
        "protobuf>=5.29.6; python_version >= '3'",
        "pandas; extra == 'bench'",
    ]
    assert python_frontend.select_requirements(declared) == [
        "regex",
        "transformers<5.20.0,>=5.16.1",
        "mistral_common[image]>=1.11.6",
        "protobuf>=5.29.6",
    ]


def test_a_failed_step_names_its_command_and_the_end_of_its_output() -> None:
    command = [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"]
    with pytest.raises(EnvironmentBuildError, match=r"exit code 3 from `.*\n?.*` while building") as failure:
        python_frontend._run(command)
    assert str(failure.value).endswith("what went wrong")
