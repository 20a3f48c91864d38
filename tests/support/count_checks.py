# SPDX-License-Identifier: Apache-2.0
"""What clients of any frontend count: tokens, scores, and where a stop string cuts. One function per behaviour."""

import json
from itertools import accumulate
from typing import Any

import httpx

from tests.support.checks import PROMPT, QUESTION
from tests.support.stack import DEADLINE_S, MODEL_NAME, Stack

LENGTH = 9


def stop_strings_cut_what_is_said(stack: Stack) -> None:
    hello = json.dumps(_said(stack, prompt="hello", max_tokens=1)["choices"][0]["prompt_token_ids"])
    for stop, text, reason in ((["lo", "ell"], "h", "ell"), (["lo"], "hel", "lo"), (["x"], "hello", None)):
        given = {"stop": stop, "max_tokens": 50, "vllm_xargs": {"mock_token_ids": hello}}
        for path in ("completions", "chat/completions"):
            (choice,) = _said(stack, path, **given)["choices"]
            assert (_text(choice), choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason), path
            chunks = _streamed(stack, path, **given)
            assert "".join(_text(choice) for choice in chunks) == text
            assert (chunks[-1]["finish_reason"], chunks[-1].get("stop_reason")) == ("stop", reason)
    stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)


def scores_are_as_many_as_tokens(stack: Stack) -> None:
    asked: dict[str, Any] = {"max_tokens": LENGTH, "logprobs": 2, "ignore_eos": True}
    (whole,) = _said(stack, **asked)["choices"]
    _are_scores(whole["logprobs"], whole["text"])
    parts = [choice["logprobs"] for choice in _streamed(stack, **asked) if choice.get("logprobs")]
    assert {name: [each for part in parts for each in part[name]] for name in whole["logprobs"]} == whole["logprobs"]

    asked = {**asked, "logprobs": True, "top_logprobs": 2}
    (chat,) = _said(stack, "chat/completions", **asked)["choices"]
    scores = chat["logprobs"]["content"]
    assert "".join(each["token"] for each in scores) == chat["message"]["content"]
    assert [len(each["top_logprobs"]) in (2, 3) for each in scores] == [True] * LENGTH
    chunks = _streamed(stack, "chat/completions", **asked)
    assert [each for chunk in chunks for each in (chunk.get("logprobs") or {}).get("content") or ()] == scores


def usage_is_exact(stack: Stack) -> None:
    for path in ("completions", "chat/completions"):
        for asked, tokens in (({"max_tokens": 1}, 1), ({"max_tokens": 17}, 17), (_saying_nothing(), 1)):
            whole = _said(stack, path, **asked)
            (choice,) = whole["choices"]
            prompt = len(choice.get("prompt_token_ids") or whole["prompt_token_ids"])
            assert len(choice["token_ids"]) == tokens
            assert _counted(whole["usage"]) == (prompt, tokens, prompt + tokens)
            *_, last = _chunks(stack, path, stream_options={"include_usage": True}, **asked)
            assert (last["choices"], _counted(last["usage"])) == ([], (prompt, tokens, prompt + tokens))


def usage_tells_what_was_cached(stack: Stack) -> None:
    """Needs a frontend that gives details of prompts."""
    for wished in (0, 3, 1_000):
        usage = _said(stack, max_tokens=2, vllm_xargs={"mock_cached_tokens": wished})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == min(wished, usage["prompt_tokens"] - 1)


def usage_counts_all_replies(stack: Stack) -> None:
    """Needs a frontend that makes several."""
    for path in ("completions", "chat/completions"):
        both = _said(stack, path, n=2, max_tokens=LENGTH)
        prompt = len(both["choices"][0].get("prompt_token_ids") or both["prompt_token_ids"])
        assert _counted(both["usage"]) == (prompt, 2 * LENGTH, prompt + 2 * LENGTH)
        # What a client wants, it wants of each.
        steered = _said(stack, path, n=2, max_tokens=50, vllm_xargs={"mock_token_ids": "[300, 301]"})
        told = [(choice["index"], choice["token_ids"][:2], choice["finish_reason"]) for choice in steered["choices"]]
        assert told == [(0, [300, 301], "stop"), (1, [300, 301], "stop")]
        assert _counted(steered["usage"]) == (prompt, 6, prompt + 6)
        *_, last = _chunks(stack, path, n=2, max_tokens=LENGTH, stream_options={"include_usage": True})
        assert _counted(last["usage"]) == (prompt, 2 * LENGTH, prompt + 2 * LENGTH)


def blocks_that_were_computed_are_cached(stack: Stack) -> None:
    """Needs such a frontend too, and an engine with a prefix cache of blocks of 16 tokens."""
    prompt = " ".join(str(number) for number in range(60))
    usages = [_said(stack, prompt=prompt, max_tokens=1)["usage"] for _ in range(2)]
    whole_blocks = (usages[0]["prompt_tokens"] - 1) // 16
    assert whole_blocks > 0
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 16 * whole_blocks]


def _are_scores(scores: dict[str, Any], text: str) -> None:
    """Look at the logprobs of a completion of `LENGTH` tokens."""
    assert [len(part) for part in scores.values()] == [LENGTH] * 4
    assert "".join(scores["tokens"]) == text
    assert scores["text_offset"] == [0, *accumulate(map(len, scores["tokens"][:-1]))]
    assert [len(others) in (2, 3) for others in scores["top_logprobs"]] == [True] * LENGTH


def _saying_nothing() -> dict[str, Any]:
    return {"max_tokens": 5, "vllm_xargs": {"mock_token_ids": "[]"}}


def _counted(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("content") or said.get("text") or ""


def _body(path: str, asked: dict[str, Any]) -> dict[str, Any]:
    what = {"prompt": PROMPT} if path == "completions" else {"messages": QUESTION}
    return {"model": MODEL_NAME, "return_token_ids": True, **what, **asked}


def _said(stack: Stack, path: str = "completions", **asked: Any) -> Any:
    response = httpx.post(f"{stack.url}/v1/{path}", json=_body(path, asked), timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response.json()


def _chunks(stack: Stack, path: str, **asked: Any) -> list[Any]:
    body = {**_body(path, asked), "stream": True}
    response = httpx.post(f"{stack.url}/v1/{path}", json=body, timeout=DEADLINE_S)
    *chunks, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def _streamed(stack: Stack, path: str = "completions", **asked: Any) -> list[Any]:
    return [choice for chunk in _chunks(stack, path, **asked) for choice in chunk["choices"]]
