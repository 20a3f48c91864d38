# SPDX-License-Identifier: Apache-2.0
"""A real Docker engine, by way of the `docker` command: both images, and containers that are gone when a test is done.

It knows the images' names and how they are built. What runs in them is the tests' business.
"""

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from mockengine import __version__
from mockengine.testing.fetch import DEFAULT_VERSION
from tests.support.stack import ROOT, wait_until

ENGINE_IMAGE: Final = f"mockengine:{__version__}"
FRONTEND_IMAGE: Final = f"mockengine-frontend:{DEFAULT_VERSION}"

HARDENED: Final = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
"""Flags of `docker run` under which both images must work."""

_COMMAND_DEADLINE_S: Final = 60.0
# The frontend's wheel is 340 MB, over a network that may be slow.
_BUILD_DEADLINE_S: Final = 900.0
_NO_ENGINE: Final = (
    "No Docker engine answers, and the container tests need one: start Docker, or set DOCKER_HOST to an engine that "
    "runs. What `docker version` says:"
)


class DockerError(RuntimeError):
    """A docker command failed; the message has the command, its exit code and what it wrote."""


class NoEngineError(DockerError):
    """There is no Docker engine to talk to."""


def try_docker(
    *arguments: str, deadline_s: float = _COMMAND_DEADLINE_S, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a docker command to its end, whatever its exit code.

    Args:
        arguments: such as `"inspect", name`.
        deadline_s: when it counts as hanging.
        environment: variables to set besides this process's own.

    Raises:
        DockerError: it hangs, or there is no such command.

    """
    command = ["docker", *arguments]
    try:
        return subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise NoEngineError(f"{_NO_ENGINE}\nthe command `docker` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise DockerError(f"`{' '.join(command)}` has not ended after {deadline_s:g} s") from error


def docker(
    *arguments: str, deadline_s: float = _COMMAND_DEADLINE_S, environment: Mapping[str, str] | None = None
) -> str:
    """Run a docker command, and return its stdout without the last line's end.

    Raises:
        DockerError: it fails, or hangs.

    """
    finished = try_docker(*arguments, deadline_s=deadline_s, environment=environment)
    if finished.returncode != 0:
        raise DockerError(
            f"exit code {finished.returncode} from `docker {' '.join(arguments)}`:\n{finished.stdout}{finished.stderr}"
        )
    return finished.stdout.rstrip("\n")


def check_engine() -> None:
    """Make sure that a Docker engine answers.

    Raises:
        NoEngineError: none does; the message says what to do.

    """
    finished = try_docker("version", "--format", "{{.Server.Version}}")
    if finished.returncode != 0:
        raise NoEngineError(f"{_NO_ENGINE}\n{finished.stderr.strip()}")


@functools.cache
def build_engine_image() -> str:
    """Build the engine's image, once per run of the tests, and return its name."""
    _build(ENGINE_IMAGE, str(ROOT))
    return ENGINE_IMAGE


@functools.cache
def build_frontend_image() -> str:
    """Build the frontend's image, once per run of the tests, and return its name."""
    folder = ROOT / "deploy"
    dockerfile = str(folder / "frontend" / "Dockerfile")
    _build(FRONTEND_IMAGE, "--build-arg", f"VLLM_VERSION={DEFAULT_VERSION}", "--file", dockerfile, str(folder))
    return FRONTEND_IMAGE


def _build(image: str, *arguments: str) -> None:
    """Build an image; the one that had its name until then is removed when nothing uses it."""
    before = try_docker("image", "inspect", "--format", "{{.Id}}", image).stdout.strip()
    docker("build", "--tag", image, *arguments, deadline_s=_BUILD_DEADLINE_S)
    tags = try_docker("image", "inspect", "--format", "{{len .RepoTags}}", before).stdout.strip() if before else ""
    if tags == "0":
        try_docker("image", "rm", before)


def inspect(name: str) -> dict[str, Any]:
    """Return what Docker knows about a container, image, network or volume."""
    found: list[dict[str, Any]] = json.loads(docker("inspect", name))
    return found[0]


@dataclass(frozen=True, slots=True)
class Container:
    """A container that a test started."""

    name: str

    @property
    def state(self) -> dict[str, Any]:
        """What Docker says about its process: `Status`, `ExitCode`, `Health` and more."""
        state: dict[str, Any] = inspect(self.name)["State"]
        return state

    @property
    def log(self) -> str:
        """Everything it has written, stdout before stderr."""
        finished = try_docker("logs", self.name)
        return finished.stdout + finished.stderr

    def json_log(self) -> list[dict[str, Any]]:
        """Return its stdout, every line of which must be a JSON object."""
        return [json.loads(line) for line in docker("logs", self.name).splitlines()]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside it."""
        return try_docker("exec", self.name, *command)

    def wait_for_line(self, text: str) -> None:
        """Wait until something it wrote holds this text."""
        wait_until(lambda: self.log, lambda log: text in log, f"{text!r} is missing: the log of {self.name}")

    def wait_for_health(self, status: str) -> None:
        """Wait until its health check says `healthy` or `unhealthy`."""
        wait_until(lambda: self.state["Health"], lambda health: health["Status"] == status, f"health of {self.name}")

    def wait_for_end(self) -> int:
        """Wait until its process has ended, and return the exit code."""
        wait_until(lambda: self.state["Status"], lambda status: status == "exited", f"state of {self.name}")
        exit_code: int = self.state["ExitCode"]
        return exit_code


@contextmanager
def container(image: str, *command: str, options: tuple[str, ...] = ()) -> Iterator[Container]:
    """Run a container while the context lasts.

    Args:
        image: its image.
        command: what follows the image's entrypoint.
        options: of `docker run`, such as `"--network=none"`.

    """
    running = Container(f"mockengine-test-{uuid4().hex[:12]}")
    try:
        docker("run", "--detach", "--name", running.name, *options, image, *command)
        yield running
    finally:
        try_docker("rm", "--force", "--volumes", running.name)


def moment(text: str) -> datetime:
    """Return a time as Docker writes it, which has nanoseconds where Python has microseconds."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00") + timedelta(microseconds=int(fraction[:6].ljust(6, "0")))
