# SPDX-License-Identifier: Apache-2.0
"""The state file: whole or not there, and never somebody else's."""

from pathlib import Path

import pytest

from mockengine.state_file import Served, StateFile, StateFileError

SERVED = Served((2, 3), "tcp://frontend:29550", ("tcp://frontend:1", "tcp://frontend:2"))


def test_what_is_remembered_is_recalled_by_the_next_engine(tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    assert StateFile(path).remember(SERVED) is None
    assert StateFile(path).recall(range(2, 4)) == SERVED
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_an_engine_of_other_ranks_is_no_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    StateFile(path).remember(SERVED)
    assert StateFile(path).recall(range(2)) is None


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path / "state.json"))
    file.remember(SERVED)
    file.forget()
    assert file.recall([2, 3]) is None
    assert list(tmp_path.iterdir()) == []
    file.forget()


def test_a_new_file_holds_nobody(tmp_path: Path) -> None:
    assert StateFile(str(tmp_path / "state.json")).recall([0]) is None


def test_without_a_path_nothing_is_kept() -> None:
    file = StateFile(None)
    assert file.remember(SERVED) is None
    assert file.recall([2, 3]) is None
    file.forget()


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
    with pytest.raises(StateFileError, match="use the path of a new file"):
        StateFile(str(path))
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "state.json"
    with pytest.raises(
        StateFileError, match=f"state_file {path} cannot be used: No such file or directory .*use a path"
    ):
        StateFile(str(path))


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="Is a directory"):
        StateFile(str(tmp_path))


def test_a_file_that_cannot_be_written_later_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    file = StateFile(str(folder / "state.json"))
    folder.rmdir()
    assert file.remember(SERVED) == "No such file or directory"
