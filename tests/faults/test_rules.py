# SPDX-License-Identifier: Apache-2.0
"""Rules of faults as people write them, and what they are told of those that are wrong."""

from pathlib import Path
from typing import Any

import pytest

from mockengine.faults.catalog import KINDS, NAMES, texts_of
from mockengine.faults.rules import MOST_RULES, Event, RulesError, rules_of
from mockengine.faults.source import MOST_BYTES, read_rules
from mockengine.replies.located import Located


def problems(*rules: Any) -> list[str]:
    with pytest.raises(RulesError) as caught:
        rules_of(Located(list(rules)))
    return list(caught.value.problems)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_is_a_fault(name: str) -> None:
    (rule,) = read_rules(f'[{{"what": "{name}"}}]')
    assert (rule.name, rule.what.fault) == (name, name)


def test_every_fault_says_what_happens_and_what_does_so_in_a_real_engine() -> None:
    assert len(NAMES) == len(set(NAMES)) == len(KINDS)
    for kind in KINDS:
        texts = texts_of(kind)
        assert texts["what"].endswith(".")
        assert texts["cause"].endswith(".")
        assert all(field.description for name, field in kind.model_fields.items() if name != "fault")


def test_rules_are_read_from_a_file_with_the_lines_of_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text("rules:\n- what: hang\n  when: {request_id: a}\n- {name: later, what: {fault: stall, for_s: 2}}\n")
    first, second = read_rules(str(file))
    assert (first.name, first.when.request_id, second.name) == ("hang", "a", "later")
    file.write_text("- what: hang\n\n- what: error\n  when:\n    probability: 2\n- what: explode\n")
    with pytest.raises(RulesError) as caught:
        read_rules(str(file))
    assert caught.value.problems == (
        f"{file}:5: [1].when.probability: Input should be less than or equal to 1",
        f"{file}:6: [2].what: no fault has that name (there are {', '.join(NAMES)})",
    )


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="absent: No such file"):
        read_rules(str(tmp_path / "absent"))
    large = tmp_path / "large"
    large.write_bytes(b" " * (MOST_BYTES + 1))
    with pytest.raises(RulesError, match="more than"):
        read_rules(str(large))
    no_yaml = tmp_path / "odd"
    no_yaml.write_text("a: [")
    with pytest.raises(RulesError, match="not YAML"):
        read_rules(str(no_yaml))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "not JSON"),
        ('{"what": "hang"}', "a list of rules is expected"),
        ('[{"when": {}}]', r"\[0\]\.name: Field required"),
        ('[{"what": "hang", "wen": {}}]', r"\[0\]\.wen: Extra inputs"),
        ('[{"what": {"fault": "hang", "for_s": 1}}]', r"\[0\]\.what\.for_s: Extra inputs"),
        ('[{"what": {"for_s": 1}, "name": "x"}]', r"\[0\]\.what: no fault has that name"),
        ('[{"what": "hang", "name": "a b"}]', r"\[0\]\.name: String should match"),
        ('[{"what": "hang"}, {"what": "hang"}]', "another rule has the name hang"),
        ("[1]", r"\[0\]: Input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_told(text: str, problem: str) -> None:
    with pytest.raises(RulesError, match=problem):
        read_rules(text)


@pytest.mark.parametrize(
    ("what", "when", "problem"),
    [
        ("hang", {"method": "sleep"}, "method: hang strikes requests"),
        ("hang", {"at_join": True}, "at_join: hang strikes requests"),
        ("no_reply", {"lora": "a"}, "lora: no_reply strikes calls"),
        ("late_ready", {"from_s": 1}, "from_s: late_ready strikes joins"),
        ("error", {"from_s": 2, "until_s": 2}, "until_s 2 is not after from_s 2"),
        ("crash", {"method": "sleep", "request_id": "a"}, "request_id and method cannot hold of one thing"),
        ("error", {"nth": []}, "at least 1 item"),
        ("error", {"nth": 0}, "greater than or equal to 1"),
        ("error", {"probability": "NaN"}, "finite"),
    ],
)
def test_conditions_that_cannot_hold_are_refused(what: str, when: dict[str, object], problem: str) -> None:
    assert problem in "\n".join(problems({"what": what, "when": when}))


@pytest.mark.parametrize(
    ("what", "when", "event"),
    [
        ("error", {}, Event.REQUEST),
        ("drop", {"nth": 3}, Event.REQUEST),
        ("no_reply", {}, Event.CALL),
        ("late_ready", {}, Event.JOIN),
        ("crash", {}, Event.NOTHING),
        ("crash", {"from_s": 3}, Event.TIME),
        ("crash", {"nth": 3}, Event.REQUEST),
        ("crash", {"nth": 3, "method": "sleep"}, Event.CALL),
        ("crash", {"at_join": True}, Event.JOIN),
        ("crash", {"steered": True}, Event.REQUEST),
    ],
)
def test_what_a_rule_looks_at_follows_from_its_fault_and_conditions(
    what: str, when: dict[str, object], event: Event
) -> None:
    (rule,) = rules_of(Located([{"what": what, "when": when}]))
    assert rule.looks_at is event


def test_there_is_a_limit_of_rules() -> None:
    (problem,) = problems(*[{"name": f"r{number}", "what": "hang"} for number in range(MOST_RULES + 1)])
    assert problem == f"{MOST_RULES + 1} rules where at most {MOST_RULES} are allowed"
