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

# What a machine that has other things to do may be late by, and with a first answer on a new connection.
LATE_S = 0.25
LATE_FIRST_S = 2.0


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
        assert due <= stamp <= due + LATE_FIRST_S, stamps
        assert stamp <= stamps[0] + position * 0.06 + LATE_S, stamps


def who_hangs_is_aborted_when_its_client_goes_away(stack: Stack) -> None:
    aborted = len(_aborted(stack))
    # Without a time between them, the Python frontend makes one chunk of two outputs.
    faults: list[tuple[dict[str, Any], int]] = [
        ({"mock_fault": "hang"}, 0),
        ({"mock_fault": "stall:2", "mock_itl_ms": 50}, 2),
    ]
    for number, (asked, outputs) in enumerate(faults):
        stamps = _chunks(stack, asked, patience_s=1.0)
        for _ in range(outputs):
            next(stamps)
        with pytest.raises(httpx.ReadTimeout):
            next(stamps)
        assert _wait_for_aborted(stack, aborted + number + 1)["output_tokens"] == outputs
    stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)


def _wait_for_aborted(stack: Stack, count: int) -> dict[str, Any]:
    """Wait until so many requests have been aborted; return what the log says of the last one."""
    return wait_until(lambda: _aborted(stack), lambda log: len(log) >= count, "what was aborted")[-1]


def _aborted(stack: Stack) -> list[dict[str, Any]]:
    return [entry for entry in stack.engine.logged("request finished") if entry["finish_reason"] == "abort"]


def _chunks(stack: Stack, asked: dict[str, Any], patience_s: float = DEADLINE_S) -> Iterator[float]:
    """Yield when each chunk of a stream with a text has come; its client goes away if none has for so long."""
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 50, "stream": True, "vllm_xargs": asked}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=patience_s) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line.removeprefix("data: "))["choices"][0]["text"]:
                yield time.monotonic()
