# SPDX-License-Identifier: Apache-2.0
"""What the images are built from is pinned, and the same versions are written everywhere."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mockengine import __version__
from mockengine.testing.fetch import DEFAULT_VERSION

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
BUILD_LOCK = ROOT / "requirements-build.lock"
BOTH = pytest.mark.parametrize("lock", [LOCK, BUILD_LOCK], ids=lambda path: path.name)

PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9][0-9a-z.]*)")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _entries(lock: Path) -> list[list[str]]:
    """Return each entry's words: what is pinned, then its hashes. A word that is neither stays, to be found."""
    text = "\n".join(line for line in lock.read_text().splitlines() if not line.lstrip().startswith("#"))
    return [line.split() for line in text.replace("\\\n", " ").splitlines()]


def _pins(lock: Path) -> dict[str, str]:
    pins = [PIN.fullmatch(entry[0]) for entry in _entries(lock)]
    return {pin["name"]: pin["version"] for pin in pins if pin is not None}


@BOTH
def test_every_entry_is_one_version_with_hashes_and_nothing_else(lock: Path) -> None:
    entries = _entries(lock)
    assert len(entries) >= 5
    for pin, *hashes in entries:
        assert PIN.fullmatch(pin), pin
        assert hashes, pin
        assert [word for word in hashes if not HASH.fullmatch(word)] == [], pin
    assert len(_pins(lock)) == len(entries)


@BOTH
def test_a_lock_names_no_package_index(lock: Path) -> None:
    text = lock.read_text()
    assert [
        word for word in ("http", "file:", "--index-url", "--extra-index-url", "--find-links") if word in text
    ] == []


def _unlocked(requirements: list[str], lock: Path) -> list[str]:
    """Return the requirements that the lock does not satisfy."""
    pins = _pins(lock)
    assert requirements
    return [
        line
        for line in requirements
        if not (requirement := Requirement(line)).specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]


def test_every_dependency_of_the_engine_is_locked_in_a_version_that_it_allows() -> None:
    project = _project()["project"]
    assert _unlocked(project["dependencies"] + project["optional-dependencies"]["admin"], LOCK) == []


def test_what_builds_the_wheel_is_locked_in_a_version_that_it_allows() -> None:
    assert _unlocked(_project()["build-system"]["requires"], BUILD_LOCK) == []


def _makefile_versions(image: str) -> set[str]:
    return set(re.findall(rf"--tag {image}:(\S+)", (ROOT / "Makefile").read_text()))


def test_the_engine_image_has_the_version_of_the_engine() -> None:
    labels = re.findall(r'org\.opencontainers\.image\.version="([^"]+)"', (ROOT / "Dockerfile").read_text())
    assert labels == [__version__]
    assert _makefile_versions("mockengine") == {__version__}


def test_the_frontend_image_has_the_version_that_is_fetched_elsewhere() -> None:
    dockerfile = (ROOT / "deploy" / "frontend" / "Dockerfile").read_text()
    assert set(re.findall(r"^ARG VLLM_VERSION=(\S+)$", dockerfile, re.MULTILINE)) == {DEFAULT_VERSION}
    assert set(re.findall(r"--tag mockengine-frontend:(\S+)", dockerfile)) == {DEFAULT_VERSION}
    assert _makefile_versions("mockengine-frontend") == {DEFAULT_VERSION}


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "deploy/frontend/Dockerfile"])
def test_a_dockerfile_needs_nothing_but_its_base_images(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    # What a syntax line names is pulled from a registry before anything else.
    assert "# syntax" not in text.lower()
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert bases <= {"python:${PYTHON_VERSION}-slim-bookworm", "debian:bookworm-slim"}
    assert re.findall(r"^ARG PYTHON_VERSION=(\S+)$", text, re.MULTILINE) == ["3.12"]
