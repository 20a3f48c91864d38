# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own mock engine is tested for, as a test of this one through a frontend double."""

from pathlib import Path

import pytest

from mockengine.testing.double import FrontendDouble, UtilityFailedError
from mockengine.wire.handshake import EngineStatus
from mockengine.wire.outputs import FinishReason
from tests.support.engine_thread import EngineThread


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_connects_over(over: str, tmp_path: Path) -> None:
    with (
        FrontendDouble(ipc_directory=tmp_path if over == "ipc" else None) as frontend,
        EngineThread(frontend) as engine,
    ):
        frontend.handshake()
        frontend.add("r1", max_tokens=3)
        assert len(frontend.reply("r1").tokens) == 3
        assert engine.wait_for("engine ready")["clients"] == 1


def test_ranks_have_identities_of_their_own() -> None:
    with FrontendDouble(ranks=2) as frontend, EngineThread(frontend):
        frontend.handshake()
        # The double addresses ranks by their identities 00 00 and 01 00.
        assert sorted(rank for rank, status in frontend.statuses if status == EngineStatus("HELLO")) == [0, 1]
        assert sorted(rank for rank, _ in frontend.ready_responses) == [0, 1]
        for rank in (0, 1):
            frontend.add(f"r{rank}", rank=rank)
            frontend.reply(f"r{rank}")
            assert frontend.steps[0][-1].engine_index == rank


def test_every_update_carries_one_token_and_the_last_one_the_reason() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend):
        frontend.handshake()
        frontend.add("r1", max_tokens=4)
        reply = frontend.reply("r1")
        assert [len(output.new_token_ids) for output in reply.outputs] == [1, 1, 1, 1]
        assert [output.finish_reason for output in reply.outputs] == [None, None, None, FinishReason.LENGTH]


def test_last_chunk_is_clipped() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend, output_token_chunk_size=3):
        frontend.handshake()
        frontend.add("r1", max_tokens=7)
        assert [len(output.new_token_ids) for output in frontend.reply("r1").outputs] == [3, 3, 1]


def test_tokens_lie_within_the_vocabulary_and_follow_from_the_seed() -> None:
    replies = []
    for seed in (0, 0, 1):
        with FrontendDouble() as frontend, EngineThread(frontend, seed=seed, vocab_size=100):
            frontend.handshake()
            frontend.add("r1", max_tokens=200)
            replies.append(frontend.reply("r1").tokens)
    assert replies[0] == replies[1] != replies[2]
    assert set(replies[0]) <= set(range(100))


def test_aborted_request_falls_silent() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend) as engine:
        frontend.handshake()
        frontend.add("r1", max_tokens=30_000)
        frontend.listen()
        frontend.abort("r1")
        engine.wait_for("request finished", lambda entry: entry["finish_reason"] == "abort")
        frontend.load()
        assert frontend.heard("r1").finish_reason is None
        assert frontend.hears_nothing()


def test_utility_minimum() -> None:
    with FrontendDouble() as frontend, EngineThread(frontend):
        frontend.handshake()
        assert frontend.call("get_supported_tasks") == ["generate"]
        assert frontend.call("is_sleeping") is False
        assert frontend.call("reset_prefix_cache", False, False) is True  # noqa: FBT003 - as on the wire
        assert frontend.call("sleep", 1, "abort") is None
        with pytest.raises(UtilityFailedError, match="has no attribute 'nonsense'"):
            frontend.call("nonsense")


def test_several_clients_each_hear_of_their_own_requests() -> None:
    with FrontendDouble(clients=2) as frontend, EngineThread(frontend):
        frontend.handshake()
        assert sorted(frontend.ready_responses) == [(0, 0), (0, 1)]
        frontend.add("a", client=0)
        frontend.add("b", client=1)
        assert len(frontend.reply("a", client=0).tokens) == 4
        assert len(frontend.reply("b", client=1).tokens) == 4
        assert frontend.call("is_sleeping", client=1) is False
