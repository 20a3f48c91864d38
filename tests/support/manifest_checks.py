# SPDX-License-Identifier: Apache-2.0
"""Whether manifests fit each other, the images and the engine's settings: what no schema can see.

Each check yields a sentence for each problem. `problems` runs them all.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import mockengine
from mockengine.admin.app import HEALTH_PATIENCE_S
from mockengine.settings import Settings
from mockengine.settings_sources import SettingsError, load
from mockengine.testing.fetch import DEFAULT_VERSION
from tests.support.pod_container import Manifest, ManifestError, PodFacts, environment, expand

# Time that is left after everything that a pod's end may wait for.
_MARGIN_S: Final = 5
_TAGS: Final = {"mockengine": mockengine.__version__, "mockengine-frontend": DEFAULT_VERSION}
# What the API fills in.
_DEFAULT_PROBE_TIMEOUT_S: Final = 1
_PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
_ENGINE_PROBES: Final = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "allowPrivilegeEscalation": False,
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Bundle:
    """Manifests that are applied together."""

    manifests: list[Manifest]

    def of(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    @cached_property
    def workloads(self) -> "list[Workload]":
        return [Workload(manifest, self.config_maps) for manifest in self.of("Deployment", "StatefulSet")]

    @property
    def config_maps(self) -> dict[str, dict[str, str]]:
        return {manifest["metadata"]["name"]: manifest["data"] for manifest in self.of("ConfigMap")}

    def selected(self, labels: Mapping[str, str]) -> "list[Workload]":
        return [workload for workload in self.workloads if labels.items() <= workload.labels.items()]


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet."""

    manifest: Manifest
    config_maps: dict[str, dict[str, str]]

    @property
    def name(self) -> str:
        return f"{self.manifest['kind']} {self.manifest['metadata']['name']}"

    @property
    def template(self) -> Manifest:
        template: Manifest = self.manifest["spec"]["template"]
        return template

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for one in self.containers for port in one.get("ports", [])}

    @property
    def engine(self) -> Manifest | None:
        return next((one for one in self.containers if _repository(one["image"]) == "mockengine"), None)

    @property
    def frontend(self) -> Manifest | None:
        return next((one for one in self.containers if self.flags(one).get("data-parallel-size-local") == "0"), None)

    def variables(self, container: Manifest, index: int = 0) -> dict[str, str]:
        """Return the container's environment, in the pod of that index."""
        labels = self.labels | {"apps.kubernetes.io/pod-index": str(index)}
        return environment(container, PodFacts("pod", labels, "10.0.0.1", self.config_maps))

    def flags(self, container: Manifest) -> dict[str, str]:
        """Return the `--name=value` among its arguments."""
        words = [expand(word, self.variables(container)) for word in container.get("args", [])]
        pairs = [word[2:].partition("=") for word in words if word.startswith("--")]
        return {name: value for name, _, value in pairs}

    def settings(self, index: int = 0) -> Settings:
        """Return what the engine makes of its environment, in the pod of that index."""
        assert self.engine is not None
        return load([], self.variables(self.engine, index)).settings


def problems(manifests: list[Manifest]) -> list[str]:
    """Return everything that does not fit."""
    bundle = Bundle(manifests)
    found = list(_references(bundle))
    # What refers to nothing would only raise errors below.
    return found or [problem for check in _CHECKS for problem in check(bundle)]


def _references(bundle: Bundle) -> Iterator[str]:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in bundle.manifests]
    yield from (f"{kind} {name} is there twice" for kind, name in set(names) if names.count((kind, name)) > 1)
    for workload in bundle.workloads:
        for container in workload.containers:
            try:
                workload.variables(container)
            except (ManifestError, KeyError) as error:
                yield f"{workload.name}: {container['name']}: {error}"
                break
        else:
            yield from _broken_settings(workload)


def _broken_settings(workload: Workload) -> Iterator[str]:
    for index in range(workload.manifest["spec"].get("replicas", 1)):
        try:
            _ = workload.settings(index) if workload.engine else None
        except SettingsError as error:
            yield f"{workload.name}: {error}"


def _selectors(bundle: Bundle) -> Iterator[str]:
    for workload in bundle.workloads:
        selector = workload.manifest["spec"]["selector"]["matchLabels"]
        spreads = [each["labelSelector"]["matchLabels"] for each in workload.spec.get("topologySpreadConstraints", [])]
        for labels in [selector, *spreads]:
            if not labels.items() <= workload.labels.items():
                yield f"{workload.name} selects {labels}, but its pods have {workload.labels}"
        service = workload.manifest["spec"].get("serviceName")
        if service is not None and service not in [one["metadata"]["name"] for one in bundle.of("Service")]:
            yield f"{workload.name}: there is no Service {service}"
    for kind, labels in _selections(bundle):
        if not bundle.selected(labels):
            yield f"{kind} selects {labels}, which no pod has"
    for scaler in bundle.of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        workload_of = {workload.name: workload for workload in bundle.workloads}
        if f"{target['kind']} {target['name']}" not in workload_of:
            yield f"HorizontalPodAutoscaler scales {target['kind']} {target['name']}, which is not there"
        elif "replicas" in workload_of[f"{target['kind']} {target['name']}"].manifest["spec"]:
            yield f"{target['name']} has a HorizontalPodAutoscaler and a number of replicas, which would reset it"


def _selections(bundle: Bundle) -> Iterator[tuple[str, dict[str, str]]]:
    for one in bundle.of("Service"):
        yield f"Service {one['metadata']['name']}", one["spec"]["selector"]
    for one in bundle.of("PodDisruptionBudget", "PodMonitor"):
        yield f"{one['kind']} {one['metadata']['name']}", one["spec"]["selector"]["matchLabels"]
    for one in bundle.of("NetworkPolicy"):
        yield "NetworkPolicy", one["spec"]["podSelector"]["matchLabels"]
        for rule in one["spec"]["ingress"]:
            for peer in rule.get("from", []):
                yield "NetworkPolicy", peer["podSelector"]["matchLabels"]


def _ports(bundle: Bundle) -> Iterator[str]:
    for workload in bundle.workloads:
        yield from _ports_of(workload)
    for service in bundle.of("Service"):
        for port in service["spec"]["ports"]:
            for workload in bundle.selected(service["spec"]["selector"]):
                if port["targetPort"] not in workload.ports:
                    yield f"Service {service['metadata']['name']}: {workload.name} has no port {port['targetPort']}"


def _named_ports(bundle: Bundle) -> Iterator[str]:
    for monitor in bundle.of("PodMonitor"):
        known = {port for workload in bundle.workloads for port in workload.ports}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in known:
                yield f"PodMonitor: no pod has a port {endpoint['port']}"
    for policy in bundle.of("NetworkPolicy"):
        selected = bundle.selected(policy["spec"]["podSelector"]["matchLabels"])
        for port in [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])]:
            yield from (f"NetworkPolicy: {one.name} has no port {port}" for one in selected if port not in one.ports)


def _ports_of(workload: Workload) -> Iterator[str]:
    for container in workload.containers:
        own = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in _PROBES:
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if port is None:
                yield f"{workload.name}: {container['name']} has no {probe} by HTTP"
            elif port not in own:
                yield f"{workload.name}: {probe} of {container['name']} asks port {port}, it has {own}"
    scraped = workload.template["metadata"].get("annotations", {}).get("prometheus.io/port")
    if scraped is not None and int(scraped) not in workload.ports.values():
        yield f"{workload.name}: Prometheus would ask port {scraped}, the pod has {workload.ports}"


def _engines(bundle: Bundle) -> Iterator[str]:
    """Hold engine containers against what their settings say."""
    for workload in bundle.workloads:
        if workload.engine is None:
            continue
        settings = workload.settings()
        port = workload.ports.get("engine-admin")
        if port != settings.admin_port:
            yield f"{workload.name}: the port engine-admin is {port}, admin_port is {settings.admin_port}"
        if settings.admin_host in {"127.0.0.1", "localhost", "::1"}:
            yield f"{workload.name}: probes cannot reach the admin port at {settings.admin_host}"
        for probe, path in _ENGINE_PROBES.items():
            asked = workload.engine.get(probe, {}).get("httpGet", {}).get("path")
            if asked != path:
                yield f"{workload.name}: {probe} of the engine asks {asked}, not {path}"
            timeout_s = workload.engine.get(probe, {}).get("timeoutSeconds", _DEFAULT_PROBE_TIMEOUT_S)
            if timeout_s <= HEALTH_PATIENCE_S:
                late = f"it may answer after {HEALTH_PATIENCE_S} s"
                yield f"{workload.name}: {probe} of the engine waits {timeout_s} s, {late}"
        mounts = [mount["mountPath"] for mount in workload.engine.get("volumeMounts", [])]
        if settings.state_file is None or settings.state_file.rpartition("/")[0] not in mounts:
            yield f"{workload.name}: the state file {settings.state_file} is in no volume ({mounts})"


def _frontends(bundle: Bundle) -> Iterator[str]:
    """Hold every frontend against the engines that are to join it."""
    engines = [workload for workload in bundle.workloads if workload.engine is not None]
    for workload in bundle.workloads:
        if workload.frontend is None:
            continue
        flags = workload.flags(workload.frontend)
        if workload.ports.get("http") != int(flags["port"]):
            yield f"{workload.name}: the port http is {workload.ports.get('http')}, --port is {flags['port']}"
        host, port = flags["data-parallel-address"], flags["data-parallel-rpc-port"]
        sidecar = workload.engine is not None
        ranks = 0
        for engine in [workload] if sidecar else engines:
            settings = engine.settings()
            ranks += settings.engine_count * (1 if sidecar else engine.manifest["spec"]["replicas"])
            reached = {f"tcp://{host}:{port}"} if sidecar else _handshake_services(bundle, workload, port)
            if settings.handshake_address not in reached:
                yield f"{engine.name} joins {settings.handshake_address}, the frontend is at {sorted(reached)}"
            if settings.data_parallel_size not in {None, int(flags["data-parallel-size"])}:
                yield f"{engine.name}: data_parallel_size is {settings.data_parallel_size}, the frontend's differs"
        size = int(flags["data-parallel-size"])
        if ranks != size:
            yield f"{workload.name}: --data-parallel-size is {size}, the engines have {ranks} ranks"


def _handshake_services(bundle: Bundle, frontend: Workload, port: str) -> set[str]:
    """Return the addresses by which other pods reach a frontend that is not ready, on the port it listens on."""
    found = set()
    for service in bundle.of("Service"):
        spec = service["spec"]
        headless = spec.get("clusterIP") == "None" and spec.get("publishNotReadyAddresses")
        if headless and frontend in bundle.selected(spec["selector"]):
            ports = {frontend.ports.get(each["targetPort"]) for each in spec["ports"]}
            found |= {f"tcp://{service['metadata']['name']}:{each}" for each in ports if str(each) == port}
    return found


def _ranks(bundle: Bundle) -> Iterator[str]:
    for workload in bundle.workloads:
        if workload.manifest["kind"] != "StatefulSet":
            continue
        count = workload.manifest["spec"]["replicas"]
        first = [workload.settings(index).start_rank for index in range(count)]
        if first != list(range(count)):
            yield f"{workload.name}: its pods play the ranks {first}"
        if workload.manifest["spec"].get("podManagementPolicy") != "Parallel":
            yield f"{workload.name}: its pods start one after the other, but none is ready before all have joined"


def _volumes(bundle: Bundle) -> Iterator[str]:
    for workload in bundle.workloads:
        volumes = {volume["name"] for volume in workload.spec.get("volumes", [])}
        mounted = {mount["name"] for one in workload.containers for mount in one.get("volumeMounts", [])}
        yield from (f"{workload.name}: the volume {name} is mounted nowhere" for name in sorted(volumes - mounted))
        yield from (f"{workload.name}: there is no volume {name}" for name in sorted(mounted - volumes))


def _security(bundle: Bundle) -> Iterator[str]:
    for workload in bundle.workloads:
        ours = [one for one in workload.containers if _repository(one["image"]) in _TAGS]
        for container in ours:
            context = container.get("securityContext")
            if context != _SECURITY:
                yield f"{workload.name}: securityContext of {container['name']} is {context}, not {_SECURITY}"
            resources = container.get("resources", {})
            if not all({"cpu", "memory"} <= resources.get(kind, {}).keys() for kind in ("requests", "limits")):
                yield f"{workload.name}: {container['name']} does not request and limit CPU and memory"
        if ours == workload.containers and workload.spec.get("automountServiceAccountToken") is not False:
            yield f"{workload.name} mounts the service account's token"


def _versions(bundle: Bundle) -> Iterator[str]:
    for workload in bundle.workloads:
        for image in (container["image"] for container in workload.containers):
            repository, _, tag = image.rpartition(":")
            if repository in _TAGS and tag != _TAGS[repository]:
                yield f"{workload.name}: the image {image} is not of version {_TAGS[repository]}"
    for manifest in bundle.manifests:
        version = manifest["metadata"].get("labels", {}).get("app.kubernetes.io/version", mockengine.__version__)
        if version != mockengine.__version__:
            yield f"{manifest['kind']} {manifest['metadata']['name']} is labelled with version {version}"


def _grace(bundle: Bundle) -> Iterator[str]:
    """A pod's end waits for the main containers' hooks and drains, then for the sidecar's drain."""
    for workload in bundle.workloads:
        grace = workload.spec.get("terminationGracePeriodSeconds", 30)
        needed = _MARGIN_S
        if workload.engine is not None:
            needed += int(workload.settings().shutdown_timeout_s)
        if workload.frontend is not None:
            hook = workload.frontend.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
            needed += int(hook[1]) + int(workload.flags(workload.frontend).get("shutdown-timeout", "0"))
        if grace < needed:
            yield f"{workload.name} is killed after {grace} s, its end may take {needed} s"


def _repository(image: str) -> str:
    """Return the last part of an image's name: `mockengine` of `registry.example/team/mockengine:0.1.0`."""
    return image.rpartition("/")[2].partition(":")[0].partition("@")[0]


_CHECKS: Final[tuple[Callable[[Bundle], Iterator[str]], ...]] = (
    _selectors,
    _ports,
    _named_ports,
    _engines,
    _frontends,
    _ranks,
    _volumes,
    _security,
    _versions,
    _grace,
)
