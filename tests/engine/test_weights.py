# SPDX-License-Identifier: Apache-2.0
"""Weights: the order in which a trainer replaces them, their version, and their checksums."""

from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from mockengine.engine.config import ControlConfig
from tests.support.rig import CONFIG, Rig
from tests.support.runners import answer, failure

NOT_CONFIGURED = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
ACTIVE = "start_weight_update called while a weight update is already active. Call finish_weight_update first."
NOT_STARTED = "start_weight_update must be called before update_weights."
NOT_MATCHING = "finish_weight_update called without a matching start_weight_update."
NOT_CONNECTED = "NCCL weight transfer not initialized. Call init_transfer_engine() first."
NO_DRAFT_MODEL = "Draft model weight update requested, but no draft model is configured."

Step: TypeAlias = tuple[str, dict[str, Any]]

INIT: Step = ("init_weight_transfer_engine", {"init_info": {"master_address": "trainer"}})
START: Step = ("start_weight_update", {})
UPDATE: Step = ("update_weights", {"update_info": {"names": ["w"]}})
FINISH: Step = ("finish_weight_update", {})
SHUTDOWN: Step = ("shutdown_weight_transfer_engine", {})
DRAFT: Step = ("start_draft_weight_update", {})


def rig_of(backend: str | None = "nccl", world_size: int = 1, ranks: int = 1) -> Rig:
    control = ControlConfig(world_size=world_size, weight_transfer_backend=backend)
    return Rig(replace(CONFIG, control=control), ranks=ranks)


def told(rig: Rig, step: Step) -> str | None:
    """Tell the workers to do something; return why they do not."""
    method, kwargs = step
    reason = failure(rig, "collective_rpc", method, None, [], kwargs)
    return None if reason is None else reason.removeprefix("Call to collective_rpc method failed: ")


def checksums(rig: Rig) -> list[dict[str, str]]:
    sums: list[dict[str, str]] = answer(rig, "compute_weight_checksums")
    assert answer(rig, "collective_rpc", "compute_weight_checksums", None, [], None) == sums
    return sums


@pytest.mark.parametrize(
    ("steps", "reasons"),
    [
        ([INIT, START, UPDATE, UPDATE, FINISH, START, FINISH, SHUTDOWN], [None] * 8),
        ([INIT, UPDATE, FINISH], [None, NOT_STARTED, NOT_MATCHING]),
        ([INIT, START, START, FINISH, FINISH], [None, None, ACTIVE, None, NOT_MATCHING]),
        # A part that cannot be received ends the update.
        ([START, UPDATE, UPDATE], [None, NOT_CONNECTED, NOT_STARTED]),
        (
            [INIT, START, ("update_weights", {}), FINISH],
            [None, None, "update_info: nil where a map is expected", NOT_MATCHING],
        ),
        ([INIT, START, SHUTDOWN], [None, None, "Cannot release a trainer connection during a weight update"]),
        ([INIT, SHUTDOWN, START, UPDATE], [None, None, None, NOT_CONNECTED]),
        ([INIT, DRAFT], [None, NO_DRAFT_MODEL]),
        ([("init_weight_transfer_engine", {})], ["init_info: nil where a map is expected"]),
        ([("init_weight_transfer_engine", {"init_info": [1]})], ["init_info: array of 1 where a map is expected"]),
    ],
)
def test_updates_go_in_their_order(steps: list[Step], reasons: list[str | None]) -> None:
    rig = rig_of()
    assert [told(rig, step) for step in steps] == reasons


@pytest.mark.parametrize("step", [INIT, START, DRAFT, UPDATE, FINISH])
def test_without_a_backend_nothing_is_updated(step: Step) -> None:
    assert told(rig_of(None), step) == NOT_CONFIGURED


def test_backends_differ() -> None:
    assert [told(rig_of("ipc"), step) for step in (START, DRAFT)] == [None, NO_DRAFT_MODEL]
    rig = rig_of("ipc")
    assert [told(rig, step) for step in (START, UPDATE, FINISH)] == [None] * 3
    assert told(rig_of("nccl_m2n"), DRAFT) == "M2NWeightTransferEngine does not support draft model weight updates."
    rig = rig_of("sharded_rdt")
    assert [told(rig, step) for step in (START, UPDATE)] == [
        None,
        "Sharded RDT engine not initialized. Call init_transfer_engine() first.",
    ]


def test_parts_may_be_told_by_position_and_for_every_worker() -> None:
    rig = rig_of(world_size=2)
    for method, args in (
        ("init_weight_transfer_engine", [{}]),
        ("start_weight_update", []),
        ("update_weights", [[{}, {}]]),
    ):
        assert answer(rig, "collective_rpc", method, 5.0, args, {}) == [None, None]


def test_checksums_name_each_tensor_of_each_worker_once() -> None:
    rig = rig_of(world_size=2, ranks=2)
    sums = [worker for rank in (0, 1) for worker in answer(rig, "compute_weight_checksums", rank=rank)]
    assert len(sums) == 4
    names = [name for worker in sums for name in worker]
    assert len(set(names)) == len(names) == 12
    assert "dp1:pp0:pcp0:tp0:lm_head.weight" in names
    assert all(len(digest) == 64 for worker in sums for digest in worker.values())


def test_checksums_tell_whether_weights_have_changed() -> None:
    rig = rig_of()
    original = checksums(rig)
    assert checksums(rig_of()) == original
    for step in (INIT, START):
        told(rig, step)
        assert checksums(rig) == original
    seen = [original]
    for _ in range(2):
        told(rig, UPDATE)
        assert checksums(rig) not in seen
        seen.append(checksums(rig))
    told(rig, FINISH)
    assert checksums(rig) == seen[-1]
    told(rig, ("reset_weights", {}))
    assert checksums(rig) not in seen
    told(rig, ("reload_weights", {}))
    assert checksums(rig) == original


def test_the_deeper_sleep_loses_them() -> None:
    rig = rig_of()
    original = checksums(rig)
    for level, is_same in ((1, True), (2, False)):
        answer(rig, "sleep", level, "abort")
        answer(rig, "wake_up", None)
        assert (checksums(rig) == original) is is_same
    told(rig, ("reload_weights", {}))
    assert checksums(rig) == original


@pytest.mark.parametrize("args", [("/models",), ("/models", "*", 1_000)])
def test_there_is_nothing_to_save(args: tuple[Any, ...]) -> None:
    reason = "this engine has no weights that could be saved"
    assert failure(rig_of(), "save_sharded_state", *args) == f"Call to save_sharded_state method failed: {reason}"
    assert told(rig_of(), ("save_sharded_state", {"path": "/models"})) == reason
