# SPDX-License-Identifier: Apache-2.0
"""What clients of any frontend get who steer their requests. One function per behaviour, for any stack."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.checks import PROMPT
from tests.support.stack import DEADLINE_S, MODEL_NAME, Stack, wait_until

# What a machine under load may be late by.
LATE_S = 0.25


def steered(stack: Stack, asked: dict[str, Any], **body: Any) -> Any:
    """Return the completion of a request that is steered like this."""
    extra = {"vllm_xargs": asked, "return_token_ids": True}
    with stack.client() as client:
        return client.completions.create(model=MODEL_NAME, prompt=PROMPT, extra_body=extra, **body)


def tokens_are_said_as_asked(stack: Stack) -> None:
    flat = steered(stack, {"mock_token_ids": "[300, 301, 302]", "mock_finish_reason": "length"})
    carried = steered(stack, {"mock": json.dumps({"token_ids": [300, 301, 302], "finish_reason": "length"})})
    for reply in (flat, carried):
        choice = reply.choices[0]
        assert (choice.token_ids, choice.finish_reason) == ([300, 301, 302], "length")
    assert flat.choices[0].text == carried.choices[0].text
    assert len(steered(stack, {"mock_output_tokens": 5}, max_tokens=9).choices[0].token_ids) == 5


def moments_are_kept(stack: Stack) -> None:
    asked = {"mock_ttft_ms": 300, "mock_itl_ms": 60, "mock_output_tokens": 6, "mock_finish_reason": "length"}
    asked_at = time.monotonic()
    stamps = [stamp - asked_at for stamp in _chunks(stack, asked)]
    assert len(stamps) == 6
    for position, stamp in enumerate(stamps):
        due = 0.3 + position * 0.06
        assert due <= stamp <= due + LATE_S, stamps


def who_hangs_is_aborted_when_its_client_goes_away(stack: Stack) -> None:
    for fault, outputs in (("hang", 0), ("stall:2", 2)):
        others = len(stack.engine.logged("request finished"))
        stamps = _chunks(stack, {"mock_fault": fault}, patience_s=1.0)
        for _ in range(outputs):
            next(stamps)
        with pytest.raises(httpx.ReadTimeout):
            next(stamps)
        ended = _wait_for_end(stack, others)
        assert (ended["finish_reason"], ended["output_tokens"]) == ("abort", outputs)
    stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)


def _chunks(stack: Stack, asked: dict[str, Any], patience_s: float = DEADLINE_S) -> Iterator[float]:
    """Yield when each chunk of a stream with a text has come; its client goes away if none has for so long."""
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 50, "stream": True, "vllm_xargs": asked}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=patience_s) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line.removeprefix("data: "))["choices"][0]["text"]:
                yield time.monotonic()


def _wait_for_end(stack: Stack, others: int) -> dict[str, Any]:
    """Wait until one more request has ended than so many others; return what the log says of it."""
    ended = wait_until(lambda: stack.engine.logged("request finished")[others:], bool, "an end that is logged")
    return ended[0]
