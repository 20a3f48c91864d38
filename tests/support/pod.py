# SPDX-License-Identifier: Apache-2.0
"""A kubelet for tests: runs one pod, as a rendered manifest describes it, on a Docker engine.

It does what a kubelet does, in its order: a pause container owns the network; sidecars start one by one, each when the
startup probe of the one before has succeeded, then the main containers. Containers that exit, or whose liveness or
startup probe fails, are made anew, so that only volumes outlive them. At the end the main containers get SIGTERM first
and the sidecars after them, all within one grace period. Only waiting is shorter: probe periods and restart delays are
multiplied by `pace`; grace periods, timeouts and hooks take as long as they say.
"""

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

import httpx

from tests.support.docker import DockerError, docker, try_docker
from tests.support.pod_container import Manifest, ManifestError, PodFacts, check_pod, run_arguments
from tests.support.pod_probes import Check, Probe

_TICK_S: Final = 0.05
_OK: Final = range(200, 400)
# A kubelet's: the first restart is immediate, then 10 s, 20 s, 40 s, up to 5 minutes.
_FIRST_DELAY_S: Final = 10.0
_LONGEST_DELAY_S: Final = 300.0
_SHORTEST_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A life of a container: what ended it (`exited`, `liveness`, `startup` or `deleted`), how, and at which time."""

    cause: str
    exit_code: int
    at: float
    log: str


class PodContainer:
    """One container of the pod, through all its lives, on a thread of its own."""

    def __init__(self, described: Manifest, pod: "Pod") -> None:
        self.name: str = described["name"]
        self.lives: list[Ended] = []
        self.is_started = threading.Event()
        self.is_ready = False
        self.docker_name = ""
        self.error: Exception | None = None
        self._described = described
        self._pod = pod
        self._stopping = threading.Event()
        self._waiter: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._try_to_live, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def let_go(self) -> None:
        """Watch it no longer, and do not restart it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.is_ready = False

    def end(self, grace_s: float) -> None:
        """End it for good; only after `let_go`."""
        if self._waiter is not None:
            self._end("deleted", grace_s)

    def discard(self) -> None:
        """Wait for the end of a container that is being removed from outside; only after `let_go`."""
        if self._waiter is not None:
            self._waiter.communicate()

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        docker("kill", "--signal=KILL", self.docker_name)

    def log(self) -> str:
        """Return what this life has written so far."""
        said = try_docker("logs", self.docker_name)
        return said.stdout + said.stderr

    def _try_to_live(self) -> None:
        try:
            self._live()
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits for the pod
            self.error = error
            self.is_ready = False

    def _live(self) -> None:
        delay_s = 0.0
        while not self._stopping.wait(delay_s * self._pod.pace):
            self._create()
            cause = self._watch()
            if cause is None:
                return
            self._end(cause, self._grace_s(cause))
            delay_s = min(max(_FIRST_DELAY_S, 2 * delay_s), _LONGEST_DELAY_S) if len(self.lives) > 1 else 0.0

    def _create(self) -> None:
        self.docker_name = f"{self._pod.name}-{self.name}-{len(self.lives)}"
        self._pod.run(self.docker_name, self._described)
        command = ["docker", "wait", self.docker_name]
        self._waiter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _watch(self) -> str | None:
        """Probe until it exits or must end, and return why; None once it is let go."""
        startup, liveness, readiness = (self._probe(f"{kind}Probe") for kind in ("startup", "liveness", "readiness"))
        while not self._stopping.wait(_TICK_S):
            if self._waiter is None or self._waiter.poll() is not None:
                return "exited"
            if not self.is_started.is_set():
                verdict = True if startup is None else startup.run(time.monotonic())
                if verdict is False:
                    return "startup"
                if verdict:
                    self.is_started.set()
                continue
            if liveness is not None and liveness.run(time.monotonic()) is False:
                return "liveness"
            verdict = True if readiness is None else readiness.run(time.monotonic())
            self.is_ready = self.is_ready if verdict is None else verdict
        return None

    def _end(self, cause: str, grace_s: float) -> None:
        """Run the hook, send SIGTERM, then SIGKILL; note how it ended, and remove it."""
        assert self._waiter is not None
        self.is_ready = False
        self.is_started.clear()
        end = time.monotonic() + grace_s
        if self._waiter.poll() is None:
            if hook := self._described.get("lifecycle", {}).get("preStop"):
                self._exec(hook["exec"]["command"], grace_s)
            left_s = max(end - time.monotonic(), _SHORTEST_GRACE_S)
            docker("stop", f"--time={left_s:.0f}", self.docker_name, deadline_s=left_s + _TICK_S + 30)
        said, _ = self._waiter.communicate()
        self.lives.append(Ended(cause, int(said), time.monotonic(), self.log()))
        self._waiter = None
        docker("rm", "--force", self.docker_name)

    def _grace_s(self, cause: str) -> float:
        probe = self._described.get(f"{cause}Probe", {})
        return float(probe.get("terminationGracePeriodSeconds", self._pod.grace_s))

    def _probe(self, kind: str) -> Probe | None:
        described = self._described.get(kind)
        if described is None:
            return None
        return Probe.of(described, self._check(described), started_at=time.monotonic(), pace=self._pod.pace)

    def _check(self, described: Manifest) -> Check:
        timeout_s = described.get("timeoutSeconds", 1)
        if "httpGet" in described:
            url = self._pod.url(described["httpGet"]["port"], of=self._described) + described["httpGet"]["path"]
            return lambda: _answers(url, timeout_s)
        if "exec" in described:
            return lambda: self._exec(described["exec"]["command"], timeout_s)
        raise ManifestError(f"a probe of {self.name} is neither httpGet nor exec")

    def _exec(self, command: Sequence[str], timeout_s: float) -> bool:
        try:
            return try_docker("exec", self.docker_name, *command, deadline_s=timeout_s).returncode == 0
        except DockerError:
            return False


class Pod:
    """A pod: `with Pod(template, config_maps) as pod:` starts it, and leaves nothing behind.

    Args:
        template: a pod template, with `metadata` and `spec`.
        config_maps: the data of the ConfigMaps beside it, by name.
        pace: what probe periods and restart delays are multiplied by.
        labels: labels that a controller adds, such as a StatefulSet's pod index.
        network: options of `docker run` for its network.

    """

    def __init__(
        self,
        template: Manifest,
        config_maps: Mapping[str, Mapping[str, str]],
        *,
        pace: float = 0.2,
        labels: Mapping[str, str] | None = None,
        network: Sequence[str] = (),
    ) -> None:
        self.name = f"pod-{uuid4().hex[:8]}"
        self.pace = pace
        self._spec: Manifest = template["spec"]
        check_pod(self._spec)
        if any(each.get("restartPolicy") != "Always" for each in self._spec.get("initContainers", [])):
            raise ManifestError("init containers that end are not emulated (set restartPolicy: Always)")
        self.grace_s = float(self._spec.get("terminationGracePeriodSeconds", 30))
        self._labels = {**template["metadata"].get("labels", {}), **(labels or {})}
        self._config_maps = config_maps
        self._network = network
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self._facts = PodFacts(self.name, self._labels, "", config_maps)
        self._first = [PodContainer(each, self) for each in self._spec.get("initContainers", [])]
        self._main = [PodContainer(each, self) for each in self._spec["containers"]]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    @property
    def containers(self) -> list[PodContainer]:
        return [*self._first, *self._main]

    @property
    def is_ready(self) -> bool:
        """Whether every container is, sidecars included."""
        return all(container.is_ready for container in self.containers)

    def container(self, name: str) -> PodContainer:
        return next(container for container in self.containers if container.name == name)

    def url(self, port: str | int, of: Manifest | None = None) -> str:
        """Return the address of a port, by number or by its name in the manifest."""
        described = [of] if of else [*self._spec.get("initContainers", []), *self._spec["containers"]]
        named = {each["name"]: each["containerPort"] for one in described for each in one.get("ports", [])}
        return f"http://{self._facts.ip}:{named[port] if isinstance(port, str) else port}"

    def run(self, docker_name: str, described: Manifest) -> None:
        """Start a container in the pod's network, with the pod's volumes."""
        volumes = {volume["name"]: self._folder / volume["name"] for volume in self._spec.get("volumes", [])}
        arguments = run_arguments(described, self._spec.get("securityContext", {}), self._facts, volumes)
        pause = f"--network=container:{self.name}-pause"
        docker("run", "--detach", f"--name={docker_name}", f"--label=test-pod={self.name}", pause, *arguments)

    def wait_for(self, condition: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        """Wait until the condition holds, and tell all about the pod if it does not, or if a container was lost."""
        end = time.monotonic() + within_s
        while not condition():
            for lost in (container for container in self.containers if container.error is not None):
                raise AssertionError(
                    f"not {what}: the container {lost.name} was lost: {lost.error}\n{self.describe()}"
                ) from lost.error
            if time.monotonic() > end:
                raise AssertionError(f"not {what} within {within_s:g} s\n{self.describe()}")
            time.sleep(_TICK_S)

    def describe(self) -> str:
        """Return the state of every container, and the end of what each of its lives wrote."""
        lines = []
        for container in self.containers:
            lives = [(f"{life.cause}, exit code {life.exit_code}", life.log) for life in container.lives]
            state = f"started {container.is_started.is_set()}, ready {container.is_ready}"
            for title, log in [*lives, (state, container.log())]:
                lines += [f"--- {container.name}: {title}", *log.splitlines()[-15:]]
        return "\n".join(lines)

    def delete(self) -> float:
        """End the pod as `kubectl delete pod` does; return the seconds that took."""
        begin = time.monotonic()
        for container in self.containers:
            container.let_go()
        with ThreadPoolExecutor() as executor:
            list(executor.map(lambda container: container.end(self.grace_s), self._main))
        for sidecar in reversed(self._first):
            sidecar.end(self.grace_s - (time.monotonic() - begin))
        return time.monotonic() - begin

    def _start(self) -> None:
        for volume in self._spec.get("volumes", []):
            folder = self._folder / volume["name"]
            folder.mkdir()
            # As a kubelet makes an emptyDir: any user may write to it.
            folder.chmod(0o777)
        pause = ["--no-healthcheck", "--pull=never", "--entrypoint=sleep", self._spec["containers"][0]["image"]]
        label = f"--label=test-pod={self.name}"
        docker("run", "--detach", f"--name={self.name}-pause", label, *self._network, *pause, "infinity")
        networks = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        ip = docker("inspect", f"--format={networks}", f"{self.name}-pause").split()[0]
        self._facts = PodFacts(self.name, self._labels, ip, self._config_maps)
        for container in self._first:
            container.start()
            self.wait_for(container.is_started.is_set, f"started: {container.name}")
        for container in self._main:
            container.start()

    def _clean(self) -> None:
        for container in self.containers:
            container.let_go()
        try:
            left = docker("ps", "--all", "--quiet", f"--filter=label=test-pod={self.name}").split()
            if left:
                docker("rm", "--force", "--volumes", *left)
            for container in self.containers:
                container.discard()
        finally:
            shutil.rmtree(self._folder)


def _answers(url: str, timeout_s: float) -> bool:
    try:
        return httpx.get(url, timeout=timeout_s).status_code in _OK
    except httpx.HTTPError:
        return False
