# SPDX-License-Identifier: Apache-2.0
"""Requests that end before their time: aborted by the frontend, or with the engine."""

from dataclasses import replace

from mockengine.wire.messages import Add
from mockengine.wire.outputs import FinishReason, StepOutputs, UtilityReply
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig, request

DATA_PARALLEL = replace(CONFIG, data_parallel_size=2)


def test_aborted_request_is_dropped_at_once_and_nothing_is_said_of_it() -> None:
    rig = Rig()
    rig.add(request("a"), request("b"))
    rig.step()
    assert rig.abort("a") == []
    rig.run()
    assert len(rig.tokens("a")) == 1
    assert rig.finish_reason("a") is None
    assert len(rig.tokens("b")) == 4
    assert [(served.request_id, reason) for served, reason, _ in rig.watcher.finished] == [
        ("a", "abort"),
        ("b", "length"),
    ]


def test_abort_works_from_any_client_and_before_the_first_step() -> None:
    rig = Rig(replace(CONFIG, clients=2))
    rig.add(request("a"))
    rig.abort("a", client=1)
    assert rig.ranks.num_requests == 0


def test_abort_of_unknown_and_finished_requests_is_ignored() -> None:
    rig = Rig()
    rig.add(request())
    rig.run()
    heard = len(rig.heard)
    assert rig.abort("r1", "never seen") == []
    rig.run()
    assert len(rig.heard) == heard


def test_load_is_told_to_be_gone_after_the_last_request_was_aborted() -> None:
    rig = Rig()
    rig.add(request())
    rig.step()
    rig.abort("r1")
    rig.run()
    last = rig.heard[-1][1]
    assert isinstance(last, StepOutputs)
    assert last.scheduler_stats is not None
    assert last.scheduler_stats.num_running_reqs == 0


def test_every_finished_and_aborted_id_is_reported_once_where_ranks_are_balanced() -> None:
    rig = Rig(DATA_PARALLEL)
    rig.add(request("a", max_tokens=2), request("b"), request("c"))
    rig.step()
    rig.abort("b", "b")
    rig.run()
    reported = [
        request_id
        for envelope in rig.to(0)
        if isinstance(envelope, StepOutputs)
        for request_id in envelope.finished_requests
    ]
    assert sorted(reported) == ["a", "b", "c"]


def test_finished_id_is_reported_beside_its_final_output() -> None:
    rig = Rig(DATA_PARALLEL)
    rig.add(request(max_tokens=1))
    envelope = rig.step()[0]
    assert isinstance(envelope, StepOutputs)
    assert [output.request_id for output in envelope.outputs] == ["r1"]
    assert envelope.finished_requests == ("r1",)


def test_single_rank_reports_no_finished_ids() -> None:
    rig = Rig()
    rig.add(request())
    rig.run()
    assert all(not envelope.finished_requests for envelope in rig.to(0) if isinstance(envelope, StepOutputs))


def test_request_to_be_aborted_immediately_gets_no_token() -> None:
    rig = Rig(DATA_PARALLEL)
    rig.add(request(abort_immediately=True))
    rig.run()
    assert rig.outputs("r1") == []
    (envelope,) = rig.to(0)
    assert isinstance(envelope, StepOutputs)
    assert envelope.finished_requests == ("r1",)


def test_leaving_engine_ends_everything_with_abort_and_then_idle_statistics() -> None:
    rig = Rig(replace(CONFIG, clients=2))
    rig.add(request("a"), request("b", client=1))
    rig.step()
    engine = rig.ranks.engines[0]
    rig._hear(engine.abort_everything(rig.now))
    rig.run()
    assert [rig.finish_reason(name) for name in ("a", "b")] == [FinishReason.ABORT, FinishReason.ABORT]
    last = rig.to(0)[-1]
    assert isinstance(last, StepOutputs)
    assert last.scheduler_stats is not None
    assert last.scheduler_stats.num_running_reqs == 0


def test_leaving_engine_takes_no_new_work_but_lets_running_requests_go_on() -> None:
    rig = Rig()
    rig.add(request("a"))
    rig.ranks.begin_shutdown()
    (refused,) = rig.receive(Add(request("b")))
    assert isinstance(refused, StepOutputs)
    assert refused.outputs[0].finish_reason is FinishReason.ABORT
    answer = rig.receive(UtilityCall(0, 3, "is_sleeping"))
    assert answer == [UtilityReply(0, rig.now, 3, None, "Server shutting down")]
    rig.run()
    assert rig.finish_reason("a") is FinishReason.LENGTH
