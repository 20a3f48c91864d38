# SPDX-License-Identifier: Apache-2.0
"""Every kustomization renders, is valid for the oldest and the newest Kubernetes, and fits itself and the engine."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import kubernetes_tools
from tests.support.kubernetes_tools import run_tool
from tests.support.manifest_checks import Bundle, problems
from tests.support.manifests import (
    KUBERNETES,
    NEWEST,
    OLDEST,
    kustomizations,
    parse,
    render_kustomization,
    schema_problems,
)
from tests.support.pod_container import Manifest

BASE = KUBERNETES / "base"
DATA_PARALLEL = KUBERNETES / "overlays" / "data-parallel"
AUTOSCALING = KUBERNETES / "overlays" / "autoscaling"
OWN_FRONTEND = KUBERNETES / "overlays" / "own-frontend"
pytestmark = pytest.mark.manifests

# Parts of others: a frontend without an engine, and engines without a frontend.
PARTS = {KUBERNETES / "frontend", DATA_PARALLEL / "ranks"}
WHOLE = [folder for folder in kustomizations() if folder not in PARTS]


def name_of(folder: Path) -> str:
    return str(folder.relative_to(KUBERNETES))


def only(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = (each for each in manifests if each["kind"] == kind and each["metadata"]["name"].startswith(name))
    return found


def pod_of(manifests: list[Manifest], kind: str = "Deployment") -> Manifest:
    spec: Manifest = only(manifests, kind)["spec"]["template"]["spec"]
    return spec


def test_every_kustomization_is_known() -> None:
    assert set(WHOLE) == {BASE, DATA_PARALLEL, AUTOSCALING, OWN_FRONTEND}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", kustomizations(), ids=name_of)
def test_is_valid_for_the_api(folder: Path, version: str) -> None:
    manifests = render_kustomization(folder)
    assert manifests
    assert schema_problems(manifests, version) == []


@pytest.mark.parametrize("folder", WHOLE, ids=name_of)
def test_is_rendered_alike_by_the_oldest_kubectl(folder: Path) -> None:
    assert render_kustomization(folder, kubernetes_tools.OLDEST) == render_kustomization(folder)


@pytest.mark.parametrize("folder", WHOLE, ids=name_of)
def test_parts_fit(folder: Path) -> None:
    assert problems(render_kustomization(folder)) == []


@pytest.mark.parametrize("folder", WHOLE, ids=name_of)
def test_leaves_the_namespace_to_the_user(folder: Path) -> None:
    assert [one for one in render_kustomization(folder) if "namespace" in one["metadata"]] == []


def test_base_is_one_pod_with_the_engine_as_native_sidecar() -> None:
    manifests = render_kustomization(BASE)
    assert sorted(one["kind"] for one in manifests) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service"]
    pod = pod_of(manifests)
    assert [(one["name"], one["restartPolicy"]) for one in pod["initContainers"]] == [("engine", "Always")]
    assert [one["name"] for one in pod["containers"]] == ["frontend"]


def test_a_change_of_the_settings_replaces_the_pods() -> None:
    name = only(render_kustomization(BASE), "ConfigMap")["metadata"]["name"]
    assert name != "mockengine"
    assert pod_of(render_kustomization(BASE))["initContainers"][0]["envFrom"] == [{"configMapRef": {"name": name}}]


def test_component_adds_the_sidecar_and_leaves_the_rest_of_a_deployment_alone() -> None:
    manifests = render_kustomization(OWN_FRONTEND)
    pod = pod_of(manifests)
    settings = {"envFrom": [{"configMapRef": {"name": only(manifests, "ConfigMap")["metadata"]["name"]}}]}
    (sidecar,) = pod_of(render_kustomization(BASE))["initContainers"]
    assert pod.pop("initContainers") == [sidecar | settings]
    assert pod.pop("volumes") == [{"emptyDir": {"sizeLimit": "1Mi"}, "name": "engine-state"}]
    (own,) = parse((OWN_FRONTEND / "deployment.yaml").read_text())
    assert pod == own["spec"]["template"]["spec"]


def test_engine_is_the_same_container_beside_the_frontend_and_in_a_pod_of_its_own() -> None:
    sidecar, rank = dict(_engine(render_kustomization(BASE))), dict(_rank(render_kustomization(DATA_PARALLEL)))
    assert sidecar.pop("restartPolicy") == "Always"
    assert [entry["name"] for entry in rank.pop("env")] == ["MOCKENGINE_START_RANK"]
    # Of two ConfigMaps, each with a hash in its name.
    assert [list(source) for one in (sidecar, rank) for source in one.pop("envFrom")] == [["configMapRef"]] * 2
    assert sidecar == rank


def test_settings_of_an_overlay_reach_the_sidecar() -> None:
    (workload,) = Bundle(render_kustomization(OWN_FRONTEND)).workloads
    assert workload.settings().vocab_size == 151_936
    assert workload.settings().admin_port == 29_555


def example(title: str, folder: Path) -> list[Manifest]:
    """Render the kustomization that the docs show under a title, as if the clone were beside it."""
    page = (KUBERNETES.parent.parent / "docs" / "kubernetes.md").read_text()
    (shown,) = re.findall("```yaml\n(.*?)```", page.partition(f"## {title}\n")[2].partition("\n## ")[0], re.DOTALL)
    clone = os.path.relpath(KUBERNETES, folder.resolve())
    (folder / "kustomization.yaml").write_text(shown.replace("mockengine/deploy/kubernetes", clone))
    return render_kustomization(folder)


def test_example_of_the_docs_sets_images_replicas_and_settings(tmp_path: Path) -> None:
    manifests = example("A kustomization of yours", tmp_path)
    assert problems(manifests) == []
    (workload,) = Bundle(manifests).workloads
    assert (workload.settings().seed, workload.settings().max_model_len) == (7, 8192)
    repositories = [container["image"].partition(":")[0] for container in workload.containers]
    assert repositories == ["registry.example/mockengine", "registry.example/mockengine-frontend"]
    assert workload.manifest["spec"]["replicas"] == 3


def test_example_of_the_docs_adds_the_engine_to_a_labelled_deployment(tmp_path: Path) -> None:
    own = (OWN_FRONTEND / "deployment.yaml").read_text()
    (tmp_path / "deployment.yaml").write_text(own)
    manifests = example("The engine in a Deployment of yours", tmp_path)
    (workload,) = Bundle(manifests).workloads
    assert workload.settings().vocab_size == 151_936
    assert _engine(manifests)["image"] == "registry.example/mockengine:0.1.0"


@pytest.mark.parametrize(("label", "count"), [("    mockengine/engine: sidecar\n", 1), ("", 0)])
def test_what_the_docs_say_counts_the_engines_that_were_added(tmp_path: Path, label: str, count: int) -> None:
    own = (OWN_FRONTEND / "deployment.yaml").read_text()
    (tmp_path / "deployment.yaml").write_text(own.replace("    mockengine/engine: sidecar\n", label))
    example("The engine in a Deployment of yours", tmp_path)
    assert run_tool("kubectl", "kustomize", str(tmp_path)).count("name: engine-admin") == count


def test_example_of_the_docs_has_as_many_pods_as_ranks(tmp_path: Path) -> None:
    manifests = example("Data parallel: more than one machine", tmp_path)
    assert problems(manifests) == []
    assert only(manifests, "StatefulSet")["spec"]["replicas"] == 4


def test_number_of_ranks_is_said_once() -> None:
    files = [file.read_text() for file in DATA_PARALLEL.rglob("*") if file.is_file()]
    assert sum(text.count("MOCKENGINE_DATA_PARALLEL_SIZE=") for text in files) == 1
    manifests = render_kustomization(DATA_PARALLEL)
    (size,) = (one["data"]["MOCKENGINE_DATA_PARALLEL_SIZE"] for one in manifests if one["kind"] == "ConfigMap")
    assert only(manifests, "StatefulSet")["spec"]["replicas"] == int(size) == 2


def test_autoscaler_and_adapter_name_the_same_metric() -> None:
    (metric,) = only(render_kustomization(AUTOSCALING), "HorizontalPodAutoscaler")["spec"]["metrics"]
    (adapter,) = parse((AUTOSCALING / "prometheus-adapter-values.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == "vllm_num_requests_waiting"
    assert '__name__="vllm:num_requests_waiting"' in rule["seriesQuery"]
    assert re.fullmatch(rule["name"]["matches"], "vllm:num_requests_waiting")


def _engine(manifests: list[Manifest]) -> Manifest:
    engine: Manifest = pod_of(manifests)["initContainers"][0]
    return engine


def _rank(manifests: list[Manifest]) -> Manifest:
    engine: Manifest = pod_of(manifests, "StatefulSet")["containers"][0]
    return engine


def _frontend(manifests: list[Manifest]) -> Manifest:
    frontend: Manifest = pod_of(manifests)["containers"][0]
    return frontend


def _settings(manifests: list[Manifest]) -> Manifest:
    data: Manifest = only(manifests, "ConfigMap")["data"]
    return data


# What a check must notice: how a rendered bundle is spoilt, and words of the problem.
SPOILT: dict[str, tuple[Callable[[list[Manifest]], object], str]] = {
    "container port": (lambda m: _engine(m)["ports"][0].update(containerPort=29_556), "admin_port is 29555"),
    "port name": (lambda m: _engine(m)["ports"][0].update(name="admin"), "has no port engine-admin"),
    "target port": (lambda m: only(m, "Service")["spec"]["ports"][1].update(targetPort="web"), "has no port web"),
    "probe port": (lambda m: _frontend(m)["livenessProbe"]["httpGet"].update(port="web"), "asks port web"),
    "no probe": (lambda m: _frontend(m).pop("livenessProbe"), "has no livenessProbe"),
    "startup waits for the join": (
        lambda m: _engine(m)["startupProbe"]["httpGet"].update(path="/ready"),
        "startupProbe of the engine asks /ready",
    ),
    "impatient probe": (
        lambda m: _engine(m)["livenessProbe"].update(timeoutSeconds=1),
        "livenessProbe of the engine waits 1 s",
    ),
    "default patience": (
        lambda m: _engine(m)["readinessProbe"].pop("timeoutSeconds"),
        "readinessProbe of the engine waits 1 s",
    ),
    "unknown setting": (lambda m: _settings(m).update(MOCKENGINE_SEDE="7"), "did you mean MOCKENGINE_SEED?"),
    "invalid setting": (lambda m: _settings(m).update(MOCKENGINE_BLOCK_SIZE="24"), "24 is not allowed"),
    "other ConfigMap": (lambda m: only(m, "ConfigMap")["metadata"].update(name="other"), "there is no ConfigMap"),
    "handshake port": (
        lambda m: _settings(m).update(MOCKENGINE_HANDSHAKE_ADDRESS="tcp://127.0.0.1:29551"),
        "the frontend is at ['tcp://127.0.0.1:29550']",
    ),
    "more ranks": (lambda m: _settings(m).update(MOCKENGINE_ENGINE_COUNT="2"), "the engines have 2 ranks"),
    "admin port on loopback": (lambda m: _settings(m).update(MOCKENGINE_ADMIN_HOST="127.0.0.1"), "probes cannot reach"),
    "state file outside": (
        lambda m: _settings(m).update(MOCKENGINE_STATE_FILE="/tmp/state.json"),  # noqa: S108 - a path in a container
        "the state file /tmp/state.json is in no volume",
    ),
    "selector": (lambda m: only(m, "Service")["spec"].update(selector={"app": "x"}), "which no pod has"),
    "own labels": (
        lambda m: only(m, "Deployment")["spec"]["selector"]["matchLabels"].update(app="x"),
        "but its pods have",
    ),
    "volume": (lambda m: pod_of(m)["volumes"].pop(0), "there is no volume engine-state"),
    "mount": (lambda m: _frontend(m).pop("volumeMounts"), "the volume tmp is mounted nowhere"),
    "writable root": (
        lambda m: _engine(m)["securityContext"].update(readOnlyRootFilesystem=False),
        "securityContext of engine",
    ),
    "no limits": (lambda m: _engine(m)["resources"].pop("limits"), "does not request and limit"),
    "token": (lambda m: pod_of(m).pop("automountServiceAccountToken"), "mounts the service account's token"),
    "version of the image": (lambda m: _engine(m).update(image="mockengine:0.0.9"), "is not of version"),
    "label": (
        lambda m: only(m, "Service")["metadata"]["labels"].update({"app.kubernetes.io/version": "0.0.9"}),
        "labelled with version 0.0.9",
    ),
    "grace": (lambda m: pod_of(m).update(terminationGracePeriodSeconds=30), "is killed after 30 s"),
    "drain": (lambda m: _settings(m).update(MOCKENGINE_SHUTDOWN_TIMEOUT_S="60"), "its end may take 90 s"),
    "scraped port": (
        lambda m: only(m, "Deployment")["spec"]["template"]["metadata"]["annotations"].update(
            {"prometheus.io/port": "9"}
        ),
        "Prometheus would ask port 9",
    ),
}


SPOILT_RANKS: dict[str, tuple[Callable[[list[Manifest]], object], str]] = {
    "replicas": (lambda m: only(m, "StatefulSet")["spec"].update(replicas=3), "the last rank would be 2"),
    "size alone": (lambda m: _settings(m).update(MOCKENGINE_DATA_PARALLEL_SIZE="4"), "the engines have 2 ranks"),
    "ranks": (
        lambda m: pod_of(m, "StatefulSet")["containers"][0].pop("env"),
        "its pods play the ranks [0, 0]",
    ),
    "order": (lambda m: only(m, "StatefulSet")["spec"].pop("podManagementPolicy"), "start one after the other"),
    "unready addresses": (
        lambda m: only(m, "Service", "mockengine-handshake")["spec"].pop("publishNotReadyAddresses"),
        "the frontend is at []",
    ),
    "virtual address": (
        lambda m: only(m, "Service", "mockengine-handshake")["spec"].pop("clusterIP"),
        "the frontend is at []",
    ),
    "governing service": (
        lambda m: only(m, "StatefulSet")["spec"].update(serviceName="other"),
        "there is no Service other",
    ),
}


@pytest.mark.parametrize(
    ("folder", "spoil", "words"),
    [
        *(pytest.param(BASE, *each, id=what) for what, each in SPOILT.items()),
        *(pytest.param(DATA_PARALLEL, *each, id=what) for what, each in SPOILT_RANKS.items()),
    ],
)
def test_checks_notice_what_does_not_fit(folder: Path, spoil: Callable[[list[Manifest]], object], words: str) -> None:
    manifests = render_kustomization(folder)
    spoil(manifests)
    assert any(words in problem for problem in problems(manifests)), problems(manifests)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: _engine(m).update(resources={"limit": {}}), "limit"),
        (lambda m: _engine(m)["ports"][0].update(containerPort="29555"), "29555"),
        (lambda m: only(m, "Deployment").update(apiVersion="apps/v1beta1"), "apps/v1beta1"),
    ],
)
def test_schemas_notice_what_the_api_does_not_know(spoil: Callable[[list[Manifest]], object], words: str) -> None:
    manifests = render_kustomization(BASE)
    spoil(manifests)
    (problem,) = schema_problems(manifests, OLDEST)
    assert words in problem


def test_a_key_that_stands_twice_is_noticed() -> None:
    with pytest.raises(yaml.YAMLError, match="line 1: a stands there twice"):
        parse("a: 1\na: 2\n")
