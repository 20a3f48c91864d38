# SPDX-License-Identifier: Apache-2.0
"""Tool calls are written in the forms of the frontends' parsers, and a form that cannot be used is refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mockengine.replies.asked import ReplyError
from mockengine.replies.form_files import FormError
from mockengine.replies.forms import load_form, tool_call_forms
from mockengine.replies.reasoning_form import load_reasoning_form, reasoning_forms
from mockengine.replies.wish import ToolCall

DOCS = Path(__file__).parents[2] / "docs" / "replies.md"
CALL = ToolCall("f", {"a": 'x"y', "b": [1, True]})
OTHER = ToolCall("g", {})
ARGUMENTS = r'{"a": "x\"y", "b": [1, true]}'
# That of DeepSeek's marks is a wide one.
BAR = "\uff5c"
SAID = {
    "hermes": f"""<tool_call>
{{"name": "f", "arguments": {ARGUMENTS}}}
</tool_call>
<tool_call>
{{"name": "g", "arguments": {{}}}}
</tool_call>""",
    "llama3_json": f"""{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {{}}}}""",
    "mistral": f"""[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]""",
    "deepseek_v3": f"""<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>f
```json
{ARGUMENTS}
```<|tool▁call▁end|>
<|tool▁call▁begin|>function<|tool▁sep|>g
```json
{{}}
```<|tool▁call▁end|><|tool▁calls▁end|>""".replace("|", BAR),
    "deepseek_v31": (
        f"<|tool▁calls▁begin|><|tool▁call▁begin|>f<|tool▁sep|>{ARGUMENTS}<|tool▁call▁end|>"
        "<|tool▁call▁begin|>g<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>"
    ).replace("|", BAR),
    "glm45": """<tool_call>f
<arg_key>a</arg_key>
<arg_value>x"y</arg_value>
<arg_key>b</arg_key>
<arg_value>[1, true]</arg_value>
</tool_call>
<tool_call>g
</tool_call>""",
    "granite": f"""<|tool_call|>[{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]""",
    "internlm": f"""<|action_start|><|plugin|>
{{"name": "f", "parameters": {ARGUMENTS}}}<|action_end|>
<|action_start|><|plugin|>
{{"name": "g", "parameters": {{}}}}<|action_end|>
""",
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "minimax_m2": """<minimax:tool_call>
<invoke name="f">
<parameter name="a">x"y</parameter>
<parameter name="b">[1, true]</parameter>
</invoke>
<invoke name="g">
</invoke>
</minimax:tool_call>""",
    "pythonic": """[f(a='x"y', b=[1, True]), g()]""",
    "seed_oss": """<seed:tool_call>
<function=f>
<parameter=a>x"y</parameter>
<parameter=b>[1, true]</parameter>
</function>
</seed:tool_call>
<seed:tool_call>
<function=g>
</function>
</seed:tool_call>""",
    "xlam": f"""[{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]""",
    "qwen3_coder": """<tool_call>
<function=f>
<parameter=a>
x"y
</parameter>
<parameter=b>
[1, true]
</parameter>
</function>
</tool_call>
<tool_call>
<function=g>
</function>
</tool_call>""",
}
# Parsers that read the same.
SAME = [
    ("hermes", "granite4", "qwen3_json"),
    ("llama3_json", "llama4_json"),
    ("qwen3_coder", "qwen3_xml"),
    ("glm45", "glm47"),
]


@pytest.mark.parametrize("name", SAID)
def test_calls_are_written_as_the_parser_reads_them(name: str) -> None:
    form = load_form(name)
    assert form.said("", [CALL, OTHER]) == SAID[name]
    assert form.said("", [ToolCall("f", ARGUMENTS), OTHER]) == SAID[name]
    assert form.said("only a text", []) == "only a text"


@pytest.mark.parametrize("names", SAME)
def test_forms_are_known_by_the_names_of_all_parsers_that_read_them(names: Sequence[str]) -> None:
    assert len({load_form(name).said("", [CALL, OTHER]) for name in names}) == 1


def test_no_form_is_left_out_here() -> None:
    assert set(tool_call_forms()) == {*SAID, *(name for names in SAME for name in names)}


def test_text_comes_before_where_it_may() -> None:
    assert load_form("hermes").said("See: ", [CALL]).startswith("See: <tool_call>\n{")
    with pytest.raises(ReplyError, match="the form llama3_json has no text before tool calls"):
        load_form("llama3_json").said("See: ", [CALL])


@pytest.mark.parametrize("arguments", ["{not JSON", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_said_as_they_are(arguments: str) -> None:
    for name in tool_call_forms():
        assert arguments in load_form(name).said("", [ToolCall("f", arguments)])


def test_what_is_filled_in_is_not_filled_in_again() -> None:
    for name in tool_call_forms():
        assert "${name} $$" in load_form(name).said("", [ToolCall("f", {"a": "${name} $$"})])


def test_a_form_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        "begin = '<'\ncall = '${name}:${parameters}'\nparameter = '${json_name}=${json_value};'\nend = '>'\n"
    )
    assert load_form(str(path)).said("", [CALL, OTHER]) == r'<f:"a"="x\"y";"b"=[1, true];g:>'


def test_the_form_of_the_docs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(DOCS.read_text(encoding="utf-8").split("```toml\n", 1)[1].split("```", 1)[0])
    said = load_form(str(path)).said("", [CALL, OTHER])
    assert said == '<call name="f">\n<a>x"y</a>\n<b>[1, true]</b>\n</call>\n<call name="g">\n</call>'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("call = ", "not TOML"),
        ("", r"call needs \$\{name\}"),
        ("call = '${name}'", "arguments"),
        ("call = '${name}${parameters}'", "no parameter says"),
        ("call = '${name}${arguments}${what}'", r"call has \$\{what\}"),
        ("call = '${name}${arguments} $ 5'", r"call has a \$ that begins no place"),
        ("call = 5", "call is no text"),
        ("text_before = 'yes'", "text_before is neither true nor false"),
        ("calls = ''", "calls is unknown .there are begin, between, between_parameters, call, "),
    ],
)
def test_a_form_that_cannot_be_used_says_why(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(FormError, match=problem) as refused:
        load_form(str(path))
    assert str(path) in str(refused.value)


def test_a_file_that_is_no_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormError, match="it is not text"):
        load_form(str(path))


def test_arguments_are_said_that_are_nested_as_deep_as_can_be_read() -> None:
    depth = 10
    while True:
        arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
        try:
            json.loads(arguments)
        except RecursionError:
            break
        for name in tool_call_forms():
            assert "[]" in load_form(name).said("", [ToolCall("f", arguments)])
        depth += 50
    assert depth > 100


@pytest.mark.parametrize("name", reasoning_forms())
def test_reasoning_is_written_between_its_marks(name: str) -> None:
    form = load_reasoning_form(name)
    assert form.said("Well.", opens=True) == f"{form.begin}Well.{form.end}"
    assert form.said("Well.", opens=False) == f"Well.{form.end}"
    assert form.said("", opens=True).split() == [form.begin_mark, form.end_mark] or not form.begin.endswith("\n")
    assert form.space_before_end + form.closing == form.end
    assert form.closing.startswith(form.end_mark)


def test_the_usual_reasoning_is_that_of_qwen() -> None:
    form = load_reasoning_form()
    assert (form.begin, form.end) == ("<think>\n", "\n</think>\n\n")
    assert load_reasoning_form("deepseek_r1").end == form.end


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "begin and end must be a mark"),
        ("begin = '[T]'\nend = ' \t'", "end must be a mark"),
        ("begin = '[T]'\nend = ' [T] '", "the same mark"),
        ("begin = '[T]'\nend = 5", "end is no text"),
        ("begin = '[T]'\nend = '[/T]'\nalso_for = []", "also_for is unknown .there are begin, end"),
    ],
)
def test_reasoning_that_cannot_be_told_apart_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(FormError, match=problem):
        load_reasoning_form(str(path))
    path.write_text("begin = '[T]'\nend = '[/T]'")
    assert load_reasoning_form(str(path)).said("Well.", opens=True) == "[T]Well.[/T]"
