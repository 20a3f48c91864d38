# SPDX-License-Identifier: Apache-2.0
"""The double blames an engine for a start-up that breaks a rule of `mockengine.testing.rules`, and no other.

What engines say once they serve is in `test_double_blames.py` and `test_double_forgives.py`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from mockengine.testing.conversation import Conversation
from mockengine.testing.double import EngineMistakeError, FrontendDouble, Rule
from mockengine.testing.joining import Joining, read_introduction
from mockengine.testing.rules import table
from mockengine.wire.codec import pack
from mockengine.wire.handshake import EngineStatus, Init, engine_identity
from mockengine.wire.lines import NEWEST, line_of_release
from mockengine.wire.messages import RequestType
from tests.support.bare_engine import BareEngine
from tests.testing.test_double_blames import BREAKS
from tests.wire.forms import plain, recorded

PAGE: Final = Path(__file__).parents[2] / "docs" / "testing.md"

Engines = list[BareEngine]


def greeted(engines: Engines) -> Engines:
    for engine in engines:
        engine.hello()
    for engine in engines:
        engine.take_init()
    return engines


def hello_twice(engines: Engines) -> None:
    for engine in greeted(engines[:1]):
        engine.hello()


def ready_twice(engines: Engines) -> None:
    for engine in greeted(engines[:1]):
        engine.ready()
        engine.ready()


def ready_at_once(engines: Engines) -> None:
    for engine in greeted(engines):
        engine.ready()


def other_subscription(engines: Engines) -> None:
    for engine in greeted(engines):
        engine.subscribe(b"\x01topic")


def introduced_twice(engines: Engines) -> None:
    for engine in greeted(engines):
        engine.ready()
    engines[0].introduce()
    engines[0].introduce()


def introduced_without_a_map(engines: Engines) -> None:
    for engine in greeted(engines):
        engine.introduce_raw(b"")
        engine.ready()


def introduced_with(**introduction: Any) -> Callable[[Engines], None]:
    def script(engines: Engines) -> None:
        for engine in greeted(engines):
            engine.introduce(**introduction)
            engine.ready()

    return script


START_UP: Final[list[tuple[Rule, Callable[[Engines], None], dict[str, Any]]]] = [
    (Rule.LOCAL, lambda engines: engines[0].hello(local=True), {}),
    (Rule.LOCAL, lambda engines: engines[0].hello(local=None), {}),
    (Rule.NOT_HEADLESS, lambda engines: engines[0].hello(headless=False), {}),
    (Rule.STATUS_UNREADABLE, lambda engines: engines[0].hello(status="WAIT"), {}),
    (Rule.HELLO_REPEATED, hello_twice, {}),
    (Rule.READY_BEFORE_INIT, lambda engines: engines[0].ready(), {}),
    (Rule.READY_BEFORE_GO_AHEAD, ready_at_once, {"coordinator": True}),
    (Rule.READY_REPEATED, ready_twice, {}),
    (Rule.READY_LACKS_KEY, ready_at_once, {"line": line_of_release("0.19.1")}),
    (Rule.SUBSCRIPTION_UNREADABLE, other_subscription, {"coordinator": True}),
    (Rule.READY_RESPONSE_UNREADABLE, introduced_without_a_map, {}),
    (Rule.READY_RESPONSE_LACKS_KEY, introduced_with(without=["dp_stats_address"]), {}),
    (Rule.READY_RESPONSE_LACKS_KEY, introduced_with(without=["max_loras"]), {"line": line_of_release("0.30.0")}),
    (Rule.READY_RESPONSE_LACKS_KEY, introduced_with(without=["instance_id"]), {"line": line_of_release("0.27.1")}),
    (Rule.READY_RESPONSE_WRONG_VALUE, introduced_with(dtype="auto"), {}),
    (Rule.READY_RESPONSE_WRONG_VALUE, introduced_with(block_size=0), {}),
    (Rule.READY_RESPONSE_WRONG_VALUE, introduced_with(max_num_seqs=-1), {}),
    (Rule.READY_RESPONSE_WRONG_VALUE, introduced_with(enable_sleep_mode=None), {}),
    (Rule.READY_RESPONSE_WRONG_VALUE, introduced_with(dp_stats_address="tcp://127.0.0.1:1"), {}),
    (Rule.READY_RESPONSE_LORA_CONTRADICTION, introduced_with(supports_lora=True), {}),
    (Rule.READY_RESPONSE_LORA_CONTRADICTION, introduced_with(max_loras=4), {}),
    (Rule.READY_RESPONSE_REPEATED, introduced_twice, {}),
]


@pytest.mark.parametrize(("rule", "script", "double"), START_UP, ids=lambda value: getattr(value, "name", ""))
def test_start_up_that_breaks_a_rule_is_blamed_for_it(
    rule: Rule, script: Callable[[Engines], None], double: dict[str, Any]
) -> None:
    with FrontendDouble(ranks=2, **double) as frontend, ExitStack() as stack:
        engines = [stack.enter_context(BareEngine(frontend.handshake_address, rank)) for rank in range(2)]
        with ThreadPoolExecutor() as pool:
            pool.submit(script, engines)
            with pytest.raises(EngineMistakeError) as caught:
                frontend.handshake(deadline_s=5)
        assert caught.value.rule is rule


def test_ready_that_came_before_init_left_is_blamed() -> None:
    joining = Joining(1, NEWEST, has_coordinator=False)
    joining.hear(engine_identity(0), [EngineStatus("HELLO").to_wire()])
    with pytest.raises(EngineMistakeError, match="READY_BEFORE_INIT"):
        joining.hear(engine_identity(0), [EngineStatus("READY").to_wire()])


def test_stranger_is_blamed_when_it_comes_instead_of_a_rank() -> None:
    with FrontendDouble() as frontend, BareEngine(frontend.handshake_address, 1) as engine:
        engine.hello()
        with pytest.raises(EngineMistakeError, match="STRANGER: rank 1"):
            frontend.handshake(deadline_s=0.2)


@pytest.mark.parametrize(
    ("release", "missing"), [("0.24.0", "instance_id"), ("0.27.1", "max_loras"), ("0.33.0", "coord_store_port")]
)
def test_ready_response_needs_only_the_keys_of_its_line(release: str, missing: str) -> None:
    with FrontendDouble(line=line_of_release(release)) as frontend, BareEngine(frontend.handshake_address) as engine:
        with ThreadPoolExecutor() as pool:
            pool.submit(introduced_with(without=[missing]), [engine])
            frontend.handshake()
        assert frontend.ready_responses[0, 0]["max_model_len"] == 4_096


def test_frontend_of_0_19_does_not_look_at_the_ready_response() -> None:
    line = line_of_release("0.19.1")
    assert read_introduction(0, [b""], Init((), ()), line) == {}
    assert read_introduction(0, [pack({"dtype": "auto"})], Init((), ()), line) == {"dtype": "auto"}


def test_ranks_need_not_wait_for_each_other() -> None:
    ranks = 32
    with FrontendDouble(ranks=ranks) as frontend, ExitStack() as stack:
        engines = [stack.enter_context(BareEngine(frontend.handshake_address, rank)) for rank in range(ranks)]

        def join_one_after_the_other() -> None:
            for engine in engines:
                introduced_with()([engine])

        with ThreadPoolExecutor() as pool:
            pool.submit(join_one_after_the_other)
            frontend.handshake()
        assert {rank for rank, _ in frontend.ready_responses} == set(range(ranks))
        for rank in range(ranks):
            assert [status.status for who, status in frontend.statuses if who == rank] == ["HELLO", "READY"]


def test_ready_that_comes_while_others_are_greeted_is_the_next_status() -> None:
    with FrontendDouble(ranks=2) as frontend, ExitStack() as stack:
        engines = [stack.enter_context(BareEngine(frontend.handshake_address, rank)) for rank in range(2)]
        with ThreadPoolExecutor() as pool:
            pool.submit(lambda: [introduced_with()([engine]) for engine in engines])
            frontend.greet()
            ready = EngineStatus("READY")
            assert sorted(frontend.next_status() for _ in range(2)) == [(0, ready), (1, ready)]


def test_every_rule_is_broken_here() -> None:
    by_itself = {Rule.STRANGER}
    assert {rule for rule, *_ in START_UP} | {rule for rule, _ in BREAKS} | by_itself == set(Rule)


def test_real_engine_is_blamed_only_for_the_scores_that_its_fake_model_lacks() -> None:
    names = ["request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params"]
    conversations: dict[str, Conversation] = {}
    blamed: list[str] = []
    for record in recorded("frames"):
        conversation = conversations.setdefault(record["source"], Conversation(1, NEWEST))
        frames = [bytes.fromhex(frame) for frame in record["frames"]]
        if record["direction"] == "output":
            try:
                conversation.hear(0, frames)
            except EngineMistakeError as mistake:
                blamed.append(mistake.rule.name)
            continue
        said = plain(frames[1])
        match RequestType(frames[0][0]):
            case RequestType.ADD:
                conversation.asked(dict(zip(names, said, strict=False)), 0, 0)
            case RequestType.ABORT:
                conversation.aborted(said)
            case _:
                conversation.called(said[1], said[2], 0, 0)
    assert blamed == ["LOGPROBS_MISSING"] * 2


def test_the_documentation_names_every_rule() -> None:
    assert f"\n{table()}\n" in PAGE.read_text(encoding="utf-8"), (
        "docs/testing.md has another table of rules; `python -m mockengine.testing.rules` prints the one to put there"
    )
