# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml and its variants: as files, and as a stack that runs on a real Docker engine."""

import json
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import openai
import yaml

from mockengine.testing.processes import free_port
from tests.support.docker import Container, DockerError, docker, inspect, try_docker
from tests.support.stack import ROOT

BASE: Final = ROOT / "docker-compose.yml"
EXAMPLE: Final = ROOT / ".env.example"
FOLDER: Final = ROOT / "deploy" / "compose"
VARIANTS: Final = sorted(path.stem for path in FOLDER.glob("*.yml"))
MODEL_NAME: Final = "mock"

STREAM_TOKENS: Final = 10_000
STREAM_ITL_MS: Final = "1"
"""What an engine must be told for such a stream to last: without a pace it says everything at once."""

_UP_DEADLINE_S: Final = 60.0
# Docker waits longer before each further restart of a container that ran for less than 10 seconds.
_HEALED_DEADLINE_S: Final = 60.0
_LOOK_AGAIN_S: Final = 0.1
_ANSWER_DEADLINE_S: Final = 2.0
_STREAM_DEADLINE_S: Final = 60.0
_OK: Final = 200


class _Loader(yaml.SafeLoader):
    """YAML with compose's own tags, which say how a value meets that of another file."""


def _untagged(loader: _Loader, node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return None


for _tag in ("!reset", "!override"):
    _Loader.add_constructor(_tag, _untagged)


def variant(name: str) -> Path:
    """Return the path of a file in deploy/compose/, named without its ending."""
    return FOLDER / f"{name}.yml"


def read(path: Path) -> dict[str, Any]:
    """Return what a compose file says, its variables as they stand there."""
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    return content


def command(service: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a service whose command is one string."""
    return shlex.split(service["command"])


def listed_variables() -> list[str]:
    """Return every variable that .env.example lists."""
    return re.findall(r"^#([A-Z_]+)=", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE)


def environment(**variables: str) -> dict[str, str]:
    """Return variables for compose, every other one that it reads being empty: neither the shell nor .env has a say."""
    return dict.fromkeys(listed_variables(), "") | variables


class Stream:
    """A streamed completion, which takes seconds at the pace of `STREAM_ITL_MS`; a thread reads it to its end."""

    def __init__(self, client: openai.OpenAI) -> None:
        """Ask for it, and return when its first chunk has come."""
        self.ended_at = 0.0
        self._ending = ""
        self._client = client
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(_STREAM_DEADLINE_S), "no chunk has come"

    def _read(self) -> None:
        try:
            for chunk in self._client.completions.create(
                model=MODEL_NAME, prompt="Hello", max_tokens=STREAM_TOKENS, stream=True, timeout=_STREAM_DEADLINE_S
            ):
                self._begun.set()
                # Only the last one has a reason, other than the client's types say.
                choices: list[Any] = list(chunk.choices)
                self._ending = next((one.finish_reason for one in choices if one.finish_reason), self._ending)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self._ending = type(error).__name__
        self.ended_at = time.time()

    def ending(self, deadline_s: float = _STREAM_DEADLINE_S) -> str:
        """Wait for the end, and return its `finish_reason`, or the name of the error."""
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), f"the stream has not ended after {deadline_s:g} s"
        return self._ending


@dataclass(frozen=True)
class Project:
    """A stack that runs, under a name of its own."""

    name: str
    files: tuple[Path, ...]
    port: int
    variables: Mapping[str, str] = field(default_factory=dict)
    _created_at: float = field(default_factory=time.time, init=False)

    @property
    def url(self) -> str:
        """Where the frontend answers."""
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, files: tuple[Path, ...] = (), deadline_s: float = _UP_DEADLINE_S) -> str:
        """Run `docker compose` with the project's files and those given, and return what it wrote to stdout."""
        flags = [flag for path in (*self.files, *files) for flag in ("--file", str(path))]
        return docker(
            *("compose", "--project-name", self.name, "--env-file", os.devnull, *flags, *arguments),
            deadline_s=deadline_s,
            environment=environment(HTTP_PORT=str(self.port), **self.variables),
        )

    def up(self) -> float:
        """Start it, wait until all of it is healthy, and return how many seconds that took."""
        begin = time.monotonic()
        try:
            self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "45")
        except DockerError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None
        return time.monotonic() - begin

    def logs(self) -> str:
        """Return the end of everything that was written, for an error message."""
        return self.compose("logs", "--tail", "40")

    def container(self, service: str) -> Container:
        """Return the container of a service, whether it runs or not."""
        return Container(f"{self.name}-{service}-1")

    def exit_codes(self, *services: str) -> dict[str, int]:
        """Return the exit code of each service's container, all of which have ended; by default of every service."""
        found = [json.loads(line) for line in self.compose("ps", "--all", "--format", "json", *services).splitlines()]
        assert [one["Service"] for one in found if one["State"] != "exited"] == []
        return {one["Service"]: one["ExitCode"] for one in found}

    def events(self, action: str) -> dict[str, dict[str, Any]]:
        """Return the last event of that kind of each service, such as `die`; containers may be removed by now."""
        found = docker(
            *("events", "--since", f"{self._created_at:.9f}", "--until", f"{time.time():.9f}"),
            *("--filter", f"label=com.docker.compose.project={self.name}", "--filter", f"event={action}"),
            *("--format", "{{json .}}"),
        )
        events = [json.loads(line) for line in found.splitlines()]
        return {event["Actor"]["Attributes"]["com.docker.compose.service"]: event for event in events}

    def pid(self, service: str) -> int:
        """Return the id, on this machine, of a service's first process."""
        pid: int = inspect(self.container(service).name)["State"]["Pid"]
        assert pid > 0, f"{service} does not run"
        return pid

    def kill(self, *services: str) -> None:
        """Kill their processes as running out of memory would, one right after the other.

        `docker kill` would not do: Docker takes that as meant and does not restart the container. Needs an engine on
        this machine, and root.
        """
        for pid in [self.pid(service) for service in services]:
            os.kill(pid, signal.SIGKILL)

    def client(self) -> openai.OpenAI:
        """Return the official client; it does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def health(self) -> int | None:
        """Return the status of `GET /health`; None: no answer."""
        try:
            return httpx.get(f"{self.url}/health", timeout=_ANSWER_DEADLINE_S).status_code
        except httpx.HTTPError:
            return None

    def ask_rank(self, rank: int) -> int:
        """Send a rank a request of its own, and return the status of the answer."""
        return httpx.post(
            f"{self.url}/v1/completions",
            json={"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 2},
            headers={"X-data-parallel-rank": str(rank)},
            timeout=20,
        ).status_code

    def serves(self) -> bool:
        """Whether it is healthy and answers a chat request."""
        try:
            self.client().with_options(timeout=_ANSWER_DEADLINE_S).chat.completions.create(
                model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
            )
        except openai.OpenAIError:
            return False
        return self.health() == _OK

    def wait_until_it_serves(self) -> None:
        """Wait until it is healthy and answers."""
        end = time.monotonic() + _HEALED_DEADLINE_S
        while not self.serves():
            assert time.monotonic() < end, f"it does not serve after {_HEALED_DEADLINE_S:g} s:\n{self.logs()}"
            time.sleep(_LOOK_AGAIN_S)


@contextmanager
def project(*variants: str, **variables: str) -> Iterator[Project]:
    """Yield the stack with these variants, not started yet; nothing of it is left when the context ends."""
    stack = Project(f"mockengine-test-{uuid4().hex[:12]}", (BASE, *map(variant, variants)), free_port(), variables)
    try:
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "5", "--remove-orphans")
        left = try_docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={stack.name}").stdout
        assert left == ""
