# SPDX-License-Identifier: Apache-2.0
"""What a container of a manifest means for `docker run`: image, command, environment, rights, limits, volumes.

Pure: no container is started here. A field that is not known is refused, so that no part of a manifest is passed over
in silence.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

Manifest: TypeAlias = dict[str, Any]

_POD_FIELDS: Final = {
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "initContainers",
    "securityContext",
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
    "volumes",
}
_CONTAINER_FIELDS: Final = {
    "args",
    "command",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resources",
    "restartPolicy",
    "securityContext",
    "startupProbe",
    "volumeMounts",
}
_SECURITY_FIELDS: Final = {
    "allowPrivilegeEscalation",
    "capabilities",
    "fsGroup",
    "privileged",
    "readOnlyRootFilesystem",
    "runAsGroup",
    "runAsNonRoot",
    "runAsUser",
    "seccompProfile",
}
_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)")
_LABEL_PATH: Final = re.compile(r"metadata\.labels\['(.+)'\]")
_BYTES: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class ManifestError(ValueError):
    """A manifest says something that a kubelet refuses, or that this one does not know."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What the containers of a pod can be told: its name, labels and address, and the ConfigMaps beside it."""

    name: str
    labels: Mapping[str, str]
    ip: str
    config_maps: Mapping[str, Mapping[str, str]]


def check_pod(spec: Manifest) -> None:
    """Raise `ManifestError` for what this kubelet would pass over."""
    _refuse_unknown("the pod", spec, _POD_FIELDS)
    if spec.get("enableServiceLinks", True) or spec.get("automountServiceAccountToken", True):
        raise ManifestError("service links and the service account's token are not emulated (set both to false)")
    for volume in spec.get("volumes", []):
        _refuse_unknown(f"the volume {volume['name']}", volume, {"name", "emptyDir"})
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        _refuse_unknown(f"the container {container['name']}", container, _CONTAINER_FIELDS)


def run_arguments(
    container: Manifest, pod_security: Manifest, facts: PodFacts, volumes: Mapping[str, Path]
) -> list[str]:
    """Return the arguments of `docker run` for this container, from its options to the words of its command."""
    variables = environment(container, facts)
    options = [f"--env={name}={value}" for name, value in variables.items()]
    options += _security_options(container["name"], pod_security | container.get("securityContext", {}))
    options += _limit_options(container.get("resources", {}).get("limits", {}))
    for mount in container.get("volumeMounts", []):
        _refuse_unknown(f"the mount {mount['mountPath']}", mount, {"name", "mountPath"})
        options.append(f"--volume={volumes[mount['name']]}:{mount['mountPath']}")
    command = [expand(word, variables) for word in container.get("command", [])]
    if command:
        options.append(f"--entrypoint={command[0]}")
    words = [*command[1:], *(expand(word, variables) for word in container.get("args", []))]
    # The image's own health check would do a liveness probe's work.
    return [*options, "--no-healthcheck", "--pull=never", container["image"], *words]


def environment(container: Manifest, facts: PodFacts) -> dict[str, str]:
    """Return the variables of the container, besides those of its image."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        _refuse_unknown("envFrom", source, {"configMapRef"})
        variables |= _config_map(facts, source["configMapRef"]["name"])
    for entry in container.get("env", []):
        if "value" in entry:
            variables[entry["name"]] = expand(entry["value"], variables)
        else:
            variables[entry["name"]] = _value_from(entry["valueFrom"], facts)
    return variables


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable's value, and leave it as it is where there is none."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _value_from(source: Manifest, facts: PodFacts) -> str:
    _refuse_unknown("valueFrom", source, {"fieldRef", "configMapKeyRef"})
    if reference := source.get("configMapKeyRef"):
        return _config_map(facts, reference["name"])[reference["key"]]
    path = source["fieldRef"]["fieldPath"]
    if label := _LABEL_PATH.fullmatch(path):
        return facts.labels.get(label[1], "")
    known = {"metadata.name": facts.name, "status.podIP": facts.ip}
    if path not in known:
        raise ManifestError(f"the field {path} is not emulated (use a label, {' or '.join(known)})")
    return known[path]


def _config_map(facts: PodFacts, name: str) -> Mapping[str, str]:
    if name not in facts.config_maps:
        raise ManifestError(f"there is no ConfigMap {name} (there are {', '.join(facts.config_maps) or 'none'})")
    return facts.config_maps[name]


def _security_options(name: str, context: Manifest) -> list[str]:
    _refuse_unknown(f"the securityContext of {name}", context, _SECURITY_FIELDS)
    user = context.get("runAsUser")
    if context.get("runAsNonRoot") and not user:
        raise ManifestError(f"{name} has runAsNonRoot, but its runAsUser is {user}")
    if context.get("privileged") or context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        raise ManifestError(f"{name} is privileged or has another seccomp profile than RuntimeDefault: not emulated")
    options = [f"--user={user}:{context['runAsGroup']}"] if user else []
    options += [f"--group-add={context['fsGroup']}"] if "fsGroup" in context else []
    options += ["--read-only"] if context.get("readOnlyRootFilesystem") else []
    options += ["--security-opt=no-new-privileges"] if context.get("allowPrivilegeEscalation") is False else []
    for action in ("add", "drop"):
        options += [f"--cap-{action}={each}" for each in context.get("capabilities", {}).get(action, [])]
    return options


def _limit_options(limits: Mapping[str, str]) -> list[str]:
    options = []
    if cpu := limits.get("cpu"):
        cores = int(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
        # Docker refuses a limit above what there is.
        options.append(f"--cpus={min(cores, os.cpu_count() or 1)}")
    if memory := limits.get("memory"):
        options.append(f"--memory={int(memory[:-2]) * _BYTES[memory[-2:]]}")
    return options


def _refuse_unknown(where: str, given: Iterable[str], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise ManifestError(f"{where} has {', '.join(unknown)}, which the emulated kubelet does not know")
