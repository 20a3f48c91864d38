# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for something, and the reply to each, which is the same behind every frontend."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.support.stack import MODEL_NAME, Stack, wait_until

LENGTH: Final = 9
FLAGS: Final = (
    # How long replies get by themselves.
    f"--output-length={LENGTH}",
    # One at a time, and slow enough for others to wait for it.
    *("--load-model=vllm", "--scheduling-policy=priority", "--max-num-seqs=1", "--timing=per_request", "--itl-ms=4"),
)
"""What engines play for these requests."""

_PLAIN: Final = (1822, 11720, 27829, 15596, 25904, 26561, 22939, 15695)
_GOES_ON: Final = (*_PLAIN, 18772, 30191, 14614, 25181, 20431, 12994, 9167, 14163, 10297, 26602, 8703, 27755)
_CHAT: Final = (27328, 5309, 21830, 25620, 30980, 3696, 19381, 14271)
_EOS: Final = 2
# The token of that word.
_US: Final = 300
_TWO: Final = (5309, _US, 5309, 5309, 5309, _US, 5309, _US, _EOS)
_REPEATS: Final = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 4}


@dataclass(frozen=True)
class Asked:
    """A request and its reply.

    Attributes:
        name: of what is asked.
        tokens: of the reply.
        body: of the request, besides model, prompt and `max_tokens`.
        finish_reason: as clients hear it.
        stop_reason: likewise.
        is_chat: whether it is one.

    """

    name: str
    tokens: Sequence[int]
    body: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    is_chat: bool = False


ASKED: Final = (
    Asked("nothing", (*_PLAIN, _EOS)),
    Asked("max_tokens", _PLAIN[:4], {"max_tokens": 4}, "length"),
    Asked("min_tokens", (*_GOES_ON[:12], _EOS), {"min_tokens": 12}),
    Asked("ignore_eos", _GOES_ON, {"ignore_eos": True}, "length"),
    Asked(
        "stop_token_ids",
        (1824, 11722, 27829, 15597, 25904, 26562, 22940, 15696, 310),
        {"stop_token_ids": [310, 311], "ignore_eos": True},
        stop_reason=310,
    ),
    Asked("allowed_token_ids", (300, 301, 302, 301, 302, 302, 302, 301, _EOS), {"allowed_token_ids": [300, 301, 302]}),
    Asked("logit_bias 100", (300, 300, 301, 300, 301, 301, 301, 300, _EOS), {"logit_bias": {"300": 100, "301": 100}}),
    Asked(
        "logit_bias -100",
        (300, 300, 302, 300, 302, 302, 302, 300, _EOS),
        {"allowed_token_ids": [300, 301, 302], "logit_bias": {"301": -100}},
    ),
    Asked("a slight logit_bias", (*_PLAIN, _EOS), {"logit_bias": {"300": 5}}),
    Asked(
        "repetition_detection",
        (300, 300, 300, 300),
        {"allowed_token_ids": [300], "repetition_detection": _REPEATS},
        "repetition",
        "repetition_detected",
    ),
    Asked("seed", (25185, 19178, 23446, 2704, 28476, 11202, 17929, 18930, _EOS), {"seed": 7}),
    Asked("temperature 0", (*_PLAIN, _EOS), {"temperature": 0}),
    Asked("logprobs", (*_PLAIN, _EOS), {"logprobs": 2}),
    Asked("cache_salt", (*_PLAIN, _EOS), {"cache_salt": "x"}),
    Asked("a chat", (*_CHAT, _EOS), is_chat=True),
    Asked("a chat's logprobs", (*_CHAT, _EOS), {"logprobs": True, "top_logprobs": 2}, is_chat=True),
    Asked("two tokens", _TWO, {"allowed_token_ids": [_US, 5309]}, is_chat=True),
    Asked("bad_words", (*[5309] * 8, _EOS), {"allowed_token_ids": [_US, 5309], "bad_words": ["us"]}, is_chat=True),
)


def is_answered(stack: Stack, asked: Asked) -> None:
    """Check the reply to a request: tokens, how it ends, and what is counted."""
    reply = reply_to(stack, asked.body, is_chat=asked.is_chat)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == list(asked.tokens), choice
    assert (choice["finish_reason"], choice["stop_reason"]) == (asked.finish_reason, asked.stop_reason)
    assert reply["usage"]["completion_tokens"] == len(asked.tokens)
    assert reply["usage"]["prompt_tokens"] == (16 if asked.is_chat else 5)


def the_lower_priority_goes_first(stack: Stack) -> None:
    """Check that of two requests that wait the one with the smaller number is served before the other."""

    def wait(name: str, headers: Mapping[str, str], **body: Any) -> threading.Thread:
        named = {"X-Request-Id": name, **headers}
        thread = threading.Thread(target=reply_to, args=(stack, body), kwargs={"headers": named})
        thread.start()
        _wait_logged(stack, "request started", name)
        return thread

    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=20) as holds_the_slot:
        lines = holds_the_slot.iter_lines()
        next(lines)
        threads = [
            wait("goes-last", {}, priority=5),
            wait("goes-first", {"X-Vllm-Priority": "-1"}, priority=9),
        ]
    for thread in threads:
        thread.join(20)
    first, last = (_wait_logged(stack, "request finished", name) for name in ("goes-first", "goes-last"))
    assert first < last


def reply_to(
    stack: Stack, body: Mapping[str, Any], *, is_chat: bool = False, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the response to a request."""
    prompt = {"messages": [{"role": "user", "content": "Hello there"}]} if is_chat else {"prompt": "Hello there"}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    asked = {"model": MODEL_NAME, "max_tokens": 20, "return_token_ids": True, **prompt, **body}
    response = httpx.post(f"{stack.url}{path}", json=asked, headers=headers, timeout=20)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def _wait_logged(stack: Stack, event: str, name: str) -> int:
    """Wait until the engine has logged an event of a request; return its place in the log."""

    def places() -> list[int]:
        entries = enumerate(stack.engine.log)
        return [place for place, entry in entries if entry["event"] == event and name in entry["request_id"]]

    return wait_until(places, bool, f"{event} of {name}")[0]
