# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by helm in each of its shapes: valid, fitting, and refusing values that cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.write_schema import SCHEMA, SET_BY_THE_CHART
from mockengine.settings import Settings
from tests.support import kubernetes_tools
from tests.support.kubernetes_tools import ToolError, run_tool
from tests.support.manifest_checks import Bundle, problems
from tests.support.manifests import CHART, NEWEST, OLDEST, RELEASE, render_chart, schema_problems
from tests.support.pod_container import Manifest

pytestmark = pytest.mark.manifests

SHAPES: dict[str, list[str]] = {
    "as it is": [],
    "many ranks in one pod": ["--set=dataParallelSize=4"],
    "many pods": ["--set=frontend.replicas=3"],
    "data parallel": ["--set=mode=data-parallel,dataParallelSize=3"],
    "other names and ports": [
        "--set=mode=data-parallel,dataParallelSize=2,fullnameOverride=other,nameOverride=some",
        "--set=engine.adminPort=9000,frontend.handshakePort=9001,service.port=80",
        "--set=engine.image.repository=registry.example/team/mockengine,engine.image.tag=9.9.9",
    ],
    "everything on": [
        "--set=autoscaling.enabled=true,metrics.podMonitor=true,service.type=NodePort",
        "--set=frontend.extraArgs={--max-model-len=4096}",
        '--set-json=frontend.extraEnv=[{"name": "HF_TOKEN", "value": "x"}]',
        '--set-json=tolerations=[{"key": "gpu", "operator": "Exists"}]',
        "--set=imagePullSecrets[0].name=hub,nodeSelector.zone=a,podLabels.team=x,podAnnotations.note=y",
        "--set=engine.settings.shutdown_timeout_s=45.5,frontend.shutdownTimeoutSeconds=50,frontend.preStopSeconds=9",
    ],
    "everything off": [
        "--set=podDisruptionBudget.enabled=false,networkPolicy.enabled=false,metrics.annotations=false",
        "--set=mode=data-parallel",
    ],
}


def engines_settings(manifests: list[Manifest]) -> Settings:
    return next(workload.settings() for workload in Bundle(manifests).workloads if workload.engine)


def kinds(manifests: list[Manifest]) -> list[str]:
    return sorted(manifest["kind"] for manifest in manifests)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_valid_for_the_api(shape: str, version: str) -> None:
    assert schema_problems(render_chart(*SHAPES[shape]), version) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_is_rendered_alike_by_helm_3(shape: str) -> None:
    # They put manifests into different orders.
    by_helm_3, by_helm_4 = (
        sorted(render_chart(*SHAPES[shape], tools=tools), key=lambda one: (one["kind"], one["metadata"]["name"]))
        for tools in (kubernetes_tools.OLDEST, kubernetes_tools.NEWEST)
    )
    assert by_helm_3 == by_helm_4


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_fit(shape: str) -> None:
    assert problems(render_chart(*SHAPES[shape])) == []


def test_lints() -> None:
    assert "0 chart(s) failed" in run_tool("helm", "lint", "--strict", str(CHART))


def test_sidecar_is_one_pod() -> None:
    manifests = render_chart()
    assert kinds(manifests) == ["ConfigMap", "Deployment", "Pod", "PodDisruptionBudget", "Service"]
    (workload,) = Bundle(manifests).workloads
    (sidecar,) = workload.spec["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("engine", "Always")


def test_data_parallel_is_a_frontend_and_its_ranks() -> None:
    manifests = render_chart(*SHAPES["data parallel"])
    assert kinds(manifests).count("Service") == 3
    assert {"NetworkPolicy", "StatefulSet"} < set(kinds(manifests))
    frontend, ranks = Bundle(manifests).workloads
    assert frontend.frontend is not None
    assert frontend.engine is None
    assert frontend.manifest["spec"]["strategy"] == {"type": "Recreate"}
    assert [ranks.settings(index).start_rank for index in range(3)] == [0, 1, 2]


def test_both_ways_give_the_engine_the_same_container() -> None:
    containers = [workload.engine for shape in ("as it is", "data parallel") for workload in _engines(shape)]
    assert len(containers) == 2
    sidecar, rank = (dict(container or {}) for container in containers)
    assert sidecar.pop("restartPolicy") == "Always"
    assert [entry["name"] for entry in rank.pop("env")] == ["MOCKENGINE_START_RANK"]
    assert sidecar == rank


def _engines(shape: str) -> list[Any]:
    return [workload for workload in Bundle(render_chart(*SHAPES[shape])).workloads if workload.engine]


def test_settings_reach_the_engine_as_they_were_written(tmp_path: Path) -> None:
    wanted = {
        "seed": "18446744073709551615",
        "default_output_tokens": 1_000_000,
        "num_gpu_blocks": 10_000_000,
        "rejoin_grace_s": 0.25,
        "rejoin": False,
        "vllm_version": "0.30",
        "log_requests": None,
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"engine": {"settings": wanted}}))
    settings = engines_settings(render_chart(f"--values={values}"))
    expected = wanted | {"seed": 2**64 - 1, "log_requests": True, "shutdown_timeout_s": 15.0, "log_format": "json"}
    assert settings.model_dump(include=set(expected)) == expected


def test_a_change_of_the_settings_replaces_the_pods() -> None:
    def checksum(*flags: str) -> str:
        (workload,) = Bundle(render_chart(*flags)).workloads
        return str(workload.template["metadata"]["annotations"]["checksum/settings"])

    assert checksum() == checksum()
    assert checksum() != checksum("--set=engine.settings.seed=7")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--set=engine.settings.sede=7", "additional properties 'sede' not allowed"),
        ("--set=engine.settings.block_size=24", "/engine/settings/block_size"),
        ("--set-string=engine.settings.shutdown_timeout_s=86400.5", "/engine/settings/shutdown_timeout_s"),
        ("--set=engine.settings.max_num_seqs=0", "/engine/settings/max_num_seqs"),
        ("--set-json=engine.settings.vllm_version=0.33", "/engine/settings/vllm_version"),
        ("--set=engine.settings.admin_port=1", "additional properties 'admin_port' not allowed"),
        ("--set=mode=other", "/mode"),
        ("--set=engine.image.tags=x", "additional properties 'tags' not allowed"),
        ("--set=dataParallelSize=65", "one engine plays at most 64 ranks, not 65"),
        ("--set=mode=data-parallel,frontend.replicas=2", "there is one frontend"),
        ("--set=mode=data-parallel,autoscaling.enabled=true", "the number of ranks is fixed"),
    ],
)
def test_values_that_cannot_work_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ToolError) as refusal:
        render_chart(flags)
    assert words in str(refusal.value)


def test_every_setting_is_the_user_s_or_the_chart_s() -> None:
    schema = json.loads(SCHEMA.read_text())
    offered = set(schema["properties"]["engine"]["properties"]["settings"]["properties"])
    assert offered | SET_BY_THE_CHART == set(Settings.model_fields)
    assert not offered & SET_BY_THE_CHART
    data = next(each["data"] for each in render_chart() if each["kind"] == "ConfigMap")
    written = {name.removeprefix("MOCKENGINE_").lower() for name in data}
    # The rank comes from the pod.
    assert written >= SET_BY_THE_CHART - {"start_rank"}


def test_helm_test_asks_the_service() -> None:
    manifests = render_chart("--set=service.port=80")
    (smoke,) = (each for each in manifests if each["kind"] == "Pod")
    assert smoke["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = smoke["spec"]["containers"]
    (workload,) = Bundle(manifests).workloads
    assert workload.engine is not None
    assert container["args"] == ["smoke", f"--url=http://{RELEASE}-mockengine:80"]
    for key in ("image", "securityContext", "resources"):
        assert container[key] == workload.engine[key]
    assert smoke["spec"]["securityContext"] == workload.spec["securityContext"]


def test_helm_test_shows_the_key_that_the_frontend_wants() -> None:
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "mock", "key": "key"}}}
    others = [{"name": "HF_TOKEN", "value": "x"}]
    for extra, passed in ((others, None), ([*others, key], [key])):
        manifests = render_chart(f"--set-json=frontend.extraEnv={json.dumps(extra)}")
        (smoke,) = (each for each in manifests if each["kind"] == "Pod")
        assert smoke["spec"]["containers"][0].get("env") == passed
        (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
        assert deployment["spec"]["template"]["spec"]["containers"][0]["env"] == extra


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "mock"),
        (["--set=frontend.model=Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B"),
        (["--set=frontend.model=Qwen/Qwen3-0.6B,frontend.servedModelName=small"], "small"),
        (["--set=frontend.servedModelName=small"], "small"),
    ],
)
def test_model_is_served_by_its_own_name_unless_another_is_given(flags: list[str], name: str) -> None:
    (workload,) = Bundle(render_chart(*flags)).workloads
    assert workload.frontend is not None
    assert workload.flags(workload.frontend)["served-model-name"] == name
    notes = run_tool("helm", "install", RELEASE, str(CHART), "--dry-run=client", *flags).partition("NOTES:")[2]
    assert f'"model": "{name}"' in notes


@pytest.mark.parametrize("mode", ["sidecar", "data-parallel"])
def test_notes_name_what_is_there(mode: str) -> None:
    # A dry run on the client's side asks no cluster.
    flags = ["--dry-run=client", f"--set=mode={mode}", "--namespace=mine"]
    notes = run_tool("helm", "install", RELEASE, str(CHART), *flags).partition("NOTES:")[2]
    names = {manifest["metadata"]["name"] for manifest in render_chart(f"--set=mode={mode}")}
    for name in ("deployment/test-mockengine-frontend", "service/test-mockengine"):
        assert "--namespace mine" in notes
        assert name in notes
        assert name.partition("/")[2] in names
