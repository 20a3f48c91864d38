# SPDX-License-Identifier: Apache-2.0
"""What every frontend that serves `vision_model` must do with the engine behind it."""

from typing import Any

import httpx

from tests.support.stack import MODEL_NAME, Stack
from tests.support.vision_model import IMAGE_TOKENS, question_about

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
Colour = tuple[int, int, int]


def post(stack: Stack, colour: Colour, **asked: Any) -> httpx.Response:
    """Ask about an image."""
    body = {"model": MODEL_NAME, "messages": question_about(colour), "max_tokens": 5, "return_token_ids": True, **asked}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=20)


def tokens(stack: Stack, colour: Colour) -> list[int]:
    """Return what is said of an image."""
    response = post(stack, colour)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def an_image_is_answered_and_counted(stack: Stack) -> None:
    body = post(stack, RED).json()
    text_only: Any = [{"role": "user", "content": "What is it?"}]
    without = stack.client().chat.completions.create(model=MODEL_NAME, messages=text_only, max_tokens=5)
    assert without.usage is not None
    assert body["usage"]["prompt_tokens"] == without.usage.prompt_tokens + IMAGE_TOKENS
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["token_ids"]) == 5


def the_same_image_is_answered_alike_and_another_one_is_not(stack: Stack) -> None:
    first = tokens(stack, RED)
    assert tokens(stack, RED) == first
    assert tokens(stack, GREEN) != first
    assert stack.get("/health").status_code == 200


def blocks_of_an_image_are_hit_by_the_same_image_alone(stack: Stack) -> None:
    """Check a stack whose engine has a cache with blocks of 16 tokens, of which a question fills one."""

    def hits() -> float:
        return stack.metric("vllm:prefix_cache_hits_total")

    tokens(stack, BLUE)
    before = hits()
    tokens(stack, (1, 2, 3))
    assert hits() == before
    tokens(stack, BLUE)
    stack.wait_for_metric("vllm:prefix_cache_hits_total", lambda value: value == before + 16)
