# SPDX-License-Identifier: Apache-2.0
"""Files of scripts: all that is wrong is told with its line, and nothing that is in a file is more than a problem."""

import json
import re
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.replies import yaml_values
from mockengine.replies.located import Problem, read_json_lines
from mockengine.replies.mishaps import ALLOWED
from mockengine.replies.rules import Conditions, Reply, Rule, Script
from mockengine.replies.script_file import ScriptError, ScriptFile
from mockengine.replies.script_keys import CONDITIONS, REPLY, condition_readers, reply_readers
from mockengine.replies.steered import MOST_TEXT_BYTES
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.replies.yaml_values import read_yaml
from mockengine.wire.outputs import FinishReason, RequestError
from tests.support.docs import table
from tests.support.scripts import asking, chat
from tests.support.stack import ROOT

EXAMPLE = ROOT / "deploy" / "replies" / "example.yaml"
VOCAB_SIZE = 1_000
ERROR = FinishReason.ERROR
# What is expected elsewhere.
WEIGHT = "a number above 0 and up to 1000000"
REASON = "one of stop, length, abort, error, repetition"
NO_GROUP = "$1: there is no such group (there are none, since the rule has no regex; write $$1 for a dollar)"


def rules(text: str | bytes, name: str = "script.yaml", *, has_tokenizer: bool = True) -> list[Rule]:
    data = text.encode() if isinstance(text, str) else text
    return list(ScriptFile(Path(name), VOCAB_SIZE, has_tokenizer).rules(data))


def problems(text: str | bytes, name: str = "script.yaml", *, has_tokenizer: bool = True) -> list[str]:
    """Return what is wrong with a file, without its name."""
    with pytest.raises(ScriptError) as refused:
        rules(text, name, has_tokenizer=has_tokenizer)
    return [line.removeprefix(f"{name}:") for line in refused.value.problems]


def reply(text: str) -> Wish:
    (rule,) = rules(f"- reply: {text}")
    assert rule.conditions == Conditions()
    (found,) = rule.replies
    assert found == Reply(wish=found.wish)
    return found.wish


# What is in order.


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("{text: hello}", Wish(text="hello")),
        ("{text: 'no'}", Wish(text="no")),
        ("{text: no}", Wish(text="no")),
        ("{text: 12:30}", Wish(text="12:30")),
        ("{text: 2024-05-01}", Wish(text="2024-05-01")),
        ('{text: "12"}', Wish(text="12")),
        ("{template: 'costs $$5'}", Wish(text="costs $5")),
        ("{token_ids: [1, 2]}", Wish(token_ids=[1, 2])),
        ("{token_ids: '[1, 2]'}", Wish(token_ids=[1, 2])),
        ("{output_tokens: 5, cached_tokens: 0}", Wish(output_tokens=5, cached_tokens=0)),
        ("{finish_reason: length}", Wish(finish_reason=FinishReason.LENGTH)),
        ("{finish_reason: error}", Wish(finish_reason=ERROR)),
        (
            "{error: {}}",
            Wish(
                token_ids=(),
                finish_reason=ERROR,
                error=RequestError("server_error", "the script asked for this error", retryable=False),
            ),
        ),
        (
            "{text: so, error: {code: c, message: m, retryable: true}}",
            Wish(text="so", finish_reason=ERROR, error=RequestError("c", "m", retryable=True)),
        ),
        (
            "{output_tokens: 3, finish_reason: error, error: {message: m}}",
            Wish(output_tokens=3, finish_reason=ERROR, error=RequestError("server_error", "m", retryable=False)),
        ),
        ("{ttft_ms: 250, itl_ms: 12.5}", Wish(timing=OwnTiming(ttft_s=0.25, itl_s=0.0125))),
        ("{fault: hang}", Wish(timing=OwnTiming(ttft_s=inf))),
        ("{fault: 'stall:3', itl_ms: 5}", Wish(timing=OwnTiming(itl_s=0.005, stalls_after=3))),
        ("{fault: stall, text: a}", Wish(text="a", timing=OwnTiming(stalls_after=1))),
        ("{fault: abort}", Wish(token_ids=(), finish_reason=FinishReason.ABORT)),
        ("{fault: abort, output_tokens: 3}", Wish(output_tokens=3, finish_reason=FinishReason.ABORT)),
        ("{fault: error, template: a}", Wish(text="a", finish_reason=ERROR)),
        ("{fault: error, finish_reason: error}", Wish(token_ids=(), finish_reason=ERROR)),
        ("{fault: brown-out}", Wish(rule="brown-out")),
        ("{}", Wish()),
    ],
)
def test_a_reply_is_wished(text: str, wish: Wish) -> None:
    assert reply(text) == wish


def test_rules_are_a_list_alone_or_under_a_name() -> None:
    listed = rules("- reply: {text: a}\n- reply: {text: b}\n")
    assert [rule.line for rule in listed] == [1, 2]
    named = rules("# comment\nrules:\n- reply: {text: a}\n-\n  reply: {text: b}\n")
    assert [rule.replies for rule in named] == [rule.replies for rule in listed]
    assert [rule.line for rule in named] == [3, 5]
    assert rules("[]") == rules("rules: []") == []
    assert rules('[{"reply": {"text": "a"}},\n {"reply":\t{"text": "b"}}]')[1].line == 2


def test_rules_are_on_lines_of_json() -> None:
    lines = ['{"reply": {"text": "a\\u2028\\ud83d\\ude00"}}', "", '{"match": {"nth": 2}, "reply": {"text": "b"}}', ""]
    for end in ("\n", "\r\n"):
        for name in ("script.jsonl", "script.NDJSON"):
            found = rules(end.join(lines), name)
            assert [rule.line for rule in found] == [1, 3]
            assert found[0].replies[0].wish == Wish(text="a\u2028\U0001f600")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_may_come_from_any_editor(end: str) -> None:
    text = "\ufeff# é\n- match: {prompt_contains: é}\n  reply:\n    text: |\n      one\n      two\n".replace("\n", end)
    (rule,) = rules(text)
    assert rule.conditions == Conditions(prompt_contains="é")
    assert rule.replies[0].wish == Wish(text="one\ntwo\n")
    assert problems(f"\ufeff# é{end}{end}- x: 1{end}".encode())[0].startswith("3: ")
    assert problems(b"\xef\xbb\xbf# \xe9\r\n") == ["1: byte 0xe9 is no UTF-8 (save the file as UTF-8)"]


# What is not.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["1: there are no rules (write a list of them, if only [])"]),
        ("# nothing\n", ["1: there are no rules (write a list of them, if only [])"]),
        ("hello", ["1: there are no rules (write a list of them, if only [])"]),
        ("rules:\n", ["1: there are no rules (write a list of them, if only [])"]),
        ("\nrule: []\n", [
            "2: rule: unknown (allowed is rules, or a list of rules alone)",
            "2: there are no rules (write a list of them, if only [])",
        ]),
        ("- 5\n- hello\n-\n", [
            "1: int 5 where a rule, a mapping, is expected",
            "2: str 'hello' where a rule, a mapping, is expected",
            "3: nil where a rule, a mapping, is expected",
        ]),
        ("- {}", ["1: the rule has no reply (give it reply, or replies)"]),
        ("- reply: {}\n  replies: [{}]", ["1: the rule has both reply and replies (give it reply, or replies)"]),
        ("- reply: {}\n  if: {}", ["2: if: unknown (allowed are match, reply, replies, in_order)"]),
        ("- reply: text", ["1: str 'text' where a reply, a mapping, is expected"]),
        ("- match:\n  reply: {}", ["1: nil where conditions, a mapping, is expected"]),
        ("- replies: []", ["1: replies: array of 0 where a list of replies is expected"]),
        ("- replies: {text: x}", ["1: replies: map of 1 where a list of replies is expected"]),
        ("- reply: {}\n  in_order: true", ["2: in_order: there is one reply (write replies)"]),
        ("- replies: [{}]\n  in_order: yes", ["2: in_order: str 'yes' where true or false is expected"]),
        ("- reply: {weight: 1}", [f"1: weight: unknown (allowed are {', '.join(key.name for key in REPLY[:-1])})"]),
        ("- replies:\n  - weight: 0\n", [f"2: weight: int 0 where {WEIGHT} is expected"]),
        ("- replies:\n  - weight: 1e999\n", [f"2: weight: float inf where {WEIGHT} is expected"]),
        ("- reply:\n    text: hello\n    text: bye\n", ["3: text: it is there already, on line 2"]),
        ("- &a\n  reply: {}\n- *a\n", [
            "1: &a: anchors are not allowed (write it out)",
            "3: *a: anchors are not allowed (write it out)",
            "3: nil where a rule, a mapping, is expected",
        ]),
        ("- reply: {text: !!python/name:os x}", ["1: tag:yaml.org,2002:python/name:os: tags are not allowed"]),
        ("- reply: {text: !!binary aGVsbG8=}", ["1: tag:yaml.org,2002:binary: tags are not allowed"]),
        ("- reply: {}\n---\n- reply: {}", ["2: a second document (keep all in one)"]),
        ("- reply: {? [a, b] : c}", ["1: a name that is no plain text"]),
        ("- <<: {reply: {}}\n", [
            "1: <<: unknown (allowed are match, reply, replies, in_order)",
            "1: the rule has no reply (give it reply, or replies)",
        ]),
        ("- reply: [\n", ["2: not YAML: did not find expected node content"]),
        ("- reply: {}\n\t- x", ["2: not YAML: found character that cannot start any token"]),
        ("a: 1\n\x07", ["2: not YAML: the character 0x7 is not allowed"]),
        ("[" * 200, ["1: it is nested more than 64 deep"]),
        ("- " * 200, ["1: it is nested more than 64 deep"]),
    ],
)  # fmt: skip
def test_what_no_rules_are_is_told(text: str, said: list[str]) -> None:
    assert problems(text) == said


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ("prompt_contains: 5", "prompt_contains: int 5 where a text is expected"),
        ("prompt_contains: ''", "prompt_contains: str '' where a text that is not empty is expected"),
        ("prompt_contains:", "prompt_contains: nil where a text is expected"),
        ('prompt_contains: "\\ud800"', None),
        ("prompt_regex: '['", "prompt_regex: '[' is no regex of Python's: unterminated character set at position 0"),
        ("prompt_regex: '[[a]'", "prompt_regex: '[[a]' is no regex of Python's: Possible nested set at position 1"),
        ("last_message_regex: ''", "last_message_regex: str '' where a text that is not empty is expected"),
        ("prompt_regex: 'a{99999999999}'", "prompt_regex: 'a{99999999999}' is no regex of Python's: "),
        ("token_prefix: []", "token_prefix: array of 0 where a list of token ids that is not empty is expected"),
        ("token_ids: [1, x]", "token_ids: str 'x' where a whole number from 0 to 4294967295 is expected"),
        ("token_ids: [4294967296]", "token_ids: int 4294967296 where a whole number from 0 to 4294967295 is expected"),
        ("lora: [a]", "lora: array of 1 where a text is expected"),
        ("nth: 0", "nth: int 0 where a whole number from 1 to 2147483647 is expected"),
        ("nth: []", "nth: array of 0 where a number, or a list of them, is expected"),
        ("nth: [1, 2.5]", "nth: float 2.5 where a whole number from 1 to 2147483647 is expected"),
        ("every: two", "every: str 'two' where a whole number from 1 to 2147483647 is expected"),
        ("tool_rounds: -1", "tool_rounds: int -1 where a whole number from 0 to 2147483647 is expected"),
        ("probability: 1.5", "probability: float 1.5 where a number from 0 to 1 is expected"),
        ("probability: 10%", "probability: str '10%' where a number from 0 to 1 is expected"),
        ("prompt: x", f"prompt: unknown (allowed are {', '.join(key.name for key in CONDITIONS)})"),
    ],
)
def test_a_condition_that_is_none_is_told(match: str, said: str | None) -> None:
    (found,) = problems(f"- match:\n    {match}\n  reply: {{}}\n")
    assert found.startswith("2: " if said is None else f"2: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("text: 5", "text: int 5 where a text is expected"),
        ("text: [x]", "text: array of 1 where a text is expected"),
        ("token_ids: [1000]", "token_ids: int 1000 where a whole number from 0 to 999 is expected"),
        ("finish_reason: eos", f"finish_reason: str 'eos' where {REASON} is expected"),
        ("error: now", "error: str 'now' is no JSON (Expecting value: line 1 column 1 (char 0))"),
        ("error: {kind: x}", "error: kind is unknown (allowed are code, message, retryable)"),
        ("error: {retryable: maybe}", "error: str 'maybe' where true or false is expected"),
        ("ttft_ms: 1s", "ttft_ms: str '1s' where a number from 0 to 3600000 is expected"),
        ("mishap: hang", f"mishap: unknown (allowed are {', '.join(key.name for key in REPLY[:-1])})"),
        ("fault: 'hang:2'", f"fault: str 'hang:2' where one of {ALLOWED} is expected"),
        ("fault: 3", f"fault: int 3 where one of {ALLOWED} is expected"),
        ("tool_calls: {}", "tool_calls: map of 0 where a list of objects with name and arguments is expected"),
        ("tool_calls: []", "tool_calls: array of 0 where a list of objects with name and arguments is expected"),
        ("template: $1", f"template: {NO_GROUP}"),
        ("template: '${x'", "template: a ${ that no } follows (write $${ for the text ${)"),
        ("reasoning: $1", f"reasoning: {NO_GROUP}"),
        ("{text: a, token_ids: [1]}", "token_ids: they are said instead of text"),
        ("{text: a, template: b}", "template: it is said instead of text"),
        ("{fault: abort, error: {}}", "error: only a reply that ends with error has one"),
        ("{fault: abort, finish_reason: stop}", "fault: abort ends otherwise than finish_reason: stop"),
        ("{fault: hang, itl_ms: 5, text: a}", "fault: hang says nothing, whatever itl_ms, text ask for"),
        ("{finish_reason: stop, error: {}}", "error: only a reply that ends with error has one"),
        (f"text: {'x' * 262_145}", "text: a text of 262145 bytes where at most 262144 are allowed"),
        (f"{{reasoning: {'x' * 262_144}, template: x}}", "all that is said together has more than 262144 bytes"),
    ],
)  # fmt: skip
def test_a_reply_that_is_none_is_told(text: str, said: str) -> None:
    (found,) = problems(f"- reply:\n    {text}\n")
    assert found.partition(": ")[2] == said


def test_groups_are_those_of_the_rule() -> None:
    match = "- match:\n    prompt_regex: (?P<a>x)(y)\n    last_message_regex: (?P<b>z)\n  reply:\n    template: "
    assert rules(f"{match} $1 $2 $3 ${{a}} ${{b}} ${{3}} $03")
    known = "(there are ${1}, ${2}, ${a}, ${3}, ${b}; write $"
    for wrong in ("$4", "$0", "${c}", "${}", "$99999999999999999999"):
        assert problems(f"{match} '{wrong}'") == [
            f"5: template: {wrong}: there is no such group {known}{wrong} for a dollar)"
        ]
    assert problems("- match: {prompt_regex: (?P<a>x), last_message_regex: (?P<a>y)}\n  reply: {template: $1}") == [
        "1: both regexes have a group a (give them different names)"
    ]
    assert problems("- match: {prompt_regex: '('}\n  reply: {template: $1}") == [
        "1: prompt_regex: '(' is no regex of Python's: missing ), unterminated subpattern at position 0"
    ], "what its groups would be is not known"


def test_parts_of_tool_calls_have_lines_of_their_own() -> None:
    text = """
- reply:
    tool_calls:
      - name: f
      - name: ''
      - {name: g, arguments: [1]}
      - name: h
        arguments:
          x:
            - $1
          y: 1
      - nobody: 1
"""
    call = "an object with name, which is a text, and arguments, and nothing else, is expected"
    assert problems(text) == [
        f"5: tool_calls[1]: map of 1 where {call}",
        "6: tool_calls[2]: array of 1 where an object of arguments, or a text, is expected",
        f"10: arguments: {NO_GROUP}",
        f"12: tool_calls[4]: map of 1 where {call}",
    ]
    large = "".join(f"      - {{name: f, arguments: {'x' * 60_000}}}\n" for _ in range(5))
    (found,) = problems(f"- reply:\n    tool_calls:\n{large}")
    assert found == f"2: tool_calls: tool calls of 300015 bytes where at most {MOST_TEXT_BYTES} are allowed"


def test_all_that_is_wrong_is_told_in_the_order_of_the_file() -> None:
    text = "- match: {nth: x, every: 0}\n  reply: {text: 1, colour: red}\n\n- reply: {ttft_ms: -1}\n- 5\n"
    assert [line.partition(" ")[0] for line in problems(text)] == ["1:", "1:", "2:", "2:", "4:", "5:"]
    many = problems("- 5\n" * 1_000)
    assert len(many) == 101
    assert many[-1] == "and 900 more"
    lines = "\n".join(["{", "[]", '{"reply": {"text": "a"}}', '{"a": 1, "a": 2}', "[NaN]", "[" * 100_000, "\ufeff{}"])
    assert problems(lines, "x.jsonl") == [
        "1: not JSON: Expecting property name enclosed in double quotes, column 2",
        "2: array of 0 where a rule, a mapping, is expected",
        "4: a: it is there twice",
        "5: NaN is not a number",
        "6: it is nested too deep",
        "7: not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig), column 1",
    ]
    for empty in ("", "\n\r\n  \n"):
        assert problems(empty, "x.jsonl") == ["1: there are no rules (write one on each line, or unset reply_script)"]


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", None)])
def test_half_a_character_is_none(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader of YAML refuses it by itself, the other does not."""
    monkeypatch.setattr(yaml_values, "_LOADER", loader)
    for part in ('{text: "\\ud800"}', '{tool_calls: [{name: f, arguments: {x: "\\ud800"}}]}', '{"\\ud800": 1}'):
        assert any(re.match("1: .*character", line) for line in problems(f"- reply: {part}"))
    half = "\\ud800 is half a character (write both halves, or the character itself)"
    for part in (
        '{"text": "\\ud800"}',
        '{"tool_calls": [{"name": "f", "arguments": {"x": "\\ud800"}}]}',
        '{"\\ud800": 1}',
    ):
        assert problems(f'{{"reply": {part}}}', "x.jsonl") == [f"1: {half}"]


def test_text_takes_a_tokenizer() -> None:
    told = "text takes a tokenizer (set tokenizer to the folder of the frontend's model)"
    for part in (
        *(
            "match: {prompt_contains: x}",
            "match: {prompt_regex: x}",
            "match: {last_message: x}",
            "match: {tool_rounds: 1}",
        ),
        *("reply: {text: x}", "reply: {template: x}", "reply: {reasoning: x}", "reply: {tool_calls: [{name: f}]}"),
    ):
        text = f"- {part}\n  {'reply' if 'match' in part else 'match'}: {{}}\n"
        assert rules(text * 2)
        name = part.split("{")[1].split(":")[0]
        assert problems(text * 2, has_tokenizer=False) == [f"1: {name}: {told}"], "once is enough"
    assert rules("- match: {token_ids: [1]}\n  reply: {token_ids: [2]}", has_tokenizer=False)


# Whatever a file holds.

_NAMES = [key.name for key in (*CONDITIONS, *REPLY)] + [
    "match",
    "reply",
    "replies",
    "in_order",
    "rules",
    "name",
    "arguments",
]
_VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
        st.sampled_from(["$1", "${a}", "(", "(?P<a>x)", "stop", "[1]", "{}", "error"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=5), inner),
    max_leaves=15,
)
_RULES = st.fixed_dictionaries(
    {}, optional={"match": _VALUES, "reply": _VALUES, "replies": st.lists(_VALUES, max_size=3), "in_order": _VALUES}
)


@given(st.lists(_RULES | _VALUES, max_size=4), st.booleans())
def test_any_values_are_rules_or_problems(values: list[Any], has_tokenizer: bool) -> None:  # noqa: FBT001
    lines = "\n".join(json.dumps(value) for value in values)
    for text, name in ((lines, "x.jsonl"), (yaml.safe_dump(values), "x.yaml")):
        _try(text.encode("utf-8", "surrogatepass"), name, has_tokenizer=has_tokenizer)


def test_what_is_nested_beyond_measure_is_a_problem() -> None:
    for part in ("[", "- ", "{a: ", "? "):
        assert problems(part * 100_000)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_rules_or_problems(data: bytes) -> None:
    _try(data, "x.yaml")
    _try(data, "x.jsonl")


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_a_file_that_was_mutilated_is_rules_or_problems(seed: int) -> None:
    random = Random(seed)  # noqa: S311
    data = bytearray(EXAMPLE.read_bytes())
    for _ in range(random.randint(1, 8)):
        start, length = random.randrange(len(data)), random.randint(1, 30)
        kind = random.randrange(4)
        if kind == 0:
            del data[start : start + length]
        elif kind == 1:
            data[start:start] = data[random.randrange(len(data)) :][:length]
        elif kind == 2:
            data[start:start] = random.choice(
                [b"\n", b"\t", b"- ", b": ", b"{", b"]", b"&a ", b"*a", b"'", b"\xff", b"\0", b"!!x "]
            )
        else:
            data[start] = random.randrange(256)
    _try(bytes(data), "x.yaml")


def _try(data: bytes, name: str, *, has_tokenizer: bool = True) -> None:
    """Read a file, and answer requests by what it holds; only what may happen does."""
    told: tuple[str, ...] = ()
    try:
        script = Script(rules(data, name, has_tokenizer=has_tokenizer))
    except ScriptError as error:
        told = error.problems
    if told:
        assert all(line.startswith((f"{name}:", "and ")) for line in told)
        return
    for number in range(3):
        script.wish_for(asking([number]))


def test_the_line_of_a_value_is_that_of_what_is_around_it_if_it_has_none() -> None:
    seen: list[Problem] = []
    located = read_yaml("a:\n  - 1\n  - [2,\n     3]\n", seen)
    assert located is not None
    assert [located.line(place) for place in ((), ("a",), ("a", 1), ("a", 1, 0), ("a", 1, 1), ("b", 7))] == [
        1,
        1,
        3,
        3,
        4,
        1,
    ]
    lines = read_json_lines("\n5\n", seen)
    assert [lines.line(place) for place in ((), (0,), (0, "x"))] == [1, 2, 2]
    assert seen == []


# What comes along.


def test_the_example_answers(tokenizer: Tokenizer) -> None:
    file = ScriptFile(EXAMPLE, tokenizer.vocab_size, has_tokenizer=True)
    script = Script(file.rules(EXAMPLE.read_bytes()))

    def ask(*said: str) -> Wish | None:
        return script.wish_for(asking(chat(*said), tokenizer))

    called = ask("How is the weather in Rome?")
    assert called is not None
    assert [(call.name, call.arguments) for call in called.tool_calls or ()] == [
        ("get_weather", {"city": "Rome", "days": 3})
    ]
    assert ask("My name is Ann") == Wish(text="Nice to meet you, Ann. That is $5.")
    stuck = ask("Are you stuck?")
    assert stuck is not None
    assert stuck.timing == OwnTiming(itl_s=0.05, stalls_after=4)
    assert [ask("tell a joke"), ask("a joke")] == [
        Wish(text="Knock knock."),
        Wish(text="Who is there?", timing=OwnTiming(itl_s=0.05)),
    ]
    flaky = [ask(f"flaky {number}") for number in range(300)]
    assert sum(wish is not None and wish.timing == OwnTiming(ttft_s=2.0) for wish in flaky) == 100
    assert 5 < sum(wish is not None and wish.error is not None for wish in flaky) < 40
    assert ask("Nothing of this") is None


def test_the_docs_have_every_key() -> None:
    assert list(condition_readers()) == [key.name for key in CONDITIONS]
    assert {*reply_readers(VOCAB_SIZE), "tool_calls"} == {key.name for key in REPLY}
    assert table("### Conditions") == [[f"`{key.name}`", key.allowed, key.meaning] for key in CONDITIONS]
    assert table("### Replies") == [[f"`{key.name}`", key.allowed, key.meaning] for key in REPLY]
