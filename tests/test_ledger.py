# SPDX-License-Identifier: Apache-2.0
"""The ledger: what was in flight when a process was killed, and nothing else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mockengine.ledger import Ledger, LostRequest


@contextmanager
def kept(path: Path) -> Iterator[Ledger]:
    """Keep a ledger as an engine does that is killed: whatever it has written stays."""
    ledger = Ledger(path)
    yield ledger
    ledger.close()


def lost(path: Path) -> set[str]:
    """Return what the next engine finds, which tells the clients of that."""
    with kept(path) as ledger:
        found = {each.request_id for each in ledger.take_lost()}
        ledger.turned()
    return found


def test_what_has_started_and_not_finished_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with kept(path) as ledger:
        ledger.started("a", 3, 2)
        ledger.started("b", 0, 0)
        ledger.started("é" * 100, 0, 1)
        ledger.finished("b")
        ledger.turned()
    with kept(path) as successor:
        found = sorted(successor.take_lost(), key=lambda each: each.request_id)
        assert found == [LostRequest("a", 3, 2), LostRequest("é" * 100, 0, 1)]
        assert successor.take_lost() == []


def test_what_has_finished_is_kept_until_that_has_been_sent(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with kept(path) as ledger:
        ledger.started("a", 0, 0)
        ledger.finished("a")
    assert lost(path) == {"a"}


def test_what_nobody_has_been_told_of_is_left_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with kept(path) as ledger:
        ledger.started("a", 0, 0)
    with kept(path):
        pass
    assert lost(path) == {"a"}
    assert lost(path) == set()


def test_there_is_room_for_many_and_slots_are_used_again(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with kept(path) as ledger:
        for number in range(5_000):
            ledger.started(f"r{number}", 0, 0)
        for number in range(0, 5_000, 2):
            ledger.finished(f"r{number}")
        ledger.turned()
        size = path.stat().st_size
        for number in range(100_000):
            ledger.started("again", 0, 0)
            ledger.finished("again")
            if number % 10 == 0:
                ledger.turned()
        ledger.turned()
        assert path.stat().st_size == size
    assert lost(path) == {f"r{number}" for number in range(1, 5_000, 2)}


def test_an_id_that_is_too_long_and_one_that_is_there_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with kept(path) as ledger:
        ledger.started("x" * 251, 0, 0)
        ledger.started("x" * 250, 0, 0)
        ledger.started("x" * 250, 0, 0)
    assert lost(path) == {"x" * 250}


@pytest.mark.parametrize("data", [b"", b"\xff" * 1_000, bytes(range(256)) * 20, b"\x01" * 256])
def test_a_file_that_is_none_holds_nothing_that_cannot_be_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "requests"
    path.write_bytes(data)
    assert all(isinstance(each, str) for each in lost(path))


def test_a_full_disk_costs_what_there_is_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests"

    def full(*_: int) -> None:
        raise OSError("no space")

    with kept(path) as ledger:
        monkeypatch.setattr(os, "posix_fallocate", full)
        for number in range(2_000):
            ledger.started(f"r{number}", 0, 0)
        monkeypatch.undo()
    assert len(lost(path)) == 1_024
