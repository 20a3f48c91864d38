# SPDX-License-Identifier: Apache-2.0
"""Renders what `deploy/` holds for Kubernetes, with the real tools, and holds it against the API's own schemas."""

from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes_validate import utils as schemas

from tests.support import kubernetes_tools
from tests.support.kubernetes_tools import Layer, run_tool
from tests.support.pod_container import Manifest

DEPLOY: Final = Path(__file__).parent.parent.parent / "deploy"
KUBERNETES: Final = DEPLOY / "kubernetes"
CHART: Final = DEPLOY / "helm" / "mockengine"
RELEASE: Final = "test"

OLDEST: Final = "1.29"
NEWEST: Final = schemas.latest_version()
# Kinds that an operator adds to a cluster: the API's own schemas do not know them.
_CUSTOM_KINDS: Final = {"PodMonitor"}


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which the last would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        keys = [key.value for key, _ in node.value]
        if repeated := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {', '.join(repeated)} stands there twice")
        return super().construct_mapping(node, deep)


def kustomizations() -> list[Path]:
    """Return every folder that can be applied; components cannot, they are part of another."""
    files = KUBERNETES.rglob("kustomization.yaml")
    return sorted(file.parent for file in files if parse(file.read_text())[0]["kind"] == "Kustomization")


def parse(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, Loader=_UniqueKeys) if manifest is not None]


@cache
def _kustomize(folder: Path, tools: Layer) -> str:
    return run_tool("kubectl", "kustomize", str(folder), layer=tools)


@cache
def _template(tools: Layer, *flags: str) -> str:
    return run_tool("helm", "template", RELEASE, str(CHART), f"--kube-version={OLDEST}", *flags, layer=tools)


def render_kustomization(folder: Path, tools: Layer = kubernetes_tools.NEWEST) -> list[Manifest]:
    """Return what `kubectl apply -k` would send."""
    return parse(_kustomize(folder, tools))


def render_chart(*flags: str, tools: Layer = kubernetes_tools.NEWEST) -> list[Manifest]:
    """Return what `helm install` would send; flags are helm's, such as `--set=mode=data-parallel`."""
    return parse(_template(tools, *flags))


def schema_problems(manifests: list[Manifest], version: str) -> list[str]:
    """Return what the schemas of this Kubernetes version do not allow, unknown fields included."""
    problems = []
    for manifest in manifests:
        if manifest["kind"] in _CUSTOM_KINDS:
            continue
        try:
            schemas.validate(manifest, version, strict=True)
        except schemas.ValidationError as error:
            path = ".".join(str(step) for step in error.absolute_path)
            problems.append(f"{manifest['kind']} {manifest['metadata']['name']}: {path}: {error.message}")
        except schemas.SchemaNotFoundError as error:
            problems.append(error.message)
    return problems
