# SPDX-License-Identifier: Apache-2.0
"""Which requests, calls, joins and moments are struck, and that it is the same ones every time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mockengine.faults.injector import Injector, check_needs
from mockengine.faults.of_joining import LateReady
from mockengine.faults.rules import RulesError, rules_of
from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.located import Located
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.outputs import FinishReason
from mockengine.wire.utility import UtilityCall
from tests.support.scripts import asking
from tests.support.stack import MODEL


def injector(*rules: Mapping[str, Any], seed: int = 0) -> Injector:
    made = Injector(rules_of(Located(list(rules))), seed)
    made.begin(100.0)
    return made


def request(request_id: str = "r", *, now: float = 100.0, **fields: Any) -> tuple[Asked, float]:
    asked = asking([1, 2, 3], **fields)
    return Asked(replace(asked.request, request_id=request_id), asked.params, asked.key, None), now


def struck(made: Injector, count: int, **fields: Any) -> list[int]:
    """Return which of so many requests are struck, from 1 on."""
    asked, now = request(**fields)
    return [number for number in range(1, count + 1) if made.on_request(asked, 0, now) is not None]


def when(**conditions: Any) -> dict[str, Any]:
    return {"what": "error", "when": conditions}


def test_without_conditions_every_request_is_struck() -> None:
    assert struck(injector(when()), 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"nth": 3}, [3]),
        ({"nth": [2, 5]}, [2, 5]),
        ({"every": 3}, [3, 6]),
        ({"after": 4}, [5, 6, 7]),
        ({"after": 1, "every": 2}, [3, 5, 7]),
        ({"times": 2}, [1, 2]),
        ({"after": 2, "times": 1}, [3]),
        ({"probability": 0}, []),
        ({"probability": 1}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_requests_are_counted(conditions: dict[str, Any], expected: list[int]) -> None:
    assert struck(injector(when(**conditions)), 7) == expected


def test_a_share_is_struck_and_the_same_ones_with_the_same_seed() -> None:
    first = struck(injector(when(probability=0.3)), 2_000)
    assert struck(injector(when(probability=0.3)), 2_000) == first
    assert 500 < len(first) < 700
    assert struck(injector(when(probability=0.3), seed=1), 2_000) != first
    other = {"name": "other", "what": "error", "when": {"probability": 0.3}}
    assert struck(injector(other), 2_000) != first


def test_only_requests_of_which_all_holds_are_counted() -> None:
    made = injector(when(request_id="a", nth=2))
    found = [made.on_request(*_placed(name)) is not None for name in ("a1", "b1", "a2", "a3")]
    assert found == [False, False, True, False]


def _placed(request_id: str) -> tuple[Asked, int, float]:
    asked, now = request(request_id)
    return asked, 0, now


def test_conditions_on_a_request() -> None:
    assert struck(injector(when(min_prompt_tokens=3)), 1) == [1]
    assert struck(injector(when(min_prompt_tokens=4)), 1) == []
    assert struck(injector(when(lora="a")), 1, lora="a") == [1]
    assert struck(injector(when(lora="a")), 1) == []
    assert struck(injector(when(rank=1)), 1) == []
    assert struck(injector(when(rank=0)), 1) == [1]
    tokenizer = Tokenizer.load(MODEL)
    asked = asking("hello there", tokenizer)
    assert injector(when(prompt_contains="there")).on_request(asked, 0, 100.0) is not None
    assert injector(when(prompt_contains="where")).on_request(asked, 0, 100.0) is None


def test_times_count_from_when_the_engine_was_ready() -> None:
    made = injector(when(from_s=10, until_s=20))
    moments = (105.0, 110.0, 119.9, 120.0)
    assert [struck(made, 1, now=now) for now in moments] == [[], [1], [1], []]
    assert struck(Injector(rules_of(Located([when(from_s=0)])), 0), 1) == []


def test_of_what_becomes_of_a_request_the_first_rule_decides_and_edits_add_up() -> None:
    made = injector(
        {"what": "drop"},
        {"name": "first", "what": {"fault": "error", "code": "x"}},
        {"what": "hang"},
        {"what": "unknown_id"},
    )
    found = made.on_request(*_placed("r"))
    assert found is not None
    assert found.wish is not None
    assert found.wish.finish_reason is FinishReason.ERROR
    assert len(found.edits) == 2
    assert [made.struck(name) for name in ("first", "hang", "drop", "absent")] == [1, 0, 1, 0]


def test_a_client_may_name_a_rule() -> None:
    made = injector(when(steered=True), {"name": "crashes", "what": "crash"})
    asked, now = request()
    assert made.on_request(asked, 0, now) is None
    assert made.on_request(asked, 0, now, "error") is not None
    known = r"requests may ask for hang, stall, error, abort, error"
    with pytest.raises(ReplyError, match=rf"there is none of the name nope \({known}\)"):
        made.on_request(asked, 0, now, "nope")
    with pytest.raises(ReplyError, match="crashes"):
        made.on_request(asked, 0, now, "crashes")


def test_calls_are_struck_by_their_method() -> None:
    made = injector({"what": "no_reply", "when": {"method": "sleep", "nth": 2}})
    calls = [UtilityCall(0, number, method) for number, method in enumerate(("sleep", "wake_up", "sleep", "sleep"))]
    assert [bool(made.on_call(call, 0, 100.0)) for call in calls] == [False, False, True, False]


def test_joins_are_struck() -> None:
    made = injector({"what": {"fault": "late_ready", "delay_s": 3}, "when": {"nth": 2}})
    assert [made.on_join() for _ in range(3)] == [[], [LateReady(delay_s=3)], []]


def test_what_happens_to_the_engine_waits_for_whoever_does_it() -> None:
    made = injector({"what": "crash", "when": {"nth": 2}}, {"what": "freeze", "when": {"from_s": 5}})
    assert made.next_deadline(100.0) == 105.0
    assert made.on_time(100.0) == []
    assert struck(made, 2) == []
    assert made.next_deadline(100.0) == 100.0
    assert [calamity.rule for calamity in made.on_time(100.0)] == ["crash"]
    assert [calamity.rule for calamity in made.on_time(105.0)] == ["freeze"]
    assert made.on_time(106.0) == []
    assert made.next_deadline(106.0) is None


def test_a_rule_can_be_let_strike_whatever_its_conditions() -> None:
    made = injector(when(probability=0), {"what": "crash"})
    assert made.fire("error")
    assert struck(made, 2) == [1]
    assert made.fire("crash")
    assert made.next_deadline(100.0) == 100.0
    assert [calamity.rule for calamity in made.on_time(100.0)] == ["crash"]
    assert not made.fire("absent")


def test_rules_come_and_go() -> None:
    made = injector()
    (rule,) = rules_of(Located([when(times=1)]))
    made.put(rule)
    assert struck(made, 2) == [1]
    made.put(rule)
    assert struck(made, 2) == [1]
    assert "error" in made
    assert made.remove("error")
    assert not made.remove("error")
    assert struck(made, 2) == []


def test_rules_that_this_engine_cannot_follow_are_refused() -> None:
    rules = rules_of(Located([when(prompt_contains="a"), {"what": "kv_cache_full"}]))
    with pytest.raises(RulesError) as caught:
        check_needs(rules, has_tokenizer=False, has_load_model=False)
    assert len(caught.value.problems) == 2
    check_needs(rules, has_tokenizer=True, has_load_model=True)


def test_a_rule_that_is_switched_off_and_on_goes_on_counting() -> None:
    made = injector(when(every=2))
    assert struck(made, 3) == [2]
    (on,) = made.rules
    made.put(on.model_copy(update={"enabled": False}))
    assert "error" not in made
    assert struck(made, 3) == []
    assert made.struck("error") == 1
    made.put(on)
    # The fourth request that it looks at is the next one.
    assert struck(made, 3) == [1, 3]
    assert made.struck("error") == 3
