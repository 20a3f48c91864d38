# SPDX-License-Identifier: Apache-2.0
"""Replies that are texts: of a regex, a choice, a grammar; and structural tags, as frontends send them."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from mockengine.replies.choices import Limits
from mockengine.replies.structured.constraint import Constraint, ConstraintError, read_constraint
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer

Write = Callable[..., list[str]]


def _read(**asked: Any) -> Constraint:
    constraint = read_constraint(asked)
    assert constraint is not None
    return constraint


@pytest.fixture
def write(writer: StructuredWriter, tokenizer: Tokenizer) -> Write:
    """Return what writes complete replies, 30 if not told otherwise."""

    def texts(max_tokens: int = 300, replies: int = 30, **asked: Any) -> list[str]:
        written = [writer.write(_read(**asked), key, max_tokens) for key in range(replies)]
        assert all(reply.complete and len(reply.tokens) < max_tokens for reply in written)
        return [tokenizer.decode(reply.tokens) for reply in written]

    return texts


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"^\w+@\w+\.(com|org)$",
        r"(red|green|blue)+",
        r"[A-Z][a-z]{2,8} [A-Z][a-z]{2,8}",
        r"[^a]{5,}b",
        r"a/b\\c\"d",
        r"(?i)yes|no",
        r"\s\S\D\W",
        r"x*y?",
        r"v\d+(\.\d+){2}(-rc\d)?",
        r".*",
        r"[a-z]+x",
        r"([01]{8} ){3}",
        r"é{2}|ü",
        r"price: \$\d+",
        "line\nbreak",
    ],
)
def test_all_of_the_regex_matches(write: Write, pattern: str) -> None:
    texts = write(regex=pattern)
    assert all(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize("pattern", [r"\d{3}", r"\w{3}", "[a-z ]{20,}"])
def test_regex_replies_vary(write: Write, pattern: str) -> None:
    assert len(set(write(regex=pattern))) > 20


def test_classes_of_a_regex_are_of_ascii(write: Write) -> None:
    assert all(text.isascii() for text in write(regex=r"\w{1,20}"))


def test_every_choice_is_taken_and_nothing_else(write: Write) -> None:
    choice = ["yes", "no", "yes please", 'quoted "text"', "zwei\nZeilen", "<tool_call>", "é"]
    assert set(write(choice=choice, replies=150)) == set(choice)


@pytest.mark.parametrize("max_tokens", range(2, 8))
def test_a_choice_that_fits_is_found(writer: StructuredWriter, tokenizer: Tokenizer, max_tokens: int) -> None:
    choice = ["a text that is much too long for this", "yes, of course it is", "no", "and another that is too long"]
    for key in range(10):
        written = writer.write(_read(choice=choice), key, max_tokens)
        assert written.complete
        assert tokenizer.decode(written.tokens) in choice


def test_a_choice_as_the_python_frontend_sends_it(write: Write) -> None:
    nothing = dict.fromkeys(("json", "regex", "choice", "json_object", "whitespace_pattern", "structural_tag"))
    assert set(write(grammar='root ::= "yes" | "no"', **nothing, _backend="xgrammar")) == {"yes", "no"}


GBNF = r"""
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= number | "(" expr ")"
number ::= [0-9]+
"""
LARK = r"""
start: expr
expr: term (("+" | "-") term)*
term: NUMBER | "(" expr ")"
NUMBER: /[0-9]+/
"""


@pytest.mark.parametrize("grammar", [GBNF, LARK])
@pytest.mark.parametrize("max_tokens", [3, 10, 40, 300])
def test_a_grammar_of_sums(write: Write, grammar: str, max_tokens: int) -> None:
    texts = write(max_tokens, grammar=grammar)
    assert all(_is_sum(text) for text in texts)
    assert len(set(texts)) > 3


def _is_sum(text: str) -> bool:
    """Whether the grammar has this text: numbers are taken away, then sums in brackets, from the inside."""
    if not re.fullmatch(r"[0-9+\-()]+", text):
        return False
    text = re.sub(r"[0-9]+", "n", text)
    while (shorter := re.sub(r"\((n([+-]n)*)\)", "n", text)) != text:
        text = shorter
    return re.fullmatch(r"n([+-]n)*", text) is not None


def test_a_grammar_that_branches_ends(write: Write) -> None:
    assert all(_is_balanced(text) for text in write(grammar='root ::= "(" root root ")" | "x"'))


def _is_balanced(text: str) -> bool:
    while "(xx)" in text:
        text = text.replace("(xx)", "x")
    return text == "x"


@pytest.mark.parametrize("max_tokens", [1, 5, 60, 1500, 10_000])
def test_what_cannot_end_is_cut(writer: StructuredWriter, max_tokens: int) -> None:
    written = writer.write(_read(grammar='root ::= ("a" | "b") root'), 1, max_tokens)
    assert (len(written.tokens), written.complete) == (min(max_tokens, 4096), False)


def _hermes(*tools: str, schema: Any = True, **options: Any) -> dict[str, Any]:
    delimiters = [(f'<tool_call>\n{{"name": "{tool}", "arguments": ', "}\n</tool_call>") for tool in tools] + [
        (f'<tool_call>{{"name": "{tool}", "arguments": ', "}</tool_call>") for tool in tools
    ]
    content = {
        "type": "json_schema",
        "json_schema": schema,
        "style": "json",
        "any_order": False,
        "max_whitespace_cnt": None,
        "excludes": [],
    }
    tags = [{"type": "tag", "begin": begin, "content": content, "end": end} for begin, end in delimiters]
    return {"tags": tags, **options}


def _required(*tools: str, stop_after_first: bool, schema: Any = True) -> str:
    form = _hermes(*tools, schema=schema, separator="\n", at_least_one=True, stop_after_first=stop_after_first)
    return json.dumps({"type": "structural_tag", "format": {"type": "tags_with_separator", **form}})


def _calls(text: str) -> list[dict[str, Any]]:
    return [json.loads(call) for call in re.findall(r"<tool_call>\n?(.*?)\n?</tool_call>", text)]


def test_required_tools_are_called(write: Write) -> None:
    texts = write(structural_tag=_required("get_weather", "get_time", stop_after_first=False))
    assert all(re.fullmatch(r"(<tool_call>\n?\{.*\}\n?</tool_call>\n?)+", text) for text in texts)
    calls = [call for text in texts for call in _calls(text)]
    assert {call["name"] for call in calls} == {"get_weather", "get_time"}
    assert all(isinstance(call["arguments"], dict) for call in calls)
    assert {len(_calls(text)) for text in texts} > {1}


def test_a_named_tool_is_called_once_with_its_parameters(write: Write) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    for text in write(structural_tag=_required("get_weather", stop_after_first=True, schema=schema)):
        (call,) = _calls(text)
        assert set(call["arguments"]) == {"city"}


def test_added_tokens_come_as_such(writer: StructuredWriter, tokenizer: Tokenizer) -> None:
    constraint = _read(structural_tag=_required("get_weather", stop_after_first=True))
    for key in range(10):
        tokens = writer.write(constraint, key, 300).tokens
        assert [token for token in tokens if token in tokenizer.special_ids] == tokenizer.encode(
            "<tool_call></tool_call>"
        )


def test_text_or_tools(write: Write) -> None:
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], **_hermes("f", at_least_one=False)}
    texts = write(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    assert any(_calls(text) for text in texts)
    assert any("<" not in text for text in texts)


def test_the_older_form_of_structures_and_triggers(write: Write) -> None:
    structure = {"begin": "<function=f>", "schema": {"type": "object", "required": ["a"]}, "end": "</function>"}
    texts = write(structural_tag=json.dumps({"structures": [structure], "triggers": ["<function="]}))
    found = [json.loads(call) for text in texts for call in re.findall("<function=f>(.*?)</function>", text)]
    assert found
    assert all("a" in call for call in found)
    assert all("<" not in re.sub("<function=f>.*?</function>", "", text) for text in texts)


CONTENTS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"type": "json_schema", "json_schema": {"type": "integer"}}, "[0-9]+"),
    "regex": ({"type": "regex", "pattern": "[ab]{3}"}, "[ab]{3}"),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, "y*x"),
    "choice": (
        {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "const_string", "value": "no"}]},
        "yes|no",
    ),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_constraints_under_a_reasoning_parser(write: Write, content: str) -> None:
    form, pattern = CONTENTS[content]
    think = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    thought = {"type": "sequence", "elements": [think, {"type": "const_string", "value": "\n\n"}]}
    whole = {"type": "sequence", "elements": [{"type": "optional", "content": thought}, form]}
    texts = write(structural_tag=json.dumps({"type": "structural_tag", "format": whole}))
    assert all(re.fullmatch(rf"(<think>[^<]+</think>\n\n)?({pattern})", text) for text in texts)
    assert {text.startswith("<think>") for text in texts} == {True, False}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "star", "content": {"type": "const_string", "value": "a"}}, "a*"),
        ({"type": "plus", "content": {"type": "const_string", "value": "a"}}, "a+"),
        ({"type": "repeat", "min": 2, "max": 9, "content": {"type": "regex", "pattern": "[ab]"}}, "[ab]{2,9}"),
        ({"type": "repeat", "min": 5, "max": -1, "content": {"type": "regex", "pattern": "[ab]"}}, "[ab]{5,}"),
        ({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": ["</a>", "</b>"]}, "<a>[^<]*</[ab]>"),
        ({"type": "token", "token": 6}, "<tool_call>"),
        ({"type": "token", "token": "</think>"}, "</think>"),
        ({"type": "any_text", "excludes": ["e"]}, "[^e]*"),
        ({"type": "any_text", "max_chars": 2}, ".{0,2}"),
        (
            {"type": "dispatch", "rules": [["<n>", {"type": "regex", "pattern": "[0-9]"}]], "loop": False},
            r".*?(<n>\d)?",
        ),
        ({"type": "const_string", "value": ""}, ""),
    ],
)
def test_formats(write: Write, form: dict[str, Any], pattern: str) -> None:
    assert all(re.fullmatch(pattern, text) for text in write(structural_tag=json.dumps({"format": form})))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "[0-9"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "(a{1000}){1000}"}, "unfolds to 1000000 parts"),
        ({"grammar": "root ::= foo"}, "neither Lark nor GBNF: Rule 'foo' not found"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": ""}, "grammar"),
        ({"grammar": "\n".join(f"a{i}: a{i + 1}" for i in range(3_000))}, "3000 lines"),
        ({"choice": []}, "not a list of strings"),
        ({"choice": [1]}, "not a list of strings"),
        ({"structural_tag": "{}"}, "neither a format nor structures"),
        ({"structural_tag": "{"}, "not valid JSON"),
        ({"structural_tag": "[" * 100_000}, "not valid JSON"),
        ({"structural_tag": '{"format": {"type": "foo"}}'}, "has the type 'foo'; known are const_string"),
        (
            {"structural_tag": '{"format": {"type": "json_schema", "json_schema": {}, "style": "glm_xml"}}'},
            "style 'glm",
        ),
        ({"structural_tag": '{"format": {"type": "token", "token": 99999999}}'}, "the tokenizer has not"),
        ({"structural_tag": '{"format": {"type": "or", "elements": []}}'}, "has no elements"),
        ({"regex": "a", "json": {}}, "json and regex: only one"),
        ({"json_object": "yes"}, "neither true nor false"),
        ({"regex": "a", "whitespace_pattern": 5}, "whitespace_pattern"),
        ({"regex": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_wrong_constraint_is_refused_with_the_reason(
    writer: StructuredWriter, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConstraintError, match=said):
        writer.write(_read(**asked), 1, 50)


@pytest.mark.parametrize("asked", [None, {}, {"json": None, "json_object": False, "_backend": "xgrammar"}])
def test_no_constraint(asked: dict[str, Any] | None) -> None:
    assert read_constraint(asked) is None


@pytest.fixture(scope="module")
def bytes_alone(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer of 256 bytes and EOS, as the smallest test models have."""
    # The byte-level alphabet: printable characters stand for themselves, the others for characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    eos = {"id": 256, "content": "</s>", "special": True}
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    folder = tmp_path_factory.mktemp("bytes")
    vocabulary = {spelled[byte]: byte for byte in range(256)}
    description = {"version": "1.0", "added_tokens": [eos | options], "pre_tokenizer": level, "decoder": level}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(description | {"model": model}))
    (folder / "config.json").write_text('{"eos_token_id": 256}')
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "object", "properties": {"name": {"type": "string"}, "n": {}}, "required": ["name", "n"]}},
        {"json_object": True},
        {"regex": r"[a-z]+@[a-z]+\.com"},
        {"structural_tag": _required("f", stop_after_first=True)},
        {"choice": ["yes", "no"]},
    ],
)
def test_a_tokenizer_of_bytes_alone(bytes_alone: Tokenizer, asked: dict[str, Any]) -> None:
    writer = StructuredWriter(bytes_alone)
    replies = [writer.write(_read(**asked), key, 250) for key in range(30)]
    assert all(reply.complete for reply in replies)
    texts = {bytes_alone.decode(reply.tokens) for reply in replies}
    assert len(texts) >= 2
    if "json" in asked or "json_object" in asked:
        assert all(isinstance(json.loads(text), dict) for text in texts)


def _written_within(writer: StructuredWriter, limits: Limits | None, min_tokens: int = 0) -> list[str]:
    constraint = read_constraint({"regex": "[a-z ]{1,200}"})
    assert constraint is not None
    written = [writer.write(constraint, key, 64, limits, min_tokens).tokens for key in range(20)]
    return [writer.tokenizer.decode(tokens) for tokens in written]


def test_what_a_client_forbids_is_not_said_where_there_is_something_else(writer: StructuredWriter) -> None:
    spelled = writer.tokenizer.token_bytes
    with_e = frozenset(token for token, text in enumerate(spelled) if b"e" in text)
    assert any("e" in text for text in _written_within(writer, None))
    assert not any("e" in text for text in _written_within(writer, Limits(with_e, None)))
    letters = frozenset(token for token, text in enumerate(spelled) if text in (b"a", b"b", b"c"))
    assert all(set(text) <= set("abc") for text in _written_within(writer, Limits(frozenset(), letters)))
    # The constraint goes before.
    nothing = Limits(frozenset(range(len(spelled))), None)
    assert all(re.fullmatch("[a-z ]{1,200}", text) for text in _written_within(writer, nothing))


def test_as_many_tokens_are_said_as_a_client_wants_if_they_may(writer: StructuredWriter) -> None:
    constraint, short = read_constraint({"regex": "[a-z ]{1,400}"}), read_constraint({"choice": ["yes", "no"]})
    assert constraint is not None
    assert short is not None
    lengths = [len(writer.write(constraint, key, 64, None, 20).tokens) for key in range(30)]
    assert min(lengths) >= 20
    assert min(len(writer.write(constraint, key, 64).tokens) for key in range(30)) < 20
    assert writer.write(short, 1, 64, None, 20).complete
