# SPDX-License-Identifier: Apache-2.0
"""Requests as scripts and data sets see them."""

from array import array
from collections.abc import Sequence
from typing import Any

from mockengine.replies.asked import Asked
from mockengine.replies.key import SeedScope, reply_key
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.requests import EngineCoreRequest, LoraRequest
from mockengine.wire.sampling import SamplingParams


def chat(*messages: str) -> str:
    """Return what the bundled model's template makes of a conversation that a user begins."""
    said = zip(("user", "assistant") * len(messages), messages, strict=False)
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"


def asking(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None = None, *, lora: str | None = None, **fields: Any
) -> Asked:
    """Return a request with a prompt, of text where there is a tokenizer."""
    if isinstance(prompt, str):
        assert tokenizer is not None
        prompt = tokenizer.encode(prompt)
    params = SamplingParams()
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=array("I", prompt),
        sampling_params=params,
        lora_request=None if lora is None else LoraRequest(lora, 1, "/path"),
        **fields,
    )
    return Asked(request, params, reply_key(request, 0, SeedScope.PROMPT), tokenizer)
