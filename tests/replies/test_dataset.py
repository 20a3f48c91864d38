# SPDX-License-Identifier: Apache-2.0
"""Data sets: records are read as people have them, and the replies to a prompt are found however it was written."""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mockengine.replies import json_records
from mockengine.replies.chat_forms import UserMessage
from mockengine.replies.dataset import Dataset, DatasetError, Lookup
from mockengine.replies.json_records import RecordsError, records
from mockengine.replies.records import Recorded, recorded
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.wish import ToolCall, Wish
from mockengine.wire.requests import EngineCoreRequest
from tests.support.scripts import asking, chat

SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": "human", "value": "Hello\nyou"},
        {"from": "gpt", "value": "Hi."},
        {"from": "human", "value": "Bye"},
        {"from": "gpt", "value": "Farewell."},
    ],
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":  "Rome"}'}}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Rome?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": [CALL]},
        {"role": "tool", "content": "18", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "18 degrees."},
    ],
    "tools": [],
}
# What is expected elsewhere.
PART = "a part of the content, which is an object or a text,"
A_CALL = "a tool call, which is an object with a function that has a name,"
ARGUMENTS = "arguments of a tool call, which are a text or an object,"
WHOLE = "a whole number from 1 to 2147483647"
WRONG = {"function": {"name": "f", "arguments": 5}}


def _wishes(record: object) -> list[tuple[str, int, Wish]]:
    return [(reply.asked.text, reply.asked.tool_rounds, reply.wish) for reply in recorded(record)]


# Records.


def test_a_conversation_of_sharegpt_has_a_reply_to_each_message() -> None:
    assert _wishes(SHAREGPT) == [("Hello\nyou", 0, Wish(text="Hi.")), ("Bye", 0, Wish(text="Farewell."))]


def test_a_chat_of_openais_has_tool_calls_and_reasoning() -> None:
    called = Wish(reasoning="Look it up.", tool_calls=[ToolCall("get_weather", '{"city":  "Rome"}')])
    assert _wishes(OPENAI) == [("Weather\nin Rome?", 0, called), ("Weather\nin Rome?", 1, Wish(text="18 degrees."))]


@pytest.mark.parametrize(
    ("record", "wish"),
    [
        ({"prompt": "Once", "completion": " upon"}, Wish(text=" upon")),
        ({"prompt": "Once", "response": "upon", "output_tokens": 9}, Wish(text="upon", output_tokens=9)),
        ({"prompt": "Once", "output_tokens": 9}, Wish(output_tokens=9)),
        ({"prompt": "Once", "output_tokens": 9.0}, Wish(output_tokens=9)),
        ({"prompt": "Once", "completion": ""}, Wish(text="")),
        ({"prompt": "Once", "completion": "half \ud83d of one"}, Wish(text="half ? of one")),
        (
            {
                "prompt": [{"role": "user", "content": "Once"}],
                "completion": [{"role": "assistant", "content": ["up", "on"]}],
            },
            Wish(text="up\non"),
        ),
        (
            {
                "conversation": [
                    {"from": "system", "value": "x"},
                    {"from": "user", "value": "Once"},
                    {"from": "chatgpt", "value": "up"},
                ]
            },
            Wish(text="up"),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Once"}]},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
                ]
            },
            Wish(tool_calls=[ToolCall("f", {"x": 1})]),
        ),
    ],
)  # fmt: skip
def test_other_records_are_known_too(record: dict[str, Any], wish: Wish) -> None:
    assert _wishes(record) == [("Once", 0, wish)]


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "Hi."}, {"from": "human", "value": "Hello"}]},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "observer", "content": 5}]},
        {"prompt": "Once"},
        {"prompt": [], "output_tokens": 5},
    ],
)
def test_a_record_may_have_no_reply(record: object) -> None:
    assert _wishes(record) == []


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (5, "int 5 where a record, which is an object, is expected"),
        ({}, "a record with none of messages, conversations, prompt"),
        ({"text": "x"}, "a record with none of messages, conversations, prompt"),
        ({"messages": "x"}, "str 'x' where messages, a list, is expected"),
        ({"messages": ["x"]}, "str 'x' where a message, which is an object, is expected"),
        ({"messages": [{"content": "x"}]}, "nil where a role, which is a text, is expected"),
        ({"messages": [{"role": "user", "content": 5}]}, "int 5 where a text, or a list of its parts, is expected"),
        ({"messages": [{"role": "user", "content": [5]}]}, f"int 5 where {PART} is expected"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, f"map of 0 where {A_CALL} is expected"),
        ({"messages": [{"role": "assistant", "tool_calls": [WRONG]}]}, f"int 5 where {ARGUMENTS} is expected"),
        ({"prompt": "x", "output_tokens": 0}, f"output_tokens: int 0 where {WHOLE} is expected"),
        ({"prompt": "x", "completion": 5}, "int 5 where a text, or a list of its parts, is expected"),
        ({"prompt": "x", "completion": "x" * 262_145}, "a text of 262145 bytes where at most 262144 are allowed"),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_told(record: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        _wishes(record)


# Files.


def _write(path: Path, *found: object, form: str) -> None:
    text = (
        "\n".join(map(json.dumps, found))
        if form == "lines"
        else json.dumps(list(found), indent=None if form == "list" else 2)
    )
    path.write_text(text)


@pytest.mark.parametrize("form", ["lines", "list", "indented list"])
def test_records_are_on_lines_or_in_a_list(tmp_path: Path, form: str) -> None:
    path = tmp_path / "x"
    found = [SHAREGPT, {"prompt": "é\u2028[", "completion": "{"}, OPENAI]
    _write(path, *found, form=form)
    assert [record for _, record in records(path)] == found
    lines = [line for line, _ in records(path)]
    assert lines == {"lines": [1, 2, 3], "list": [1, 1, 1]}.get(form, lines)
    text = path.read_text().splitlines()
    assert all("{" in text[line - 1] for line in lines)


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n  ", b"\n\n"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_file_may_come_from_any_editor(tmp_path: Path, begin: bytes, end: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(begin + b'{"a": 1}' + end * 2 + b'{"a": 2}' + end)
    assert [record for _, record in records(path)] == [{"a": 1}, {"a": 2}]
    path.write_bytes(begin + b'[{"a": 1},' + end + b'{"a": 2}' + end + b"]" + end)
    assert [record for _, record in records(path)] == [{"a": 1}, {"a": 2}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=st.lists(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5), max_size=8),
    piece=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
)
def test_pieces_make_no_difference(
    found: list[Any], piece: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "_PIECE_BYTES", piece)
    path = tmp_path / "x"
    path.write_text(json.dumps(found, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert [record for _, record in records(path)] == found
    lines = "\n".join(json.dumps({"x": item}, ensure_ascii=False) for item in found)
    path.write_text(lines, encoding="utf-8")
    assert list(records(path)) == [(number, {"x": item}) for number, item in enumerate(found, 1)]


@pytest.mark.parametrize("piece", [1, 7, 2**20])
@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (b'[{"a": 1}\n{"a": 2}]', 2, "not JSON: the list goes on with neither , nor ]"),
        (b'[{"a": 1},\n{"a": 2}', 2, "not JSON: the list goes on with neither , nor ]"),
        (b'[{"a": 1},\n{"a" 2}]', 2, "not JSON: Expecting ':' delimiter"),
        (b'[{"a": 1},\n{"a":\n\n2', 4, "not JSON: Expecting ',' delimiter"),
        (b'[{"a": 1},\n{"a":\n "x', 3, "not JSON: Unterminated string starting at"),
        (b'[{"a": 1},\n]', 2, "not JSON: Expecting value"),
        (b"[1]\n[2]", 2, "not JSON: something comes after the list"),
        (b"[NaN]", 1, "NaN is not a number"),
        (b"[\n", 2, "not JSON: Expecting value"),
        (b"[" * 100_000, 1, "it is nested too deep"),
        (b'\n{"a": "\xff"}', 2, "byte 0xff is no UTF-8"),
        (b'[1,\n\n"\xe9"]', 3, "byte 0xe9 is no UTF-8"),
        (b'{"a": "\xc3', 1, "byte 0xc3 is no UTF-8"),
    ],
)
def test_where_nothing_can_be_read_any_more_is_told(
    text: bytes, line: int, said: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "_PIECE_BYTES", piece)
    path = tmp_path / "x"
    path.write_bytes(text)
    with pytest.raises(RecordsError) as error:
        list(records(path))
    assert (error.value.line, str(error.value)) == (line, said)


def test_a_record_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_records, "MOST_RECORD_CHARACTERS", 2**21)
    for begin in (b'["', b'{"'):
        path = tmp_path / "x"
        path.write_bytes(begin + b"x" * 2**23)
        with pytest.raises(RecordsError, match="a record of more than 2097152 characters"):
            list(records(path))


def test_all_that_is_wrong_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"prompt": "x"}\n{"prompt" "x"}\n\n[]\n{"messages": 5}\n{"a": NaN}\n' + "[" * 100_000 + "\n")
    with pytest.raises(DatasetError) as error:
        Dataset(path, Lookup.PROMPT)
    assert str(error.value).splitlines() == [
        "the file has 5 problems (give JSON Lines, or one list of records):",
        f"  {path}:2: not JSON: Expecting ':' delimiter, column 11",
        f"  {path}:4: array of 0 where a record, which is an object, is expected",
        f"  {path}:5: int 5 where messages, a list, is expected",
        f"  {path}:6: NaN is not a number",
        f"  {path}:7: it is nested too deep",
    ]
    path.write_text("5\n" * 1_000)
    with pytest.raises(DatasetError) as error:
        Dataset(path, Lookup.PROMPT)
    lines = str(error.value).splitlines()
    assert (len(lines), lines[0], lines[-1]) == (
        22,
        "the file has 1000 problems (give JSON Lines, or one list of records):",
        "  and 980 more",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no replies in it"),
        ("[]", "there are no replies in it"),
        ('{"prompt": "x"}', "there are no replies in it"),
        (None, "No such file or directory"),
        ("folder", "it is no regular file"),
    ],
)
def test_a_file_without_replies_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "x"
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    with pytest.raises(DatasetError, match=said):
        Dataset(path, Lookup.IN_ORDER)


@given(
    st.binary(max_size=100)
    | st.lists(st.sampled_from([b"[", b"]", b"{", b"}", b'"', b",", b"\n", b":", b'"messages"', b"1", b"\xff"])).map(
        b"".join
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_data_set_or_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(DatasetError):
        Dataset(path, Lookup.PROMPT)


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "from", "content", "value", "text", "tool_calls", "function", "name", "arguments", "reasoning"]
            ),
            inner,
        )
    ),
    max_leaves=10,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "conversations", "prompt", "completion", "output_tokens"]), _ANY | st.lists(_ANY)
    )
)
def test_any_record_has_replies_or_is_none(record: dict[str, Any]) -> None:
    try:
        found = list(recorded(record))
    except ValueError:
        return
    for reply in found:
        json.dumps([call.arguments for call in reply.wish.tool_calls or ()])
        for text in (reply.wish.text, reply.wish.reasoning):
            assert (text or "").encode()


# Which reply.


def _dataset(tmp_path: Path, *found: object, lookup: Lookup = Lookup.PROMPT) -> Dataset:
    path = tmp_path / "x"
    _write(path, *found, form="lines")
    return Dataset(path, lookup)


def test_a_reply_is_found_by_its_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = _dataset(tmp_path, SHAREGPT, OPENAI, {"prompt": "Once upon", "completion": " a time"})
    assert len(dataset) == 5
    for prompt, wish in (
        (chat("Hello\nyou"), Wish(text="Hi.")),
        (chat("  Hello you \n"), Wish(text="Hi.")),
        (chat("Something else", "Yes", "Bye"), Wish(text="Farewell.")),
        ("Once upon", Wish(text=" a time")),
        (chat("Once upon"), Wish(text=" a time")),
        ("<|endoftext|>Once upon", Wish(text=" a time")),
        (chat("Hello"), None),
        (chat("hello\nyou"), None),
        ("Once upon a", None),
    ):
        assert dataset.wish_for(asking(prompt, tokenizer)) == wish


def test_after_its_tools_the_model_goes_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = _dataset(tmp_path, OPENAI)
    first = dataset.wish_for(asking(chat("Weather\nin Rome?"), tokenizer))
    assert first == Wish(reasoning="Look it up.", tool_calls=[ToolCall("get_weather", '{"city":  "Rome"}')])
    result = "<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n"
    called = chat("Weather\nin Rome?", "<tool_call>{}</tool_call>").removesuffix("<|im_start|>assistant\n") + result
    assert dataset.wish_for(asking(called, tokenizer)) == Wish(text="18 degrees.")


def test_accents_may_have_been_put_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = _dataset(tmp_path, {"prompt": "cafe\u0301", "completion": "so"})
    assert dataset.wish_for(asking(chat("caf\u00e9"), tokenizer)) == Wish(text="so")


def test_of_several_replies_to_one_prompt_one_follows_from_the_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = _dataset(tmp_path, *({"prompt": "Hello", "completion": text} for text in "abc"))
    prompts = [chat(f"Number {number}", "Yes", "Hello") for number in range(60)]
    wishes = [dataset.wish_for(asking(prompt, tokenizer)) for prompt in prompts]
    assert wishes == [dataset.wish_for(asking(prompt, tokenizer)) for prompt in prompts]
    assert {wish.text for wish in wishes if wish is not None} == {"a", "b", "c"}


def test_replies_follow_each_other_and_begin_again(tmp_path: Path) -> None:
    found = [SHAREGPT, {"prompt": "x", "output_tokens": 3}]
    dataset = _dataset(tmp_path, *found, lookup=Lookup.IN_ORDER)
    wishes = [dataset.wish_for(asking([number])) for number in range(7)]
    turn = [Wish(text="Hi."), Wish(text="Farewell."), Wish(output_tokens=3)]
    assert wishes == [*turn, *turn, turn[0]]


def test_a_prompt_without_text_has_no_reply(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, SHAREGPT)
    assert dataset.wish_for(asking([1])) is None
    embeds = asking([1])
    embeds.request = EngineCoreRequest(request_id="r")
    assert dataset.wish_for(embeds) is None


def test_of_a_large_file_hardly_more_is_kept_than_its_replies(tmp_path: Path) -> None:
    path = tmp_path / "x"
    said = 2_000
    record = {"prompt": "x" * 2_000, "completion": "y" * said, "other": ["z"] * 200}
    with path.open("w") as file:
        file.write("[")
        file.write(
            ",\n".join(json.dumps({**record, "prompt": f"{number} {record['prompt']}"}) for number in range(3_000))
        )
        file.write("]")
    assert path.stat().st_size > 15_000_000
    tracemalloc.start()
    dataset = Dataset(path, Lookup.PROMPT)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == 3_000
    assert kept < 1.3 * 3_000 * said
    assert most < kept + 8_000_000


def test_what_is_asked_is_a_value() -> None:
    assert Recorded(UserMessage("x"), Wish(text="y")) == next(recorded({"prompt": "x", "completion": "y"}))
