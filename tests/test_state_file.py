# SPDX-License-Identifier: Apache-2.0
"""The state file: whole or not there, of one engine at a time, and never somebody else's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mockengine.state_file import Served, StateFile, StateFileError

SERVED = Served((2, 3), "tcp://frontend:29550", ("tcp://frontend:1", "tcp://frontend:2"))


@contextmanager
def used(path: Path | None) -> Iterator[StateFile]:
    """Use the file as an engine does while it runs."""
    file = StateFile(None if path is None else str(path))
    try:
        yield file
    finally:
        file.close()


def test_what_is_remembered_is_recalled_by_the_next_engine(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with used(path) as file:
        assert file.remember(SERVED) is None
    with used(path) as file:
        assert file.recall(range(2, 4)) == SERVED
    assert sorted(file.name for file in tmp_path.iterdir()) == ["state.json", "state.json.lock"]


def test_an_engine_of_other_ranks_is_no_successor(tmp_path: Path) -> None:
    with used(tmp_path / "state.json") as file:
        file.remember(SERVED)
        assert file.recall(range(2)) is None


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with used(path) as file:
        file.remember(SERVED)
        file.forget()
        assert file.recall([2, 3]) is None
        assert not path.exists()
        file.forget()


def test_a_new_file_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with used(path) as file:
        assert file.recall([0]) is None
        assert not path.exists()


def test_without_a_path_nothing_is_kept() -> None:
    with used(None) as file:
        assert file.remember(SERVED) is None
        assert file.recall([2, 3]) is None
        file.forget()


def test_a_file_that_another_engine_uses_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with used(path) as file:
        file.remember(SERVED)
        with pytest.raises(StateFileError, match="is used by another engine that runs"):
            StateFile(str(path))
        assert file.recall([2, 3]) == SERVED
    with used(path):
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"root:x:0:0:root",
        b"[]",
        b"{}",
        b'{"ranks": [0], "handshake_address": "a"}',
        b'{"ranks": [1e999], "handshake_address": "a", "outputs": []}',
        b'{"ranks": "01", "handshake_address": "a", "outputs": "ab"}',
        b'{"ranks": [0], "handshake_address": "a", "outputs": ["\\ud800"]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=["text", "list", "map", "incomplete", "number", "types", "surrogate", "depth", "binary"],
)
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(StateFileError, match=r"use the path of a new file|it is no text"):
        StateFile(str(path))
    assert path.read_bytes() == content
    with used(tmp_path / "another"):
        pass


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "state.json"
    with pytest.raises(
        StateFileError, match=f"state_file {path} cannot be used: No such file or directory .*use a path"
    ):
        StateFile(str(path))


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/null"), tmp_path / "link"):
        with pytest.raises(StateFileError, match="is no regular file"):
            StateFile(str(path))
    assert Path("/dev/null").is_char_device()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "state.json")
    with used(tmp_path / "link") as file:
        file.remember(SERVED)
    assert (tmp_path / "link").is_symlink()
    with used(tmp_path / "state.json") as file:
        assert file.recall([2, 3]) == SERVED


def test_zeros_are_no_state(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b"\0" * 20)
    with used(tmp_path / "state.json") as file:
        assert file.recall([2, 3]) is None


def test_a_file_that_cannot_be_written_later_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with used(folder / "state.json") as file:
        (folder / "state.json.lock").unlink()
        folder.rmdir()
        assert file.remember(SERVED) == "No such file or directory"
