# SPDX-License-Identifier: Apache-2.0
"""Fetching the Rust frontend, with a fake pip: what is kept, what is reported, and how each failure reads."""

import errno
import os
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mockengine.testing import fetch
from mockengine.testing.fetch import FetchError, PipResult, rust_frontend

EXECUTABLE = b"\x7fELF pretending"

NO_MATCH = """\
ERROR: Could not find a version that satisfies the requirement vllm==0.33.0 (from versions: {})
ERROR: No matching distribution found for vllm==0.33.0
"""


class FakePip:
    """Puts a wheel into the asked directory, or fails as it is told."""

    def __init__(self, *, stderr: str = "", members: Sequence[str] = ("vllm/vllm-rs", "vllm/__init__.py")) -> None:
        self.stderr = stderr
        self.members = members
        self.calls: list[list[str]] = []
        self.in_terminal: list[bool] = []

    def __call__(self, arguments: Sequence[str], temporary: Path, on_line: Callable[[str], None] | None) -> PipResult:
        self.calls.append(list(arguments))
        self.in_terminal.append(on_line is None)
        if self.stderr:
            return PipResult(1, self.stderr)
        wheel = f"vllm-{arguments[-1].removeprefix('vllm==')}-cp38-abi3-manylinux_2_28_x86_64.whl"
        if on_line is not None:
            on_line("Collecting vllm")
            on_line(f"Downloading {wheel} (336.4 MB)")
        with zipfile.ZipFile(Path(arguments[arguments.index("--dest") + 1]) / wheel, "w") as archive:
            for member in self.members:
                archive.writestr(member, EXECUTABLE)
        assert temporary.is_dir()
        return PipResult(0, "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mockengine"


def test_the_executable_is_kept_and_nothing_else(cache: Path) -> None:
    path = rust_frontend("0.33.0", progress=False, pip=FakePip())
    assert path == cache / "vllm-rs" / "0.33.0" / "vllm-rs"
    assert path.read_bytes() == EXECUTABLE
    assert os.access(path, os.X_OK)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["lock", "vllm-rs"]


def test_pip_is_asked_for_the_one_wheel_without_its_requirements() -> None:
    pip = FakePip()
    rust_frontend("0.30.0", progress=False, pip=pip)
    (call,) = pip.calls
    assert call[0] == "download"
    assert call[-1] == "vllm==0.30.0"
    assert {"--no-deps", "--only-binary", ":all:", "--no-cache-dir"} <= set(call)


def test_a_cached_executable_is_returned_without_pip_or_report() -> None:
    pip, lines = FakePip(), list[str]()
    first = rust_frontend("0.33.0", progress=False, pip=pip)
    assert rust_frontend("0.33.0", progress=lines.append, pip=pip) == first
    assert (len(pip.calls), lines) == (1, [])


def test_each_version_has_its_own_executable() -> None:
    paths = {rust_frontend(version, progress=False, pip=FakePip()) for version in ("0.30.0", "0.33.0")}
    assert len(paths) == 2


def test_the_report_names_the_version_and_the_size() -> None:
    lines = list[str]()
    path = rust_frontend("0.33.0", progress=lines.append, pip=FakePip())
    assert lines == [
        "fetching the Rust frontend of vLLM 0.33.0: a download of 250 to 350 MB, of which 60 MB stay",
        "Downloading vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl (336.4 MB)",
        f"the Rust frontend of vLLM 0.33.0 is at {path}",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_pip_draws_its_bar_only_in_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    pip = FakePip()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    rust_frontend("0.33.0", pip=pip)
    assert pip.in_terminal == [is_terminal]
    bar = pip.calls[0][pip.calls[0].index("--progress-bar") + 1]
    assert bar == ("on" if is_terminal else "off")


def test_two_at_once_fetch_once_and_both_have_it() -> None:
    both_asked = threading.Barrier(2)
    pip = FakePip()

    def ask(_number: int) -> Path:
        both_asked.wait(10)
        return rust_frontend("0.33.0", progress=False, pip=pip)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ask, range(2))
    assert first == second
    assert len(pip.calls) == 1


def test_what_a_killed_process_left_behind_is_cleared_away(cache: Path) -> None:
    left = cache / "vllm-rs" / "0.33.0" / "partial"
    left.mkdir(parents=True)
    (left / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl").write_bytes(b"half a wheel")
    assert rust_frontend("0.33.0", progress=False, pip=FakePip()).read_bytes() == EXECUTABLE
    assert not left.exists()


@pytest.mark.parametrize("version", ["", "0", "../0.33.0", "0.33.0/..", "latest", "0.33.0 --pre", "-r"])
def test_what_is_no_version_is_refused_before_anything_is_made(version: str, cache: Path) -> None:
    with pytest.raises(FetchError, match="is no release number"):
        rust_frontend(version, pip=FakePip())
    assert not cache.exists()


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("/usr/bin/python3: No module named pip\n", "has no pip, which downloads the frontend"),
        (
            NO_MATCH.format("0.32.0, 0.33.0"),
            r"no wheel of vllm==0\.33\.0 for .* \(the newest it has: 0\.32\.0, 0\.33\.0\)",
        ),
        (NO_MATCH.format("none"), r"no wheel of vllm==0\.33\.0 for .* \(releases have wheels for Linux with glibc\)"),
        ("WARNING: broken by 'NewConnectionError'\n" + NO_MATCH.format("none"), "pip does not reach its package index"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "no space left for .* free some, or set XDG_CACHE_HOME",
        ),
        ("ERROR: something new\n", "exit code 1\nThe end of pip's output:\nERROR: something new"),
    ],
)
def test_each_failure_of_pip_says_what_to_do(stderr: str, said: str) -> None:
    with pytest.raises(FetchError, match=said):
        rust_frontend("0.33.0", progress=False, pip=FakePip(stderr=stderr))


def test_a_wheel_without_the_frontend_is_said_to_be_too_old() -> None:
    with pytest.raises(FetchError, match=r"has no vllm/vllm-rs: .* \(releases from 0\.22\.1 on have one"):
        rust_frontend("0.21.0", progress=False, pip=FakePip(members=["vllm/__init__.py"]))


def test_a_damaged_wheel_is_said_to_be_damaged() -> None:
    def pip(arguments: Sequence[str], _temporary: Path, _on_line: Callable[[str], None] | None) -> PipResult:
        (Path(arguments[arguments.index("--dest") + 1]) / "vllm-0.33.0-x.whl").write_bytes(b"no zip")
        return PipResult(0, "")

    with pytest.raises(FetchError, match=r"vllm-0\.33\.0-x\.whl is damaged"):
        rust_frontend("0.33.0", progress=False, pip=pip)


def test_a_failure_leaves_nothing_behind_and_can_be_tried_again(cache: Path) -> None:
    with pytest.raises(FetchError):
        rust_frontend("0.33.0", progress=False, pip=FakePip(stderr="ERROR: something new"))
    assert [entry.name for entry in (cache / "vllm-rs" / "0.33.0").iterdir()] == ["lock"]
    assert rust_frontend("0.33.0", progress=False, pip=FakePip()).exists()


def test_a_full_disk_while_unpacking_is_said_to_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(FetchError, match="no space left for"):
        rust_frontend("0.33.0", progress=False, pip=FakePip())


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"the cache directory .*file.* cannot be used: .* \(set XDG_CACHE_HOME"):
        rust_frontend("0.33.0", progress=False, pip=FakePip())


@pytest.mark.parametrize("configured", ["", "relative/path"])
def test_the_cache_is_in_the_home_directory_unless_told_otherwise(
    configured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", configured)
    assert fetch.cache_directory() == Path.home() / ".cache" / "mockengine"


def test_run_pip_relays_its_lines_and_its_failure(tmp_path: Path) -> None:
    lines = list[str]()
    assert fetch.run_pip(["--version"], tmp_path, lines.append) == PipResult(0, "")
    assert lines[0].startswith("pip ")
    failed = fetch.run_pip(["no-such-command"], tmp_path, lines.append)
    assert failed.returncode != 0
    assert "no-such-command" in failed.stderr


def test_the_command_prints_one_path_a_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [cache / "vllm-rs" / version / "vllm-rs" for version in ("0.30.0", "0.33.0")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    assert fetch.main(["0.30.0", "0.33.0"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path) for path in paths]
    assert fetch.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [str(paths[1])]


def test_the_command_says_why_a_version_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["newest"]) == 1
    assert capsys.readouterr().err == "vLLM version 'newest' is no release number (write it like 0.33.0)\n"
