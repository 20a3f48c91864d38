# SPDX-License-Identifier: Apache-2.0
"""Tool calls are written in the forms of the frontends' parsers, and a form that cannot be used is refused."""

from pathlib import Path

import pytest

from mockengine.replies.asked import ReplyError
from mockengine.replies.forms import FormError, form_names, load_form
from mockengine.replies.wish import ToolCall

DOCS = Path(__file__).parents[2] / "docs" / "replies.md"
CALL = ToolCall("f", {"a": 'x"y', "b": [1, True]})
OTHER = ToolCall("g", {})
ARGUMENTS = r'{"a": "x\"y", "b": [1, true]}'
SAID = {
    "hermes": f"""<tool_call>
{{"name": "f", "arguments": {ARGUMENTS}}}
</tool_call>
<tool_call>
{{"name": "g", "arguments": {{}}}}
</tool_call>""",
    "llama3_json": f"""{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {{}}}}""",
    "mistral": f"""[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]""",
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


@pytest.mark.parametrize("name", SAID)
def test_calls_are_written_as_the_parser_reads_them(name: str) -> None:
    form = load_form(name)
    assert form.said("", [CALL, OTHER]) == SAID[name]
    assert form.said("", [ToolCall("f", ARGUMENTS), OTHER]) == SAID[name]
    assert form.said("only a text", []) == "only a text"


def test_no_form_is_left_out_here() -> None:
    assert form_names() == sorted(SAID)


def test_text_comes_before_where_it_may() -> None:
    assert load_form("hermes").said("See: ", [CALL]).startswith("See: <tool_call>\n{")
    with pytest.raises(ReplyError, match="the form llama3_json has no text before tool calls"):
        load_form("llama3_json").said("See: ", [CALL])


@pytest.mark.parametrize("arguments", ["{not JSON", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_said_as_they_are(arguments: str) -> None:
    for name in form_names():
        assert arguments in load_form(name).said("", [ToolCall("f", arguments)])


def test_what_is_filled_in_is_not_filled_in_again() -> None:
    for name in form_names():
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
        ("calls = ''", "calls is unknown .there are begin, between, call, "),
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
