# SPDX-License-Identifier: Apache-2.0
"""The emulated kubelet of the container tests counts, expands and refuses as a kubelet does."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import pod as pod_module
from tests.support.docker import DockerError
from tests.support.pod import Pod
from tests.support.pod_container import ManifestError, PodFacts, check_pod, environment, expand, run_arguments
from tests.support.pod_probes import Probe

FACTS = PodFacts(
    name="pod-1",
    labels={"apps.kubernetes.io/pod-index": "3"},
    ip="10.0.0.7",
    config_maps={"settings": {"A": "1", "B": "2"}},
)


def container(**fields: Any) -> dict[str, Any]:
    return {"name": "c", "image": "i", "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}, **fields}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)", "1"), ("--x=$(A)$(A)", "--x=11"), ("$(NONE)", "$(NONE)"), ("$$(A)", "$(A)"), ("$A", "$A")],
)
def test_references_are_expanded(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


def test_variables_come_from_config_maps_then_from_the_list() -> None:
    sources = [
        {"name": "B", "value": "own $(A)"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}},
        {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "B"}}},
    ]
    described = container(envFrom=[{"configMapRef": {"name": "settings"}}], env=sources)
    expected = {"A": "1", "B": "own 1", "IP": "10.0.0.7", "RANK": "3", "KEY": "2"}
    assert environment(described, FACTS) == expected


def test_rights_limits_and_volumes_become_options() -> None:
    described = container(
        args=["serve", "$(A)"],
        env=[{"name": "A", "value": "1"}],
        securityContext={
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10002,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        resources={"limits": {"cpu": "500m", "memory": "64Mi"}},
        volumeMounts=[{"name": "state", "mountPath": "/var/state"}],
    )
    pod_security = {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 5}
    assert run_arguments(described, pod_security, FACTS, {"state": Path("/host/state")}) == [
        "--env=A=1",
        "--user=10001:10002",
        "--group-add=5",
        "--read-only",
        "--security-opt=no-new-privileges",
        "--cap-drop=ALL",
        "--cpus=0.5",
        f"--memory={64 * 2**20}",
        "--volume=/host/state:/var/state",
        "--no-healthcheck",
        "--pull=never",
        "i",
        "serve",
        "1",
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"securityContext": {"runAsNonRoot": True}}, "its runAsUser is None"),
        ({"securityContext": {"privileged": True}}, "is privileged"),
        ({"securityContext": {"procMount": "Default"}}, "has procMount"),
        ({"envFrom": [{"secretRef": {"name": "s"}}]}, "has secretRef"),
        ({"envFrom": [{"configMapRef": {"name": "other"}}]}, "there is no ConfigMap other"),
    ],
)
def test_what_is_not_emulated_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        run_arguments(container(**fields), {}, FACTS, {})


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ({"hostNetwork": True}, "the pod has hostNetwork"),
        ({"enableServiceLinks": True}, "service links"),
        ({"volumes": [{"name": "v", "hostPath": {}}]}, "the volume v has hostPath"),
        ({"containers": [container(stdin=True)]}, "the container c has stdin"),
    ],
)
def test_a_pod_that_is_not_emulated_is_refused(spoilt: dict[str, Any], words: str) -> None:
    spec = {"enableServiceLinks": False, "automountServiceAccountToken": False, "containers": [container()]}
    check_pod(spec)
    with pytest.raises(ManifestError, match=words):
        check_pod(spec | spoilt)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pods make their folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def template(**fields: Any) -> dict[str, Any]:
    spec = {"enableServiceLinks": False, "automountServiceAccountToken": False, "containers": [container()], **fields}
    return {"metadata": {}, "spec": spec}


def test_a_pod_that_is_refused_leaves_no_folder(folders: Path) -> None:
    with pytest.raises(ManifestError, match="init containers that end"):
        Pod(template(initContainers=[container(name="first")]), {})
    assert list(folders.iterdir()) == []


def test_who_waits_for_a_pod_hears_that_a_container_could_not_be_made(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def docker(*arguments: str, **_: Any) -> str:
        if any(word.startswith("--name=") and word.endswith("-c-0") for word in arguments):
            raise DockerError("no space left on device")
        return "10.0.0.7" if arguments[0] == "inspect" else ""

    def try_docker(*arguments: str, **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, 1, stdout="", stderr="no such container")

    monkeypatch.setattr(pod_module, "docker", docker)
    monkeypatch.setattr(pod_module, "try_docker", try_docker)
    with (
        Pod(template(), {}) as pod,
        pytest.raises(AssertionError, match="not ready: the container c was lost: no space left on device") as raised,
    ):
        pod.wait_for(lambda: pod.is_ready, "ready")
    assert isinstance(raised.value.__cause__, DockerError)
    assert list(folders.iterdir()) == []


def test_a_probe_is_run_when_due_and_decides_after_so_many_in_a_row() -> None:
    results = iter([True, False, False, True, False, False, False])
    described = {"initialDelaySeconds": 10, "periodSeconds": 5, "failureThreshold": 3}
    probe = Probe.of(described, lambda: next(results), started_at=100.0, pace=0.2)
    assert probe.run(101.9) is None
    verdicts = [probe.run(102.0 + second) for second in range(7)]
    assert verdicts == [True, None, None, True, None, None, False]
    assert next(results, "none left") == "none left"


def test_a_slow_probe_is_made_up_for_once() -> None:
    # As a ticker that remembers one tick.
    probe = Probe.of({"periodSeconds": 1}, lambda: True, started_at=0.0, pace=1.0)
    assert [probe.run(now) for now in (0.0, 10.0, 10.0, 10.5, 11.0)] == [True, True, True, None, True]
