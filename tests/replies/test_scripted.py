# SPDX-License-Identifier: Apache-2.0
"""Scripts: which requests a rule is about, which replies these get, and that a file is read again when it changes."""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.asked import ReplyError
from mockengine.replies.rules import Script
from mockengine.replies.script_file import MOST_BYTES, ScriptError, ScriptFile
from mockengine.replies.scripted import Scripted
from mockengine.replies.steered import MOST_TEXT_BYTES
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.wish import ToolCall, Wish
from mockengine.wire.requests import EngineCoreRequest
from tests.support.scripts import asking, chat

VOCAB_SIZE = 1_000
SAID = Wish(token_ids=[7])


def _script(*rules: dict[str, Any]) -> Script:
    file = ScriptFile(Path("script.yaml"), VOCAB_SIZE, has_tokenizer=True)
    return Script(file.rules(yaml.safe_dump(list(rules)).encode()))


def _rule(reply: dict[str, Any] | None = None, **match: Any) -> dict[str, Any]:
    return {"match": match, "reply": {"token_ids": [7]} if reply is None else reply}


# What a rule is about.


@pytest.mark.parametrize(
    ("match", "prompt", "holds"),
    [
        ({}, "anything", True),
        ({"prompt_contains": "be brief"}, "You must be brief.", True),
        ({"prompt_contains": "be brief"}, "You must Be brief.", False),
        ({"prompt_contains": "<|im_start|>user"}, chat("Hello"), True),
        ({"prompt_regex": "b. brief"}, "You must be brief.", True),
        ({"prompt_regex": "^be brief"}, "You must be brief.", False),
        ({"last_message": "hello"}, chat("hello there"), True),
        ({"last_message": "hello"}, chat("hello there", "hello", "bye"), False),
        ({"last_message": "bye"}, chat("hello there", "hello", "bye"), True),
        ({"last_message": "assistant"}, chat("hello there"), False),
        ({"last_message_regex": "^hello$"}, chat("hello"), True),
        ({"last_message_regex": "^hello$"}, chat("hello there"), False),
        ({"last_message_regex": "^hello$"}, "hello", True),
        ({"tool_rounds": 0}, chat("hello"), True),
        ({"tool_rounds": 1}, chat("hello"), False),
        ({"tool_rounds": 0}, chat("hello", "called", "hello"), True),
        ({"prompt_contains": "hello", "prompt_regex": "th.re"}, "hello there", True),
        ({"prompt_contains": "hello", "prompt_regex": "th.re"}, "hello where", False),
        ({"prompt_contains": "bye", "prompt_regex": "th.re"}, "hello there", False),
        ({"lora": "terse"}, "hello", False),
        ({"probability": 0}, "hello", False),
        ({"probability": 1}, "hello", True),
    ],
)
def test_a_rule_is_about_requests_of_which_all_holds(
    match: dict[str, Any],
    prompt: str,
    holds: bool,  # noqa: FBT001
    tokenizer: Tokenizer,
) -> None:
    wish = _script(_rule(**match)).wish_for(asking(prompt, tokenizer))
    assert wish == (SAID if holds else None)


@pytest.mark.parametrize(
    ("match", "prompt", "holds"),
    [
        ({"token_prefix": [5, 6]}, [5, 6, 7], True),
        ({"token_prefix": [5, 6, 7, 8]}, [5, 6, 7], False),
        ({"token_prefix": [6]}, [5, 6, 7], False),
        ({"token_ids": [6, 7]}, [5, 6, 7], True),
        ({"token_ids": [5, 7]}, [5, 6, 7], False),
        ({"token_ids": [4_294_967_295]}, [5, 4_294_967_295], True),
        # Its bytes are there, but those of no token.
        ({"token_ids": [0x0600_0000]}, [5, 6, 7], False),
        ({"token_ids": [0x0100, 0x0200]}, [0x0001_0000, 0x0002_0000, 0x0100, 0x0200], True),
    ],
)
def test_tokens_are_looked_for_without_a_tokenizer(match: dict[str, Any], prompt: list[int], holds: bool) -> None:  # noqa: FBT001
    assert _script(_rule(**match)).wish_for(asking(prompt)) == (SAID if holds else None)


@given(st.lists(st.sampled_from([0, 1, 256, 65_536, 16_777_216]), min_size=1, max_size=12), st.data())
def test_tokens_that_follow_each_other_are_found_wherever_they_are(prompt: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from([0, 1, 256, 65_536]), min_size=1, max_size=3))
    places = range(len(prompt) - len(wanted) + 1)
    holds = any(prompt[place : place + len(wanted)] == wanted for place in places)
    assert (_script(_rule(token_ids=wanted)).wish_for(asking(prompt)) is not None) == holds


def test_an_adapter_is_named() -> None:
    script = _script(_rule(lora="terse"))
    assert script.wish_for(asking([1], lora="terse")) == SAID
    assert script.wish_for(asking([1], lora="other")) is None


def test_a_prompt_without_text_holds_of_no_text() -> None:
    script = _script(_rule(prompt_contains="."), _rule(prompt_regex="."), _rule(last_message="."), _rule(tool_rounds=0))
    request = EngineCoreRequest(request_id="r", prompt_token_ids=None)
    assert script.wish_for(asking([1])) is None
    embeds = asking([1])
    embeds.request = request
    assert script.wish_for(embeds) is None


def test_the_first_rule_that_holds_has_its_way(tokenizer: Tokenizer) -> None:
    script = _script(
        _rule({"text": "first"}, prompt_contains="hello"),
        _rule({}, prompt_contains="nothing"),
        _rule({"text": "other"}),
    )
    assert script.wish_for(asking("hello you", tokenizer)) == Wish(text="first")
    assert script.wish_for(asking("good bye", tokenizer)) == Wish(text="other")
    assert script.wish_for(asking("say nothing", tokenizer)) == Wish(), "it is left to others"


@pytest.mark.parametrize(
    ("match", "meant"),
    [
        ({"nth": 1}, [1]),
        ({"nth": [2, 5]}, [2, 5]),
        ({"every": 3}, [3, 6, 9]),
        ({"every": 2, "nth": [1, 4]}, [4]),
        ({"every": 1}, list(range(1, 10))),
    ],
)
def test_requests_are_counted_of_which_all_else_holds(match: dict[str, Any], meant: list[int]) -> None:
    script = _script(_rule(token_prefix=[1], **match))
    numbers = []
    for number in range(1, 10):
        assert script.wish_for(asking([2])) is None
        if script.wish_for(asking([1])) is not None:
            numbers.append(number)
    assert numbers == meant


def test_a_share_of_the_requests_is_meant_and_always_the_same() -> None:
    script = _script(_rule(probability=0.3), _rule({"token_ids": [8]}, probability=0.3))
    wishes = [script.wish_for(asking([number])) for number in range(1_000)]
    again = [script.wish_for(asking([number])) for number in range(1_000)]
    assert wishes == again
    first, second = (sum(wish == Wish(token_ids=[token]) for wish in wishes) for token in (7, 8))
    assert 250 < first < 350
    assert 160 < second < 260, "0.3 of the others: rules draw for themselves"


# What is replied.


def test_one_of_several_replies_follows_from_the_request() -> None:
    replies = [{"token_ids": [1]}, {"token_ids": [2], "weight": 2}, {"token_ids": [3], "weight": 0.5}]
    script = _script({"replies": replies})
    wishes = [script.wish_for(asking([number])) for number in range(1_000)]
    assert wishes == [script.wish_for(asking([number])) for number in range(1_000)]
    counts = Counter(str(wish.token_ids) for wish in wishes if wish is not None)
    assert 220 < counts["[1]"] < 350
    assert 500 < counts["[2]"] < 640
    assert 90 < counts["[3]"] < 200


def test_replies_follow_each_other_and_begin_again() -> None:
    replies = [{"token_ids": [number]} for number in (1, 2, 3)]
    script = _script({"match": {"every": 2}, "replies": replies, "in_order": True})
    wishes = [script.wish_for(asking([5])) for _ in range(10)]
    assert wishes[::2] == [None] * 5
    assert wishes[1::2] == [Wish(token_ids=[token]) for token in (1, 2, 3, 1, 2)]


@pytest.mark.parametrize(
    ("match", "prompt", "template", "text"),
    [
        ({"last_message_regex": "in (\\w+)"}, chat("weather in Rome"), "It rains in $1.", "It rains in Rome."),
        ({"last_message_regex": "in (\\w+)"}, chat("weather in Rome"), "${1}n: $1 $0", "Romen: Rome in Rome"),
        ({"prompt_regex": "in (?P<city>\\w+)"}, "weather in Rome", "${city} = $1", "Rome = Rome"),
        ({"prompt_regex": "in (\\w+)( and (\\w+))?"}, "in Rome", "[$1][$3]", "[Rome][]"),
        ({"prompt_regex": "(u)ser", "last_message_regex": "(in) (\\w+)"}, chat("in Rome"), "$1$2$3", "uinRome"),
        ({"prompt_regex": "(.)"}, "x", "$$1 $$ $ US$ $x $$$1 {1}", "$1 $ $ US$ $x $x {1}"),
        ({"prompt_regex": "(?s)(.*)"}, 'a "b"\n\\1 $1 ${x}', "<$1>", '<a "b"\n\\1 $1 ${x}>'),
        ({}, "x", "no $$ regex", "no $ regex"),
    ],
)
def test_a_template_says_what_was_captured(
    match: dict[str, Any], prompt: str, template: str, text: str, tokenizer: Tokenizer
) -> None:
    script = _script(_rule({"template": template}, **match))
    assert script.wish_for(asking(prompt, tokenizer)) == Wish(text=text)


def test_texts_of_tool_calls_and_reasoning_are_templates_and_a_text_is_none(tokenizer: Tokenizer) -> None:
    arguments = {"city": "$city", "to": "${city}", "costs": "$$5", "days": 3, "more": [{"in": "$1"}, None, True, 0.5]}
    calls = [{"name": "$1", "arguments": arguments}, {"name": "g", "arguments": '{"x": "$1"}'}, {"name": "h"}]
    reply = {"text": "$1", "reasoning": "They ask about $1.", "tool_calls": calls}

    wish = _script(_rule(reply, prompt_regex="in (?P<city>\\w+)")).wish_for(asking("in Rome", tokenizer))

    filled = {"city": "$city", "to": "Rome", "costs": "$5", "days": 3, "more": [{"in": "Rome"}, None, True, 0.5]}
    assert wish == Wish(
        text="$1",
        reasoning="They ask about Rome.",
        tool_calls=[ToolCall("$1", filled), ToolCall("g", '{"x": "Rome"}'), ToolCall("h", {})],
    )


def test_what_a_prompt_makes_too_large_is_refused(tokenizer: Tokenizer) -> None:
    script = _script(
        _rule({"template": "$1" * 1_000}, prompt_regex="(?s)^large (.*)"),
        _rule({"reasoning": "$1", "tool_calls": [{"name": "f", "arguments": {"x": "$1"}}]}, prompt_regex="(.*)"),
    )
    for prompt, line in (("large " + "x " * 500, 1), ("x" * (MOST_TEXT_BYTES // 2 + 1), None)):
        with pytest.raises(ReplyError) as refused:
            script.wish_for(asking(prompt, tokenizer))
        assert str(refused.value).endswith(
            f"of reply_script: with what the prompt has for it, the reply has more than {MOST_TEXT_BYTES} bytes"
        )
        assert line is None or str(refused.value).startswith(f"the rule on line {line} ")


def test_a_regex_that_takes_too_long_is_the_requests_end(tokenizer: Tokenizer) -> None:
    def slow(_pattern: re.Pattern[str], _text: str) -> None:
        raise TimeoutError("it takes too long")

    script = _script(_rule(prompt_contains="x"), _rule(last_message_regex="(a+)+$"))
    with pytest.raises(ReplyError, match=r"^the rule on line \d+ of reply_script: it takes too long$"):
        script.wish_for(asking("aaa", tokenizer), slow)
    assert script.wish_for(asking("x", tokenizer), slow) == SAID


# The file.


@dataclass
class _Heard:
    """Remembers what is told of a script, and what time it is."""

    told: list[tuple[str, Any]] = field(default_factory=list)
    now_ns: int = 0

    def script_reloaded(self, file: str, rules: int) -> None:
        self.told.append((file, rules))

    def script_refused(self, file: str, problems: Sequence[str]) -> None:
        self.told.append((file, list(problems)))

    def clock_ns(self) -> int:
        return self.now_ns

    def hear(self) -> list[Any]:
        told, self.told = self.told, []
        assert len({file for file, _ in told}) <= 1
        return [what for _, what in told]


def _file(path: Path) -> ScriptFile:
    return ScriptFile(path, VOCAB_SIZE, has_tokenizer=False)


def _says(token: int) -> str:
    return f"- reply: {{token_ids: [{token}]}}\n"


@pytest.fixture
def heard() -> _Heard:
    return _Heard()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "script.yaml"
    path.write_text(_says(1))
    return path


def _said(scripted: Scripted) -> int:
    wish = scripted.wish_for(asking([5]))
    assert wish is not None
    assert wish.token_ids is not None
    return wish.token_ids[0]


def test_a_change_is_in_effect_for_the_next_request(path: Path, heard: _Heard) -> None:
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    assert [_said(scripted), _said(scripted)] == [1, 1]
    assert heard.hear() == []
    path.write_text(_says(22) * 2)
    assert [_said(scripted), _said(scripted)] == [22, 22]
    other = path.with_name("other")
    other.write_text(_says(33))
    other.replace(path)
    assert _said(scripted) == 33
    assert heard.hear() == [2, 1]


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path, heard: _Heard) -> None:
    """So a mounted ConfigMap changes."""
    for name, token in (("1", 1), ("2", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.yaml").write_text(_says(token))
    link, new = tmp_path / "now", tmp_path / "new"
    link.symlink_to("1")
    scripted = Scripted(_file(link / "script.yaml"), heard.clock_ns, heard)
    assert _said(scripted) == 1
    new.symlink_to("2")
    new.replace(link)
    assert _said(scripted) == 2


def test_a_file_with_errors_changes_nothing_and_is_told_once(path: Path, heard: _Heard) -> None:
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    path.write_text(f"{_says(2)}- reply: {{token_ids: [1001]}}\n- match: {{}}\n")
    assert [_said(scripted) for _ in range(3)] == [1] * 3
    assert heard.hear() == [
        [
            f"{path}:2: token_ids: int 1001 where a whole number from 0 to 999 is expected",
            f"{path}:3: the rule has no reply (give it reply, or replies)",
        ]
    ]
    path.write_text("")
    assert [_said(scripted) for _ in range(3)] == [1] * 3
    assert heard.hear() == [[f"{path}:1: there are no rules (write a list of them, if only [])"]]
    path.write_text(_says(3))
    assert _said(scripted) == 3
    assert heard.hear() == [1]
    path.write_text("[]")
    assert scripted.wish_for(asking([5])) is None
    assert heard.hear() == [0]


def test_a_file_that_is_gone_is_told_once_and_may_come_back(path: Path, heard: _Heard) -> None:
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    path.unlink()
    assert [_said(scripted) for _ in range(3)] == [1] * 3
    assert heard.hear() == [[f"{path}:1: No such file or directory"]]
    path.mkdir()
    assert _said(scripted) == 1
    assert heard.hear() == [[f"{path}:1: it is no regular file"]]
    path.rmdir()
    path.write_text(_says(1))
    assert _said(scripted) == 1
    assert heard.hear() == [1]


def test_who_waits_to_be_read_is_not_waited_for(path: Path, heard: _Heard) -> None:
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    path.unlink()
    os.mkfifo(path)
    assert _said(scripted) == 1
    assert heard.hear() == [[f"{path}:1: it is no regular file"]]


def test_a_file_that_is_too_large_is_not_read(path: Path, heard: _Heard) -> None:
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    path.write_bytes(b"#" * (MOST_BYTES + 1))
    assert _said(scripted) == 1
    assert heard.hear() == [[f"{path}:1: it has more than {MOST_BYTES} bytes"]]


def test_a_change_within_one_tick_of_the_file_system_is_seen(
    path: Path, heard: _Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one size that are stamped alike are told apart while the stamp is fresh, and only then read."""
    stamp = path.stat()
    heard.now_ns = stamp.st_ctime_ns + 1_000_000
    monkeypatch.setattr(Path, "stat", lambda _path: stamp)
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    assert _said(scripted) == 1
    path.write_text(_says(2))
    assert [_said(scripted), _said(scripted)] == [2, 2]
    assert heard.hear() == [1]
    heard.now_ns += 1_000_000_000
    assert _said(scripted) == 2
    path.write_text(_says(3))
    assert _said(scripted) == 2, "it is looked at no more than it must be"


def test_what_is_touched_has_not_changed(path: Path, heard: _Heard) -> None:
    path.write_text("- match: {nth: 2}\n  reply: {token_ids: [1]}\n")
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    assert scripted.wish_for(asking([5])) is None
    os.utime(path, (1, 1))
    assert _said(scripted) == 1, "it goes on counting"
    assert heard.hear() == []


def test_a_file_that_is_written_in_two_halves_is_not_lost(path: Path, heard: _Heard) -> None:
    scripted = Scripted(_file(path), heard.clock_ns, heard)
    with path.open("w") as file:
        file.write("- reply: {token_ids: [2")
        file.flush()
        assert _said(scripted) == 1
        file.write("]}\n")
        file.flush()
        assert _said(scripted) == 2
    assert len(heard.hear()) == 2


def test_a_file_that_is_wrong_from_the_start_is_an_error(tmp_path: Path, heard: _Heard) -> None:
    path = tmp_path / "script.jsonl"
    for text, said in (("[]", ":1: array of 0 where a rule, a mapping, is expected"), (None, ":1: No such file")):
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        with pytest.raises(ScriptError) as error:
            Scripted(_file(path), heard.clock_ns, heard)
        assert said in str(error.value)
    assert heard.told == []


def test_lines_of_json_are_rules_too(tmp_path: Path, heard: _Heard) -> None:
    path = tmp_path / "script.jsonl"
    rules = [_rule({"token_ids": [1]}, token_prefix=[4]), _rule({"token_ids": [2]})]
    path.write_text("\n".join(map(json.dumps, rules)))
    assert _said(Scripted(_file(path), heard.clock_ns, heard)) == 2
