# SPDX-License-Identifier: Apache-2.0
"""Scripts and data sets as clients of a real Rust frontend see them."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.docs import example
from tests.support.examples import run_example
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving, wait_until

pytestmark = pytest.mark.rust_frontend

HELLO = "- match: {prompt_contains: greet}\n  reply: {text: hello}\n"
RECORDS = """\
{"conversations": [
  {"from": "human", "value": "Where are you?"}, {"from": "gpt", "value": "Here, \\u00e9\\ud83d\\ude00."},
  {"from": "human", "value": "And who?"}, {"from": "gpt", "value": "Nobody, as I said."}
]}"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the files of the script and of the data set."""
    folder = tmp_path_factory.mktemp("replies")
    script, dataset = folder / "script.yaml", folder / "records.jsonl"
    script.write_text(HELLO)
    lines = [json.dumps(json.loads(RECORDS)), *example("## A data set", "json").splitlines()]
    dataset.write_text("\n".join(lines))
    return script, dataset


@pytest.fixture(scope="module")
def stack(files: tuple[Path, Path]) -> Iterator[Stack]:
    """An engine with both."""
    script, dataset = files
    rule = {"fault": "error", "message": "come again", "retryable": True}
    rules = json.dumps([{"name": "overloaded", "what": rule, "when": {"steered": True}}])
    flags = (f"--tokenizer={MODEL}", f"--reply-script={script}", f"--reply-dataset={dataset}", f"--faults={rules}")
    with RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend, serving(frontend, *flags) as stack:
        yield stack


@pytest.fixture
def script(files: tuple[Path, Path]) -> Iterator[Path]:
    """The file of the script, which a test may change."""
    path, _ = files
    yield path
    path.write_text(HELLO)


def _chat(stack: Stack, *said: str, **asked: Any) -> Any:
    messages: Any = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    with stack.client() as client:
        return client.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=50, **asked).choices[0]


def _complete(stack: Stack, prompt: str, **asked: Any) -> Any:
    with stack.client() as client:
        return client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=50, **asked).choices[0]


def test_stop_strings_cut_a_scripted_text(stack: Stack) -> None:
    assert _complete(stack, "Please greet").text == "hello"
    choice = _complete(stack, "Please greet", stop=["lo", "ell"])
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("h", "stop", "ell")
    assert _chat(stack, "Please greet", stop=["lo", "ell"]).message.content == "h"
    with stack.client() as client:
        stream = client.completions.create(
            model=MODEL_NAME, prompt="Please greet", max_tokens=50, stop=["lo"], stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == "hel"


def test_a_template_says_what_the_user_said(stack: Stack, script: Path) -> None:
    rule = r"""- match: {last_message_regex: '^My name is (?P<name>\w+), for \$(\d+)'}
  reply: {template: '${name}: $1 & $$$2.'}
"""
    script.write_text(rule)
    assert _chat(stack, "Hello", "Hi", "My name is Zo\u00eb, for $5").message.content == "Zo\u00eb: Zo\u00eb & $5."
    assert _complete(stack, "My name is Bob, for $7").text == "Bob: Bob & $7."
    assert _chat(stack, "My name is Bob, for $7", "Hi", "Hello").message.content != "Bob: Bob & $7."


def test_a_reply_of_a_script_goes_wrong(stack: Stack, script: Path) -> None:
    script.write_text(
        "- match: {last_message: abort}\n  reply: {fault: abort, text: hello there}\n"
        "- match: {last_message: fails}\n  reply: {fault: error}\n"
        "- match: {last_message: rule}\n  reply: {fault: overloaded, text: hello}\n"
        "- match: {last_message: absent}\n  reply: {fault: nothing}\n"
    )
    aborted = _chat(stack, "abort")
    assert (aborted.finish_reason, aborted.message.content) == ("abort", "hello there")
    with pytest.raises(openai.InternalServerError) as failed:
        _chat(stack, "fails")
    assert failed.value.status_code == 500
    with pytest.raises(openai.InternalServerError, match="come again") as refused:
        _chat(stack, "rule")
    assert refused.value.status_code == 503
    with pytest.raises(openai.BadRequestError, match=r"fault: there is none of the name nothing .*overloaded"):
        _chat(stack, "absent")


def test_a_reply_fails_or_falls_silent_as_its_rule_says(stack: Stack, script: Path) -> None:
    script.write_text(
        "- match: {prompt_contains: abort}\n  reply: {fault: abort, text: hello there}\n"
        "- match: {prompt_contains: fail}\n  reply: {fault: error}\n"
        "- match: {prompt_contains: stall}\n  reply: {fault: 'stall:2', text: hello there}\n"
        "- match: {prompt_contains: hang}\n  reply: {fault: hang}\n"
    )
    choice = _complete(stack, "Please abort")
    assert (choice.text, choice.finish_reason) == ("hello there", "abort")
    with pytest.raises(openai.InternalServerError):
        _complete(stack, "Please fail")
    for prompt, outputs in (("Please stall", 2), ("Please hang", 0)):
        before = len(_aborted(stack))
        with pytest.raises(openai.APITimeoutError):
            _complete(stack, prompt, timeout=1.0)
        assert wait_until(partial(_aborted, stack, before), bool, "what was aborted") == [outputs]


def _aborted(stack: Stack, start: int = 0) -> list[int]:
    """Return how much was said to each request that was aborted, from one of them on."""
    finished = stack.engine.logged("request finished")
    return [entry["output_tokens"] for entry in finished if entry["finish_reason"] == "abort"][start:]


def test_a_change_is_in_effect_for_the_next_request_and_a_broken_file_is_not(stack: Stack, script: Path) -> None:
    assert _complete(stack, "Please greet").text == "hello"
    for number in range(5):
        script.write_text(f"- reply: {{text: number {number}}}\n")
        assert _complete(stack, "Please greet").text == f"number {number}"
    refused = len(stack.engine.logged("script refused"))
    script.write_text("- reply: {text: 5}\n- reply: {}\n- every: 0\n")
    assert [_complete(stack, "Please greet").text for _ in range(3)] == ["number 4"] * 3
    script.unlink()
    assert [_complete(stack, "Please greet").text for _ in range(3)] == ["number 4"] * 3
    script.write_text("- reply: {text: mended}\n")
    assert _complete(stack, "Please greet").text == "mended"
    assert [entry["problems"] for entry in stack.engine.logged("script refused")[refused:]] == [
        [
            f"{script}:1: text: int 5 where a text is expected",
            f"{script}:3: every: unknown (allowed are match, reply, replies, in_order)",
            f"{script}:3: the rule has no reply (give it reply, or replies)",
        ],
        [f"{script}:1: No such file or directory"],
    ]


def test_a_regex_that_never_ends_fails_its_request_alone(stack: Stack, script: Path) -> None:
    script.write_text(HELLO + "- match: {last_message_regex: '(a+)+$'}\n  reply: {text: found}\n")
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError, match=r"the rule on line 3 of reply_script: a regex takes longer than"):
        _chat(stack, "a" * 100 + "!")
    assert time.monotonic() - began < 10
    assert _chat(stack, "aaa").message.content == "found"


def test_a_conversation_of_a_data_set_goes_on_as_it_went(stack: Stack) -> None:
    assert _chat(stack, "Where are you?").message.content == "Here, é\U0001f600."
    assert _chat(stack, "Where are you?", "Here.", "And  who?\n").message.content == "Nobody, as I said."
    assert _complete(stack, "Where are you?").text == "Here, é\U0001f600."
    assert _chat(stack, "Where else are you?").finish_reason == "length", "it is random"


@pytest.mark.parametrize("heading", ["A script", "A data set"])
def test_the_examples_of_the_docs_run(stack: Stack, script: Path, heading: str) -> None:
    if heading == "A script":
        script.write_text(example(f"## {heading}", "yaml"))
    run_example(stack, heading)
