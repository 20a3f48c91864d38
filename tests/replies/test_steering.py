# SPDX-License-Identifier: Apache-2.0
"""Clients steer their requests: what they ask for is wished, and all that is wrong with it is said at once."""

import json
import re
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.engine_setup import set_up
from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.mishaps import ALLOWED, MISHAPS
from mockengine.replies.planner import RepliesConfig
from mockengine.replies.steered import MOST_JSON, MOST_TOKENS
from mockengine.replies.steering import KEYS, Steering
from mockengine.replies.wish import OwnTiming, ToolCall, Wish
from mockengine.settings import Settings
from mockengine.wire.codec import pack, unpack
from mockengine.wire.outputs import FinishReason, RequestError
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams, read_sampling_params
from tests.support.docs import table
from tests.support.rig import CONFIG, Rig, request

VOCAB_SIZE = 1_000
NAMES = [key.name for key in KEYS]
ERROR = FinishReason.ERROR
MESSAGE = "the client asked for this error"
A_CALL = "an object with name, which is a text, and arguments, and nothing else, is expected"


def wish_for(extra_args: Mapping[str, object] | None, *, is_on: bool = True) -> Wish | None:
    params = SamplingParams(extra_args=extra_args)
    made = EngineCoreRequest(request_id="r", prompt_token_ids=array("I", [5]), sampling_params=params)
    return Steering(VOCAB_SIZE, is_on=is_on).wish_for(Asked(made, params, 1, None))


def refusal(extra_args: Mapping[str, object], *, is_on: bool = True) -> str:
    with pytest.raises(ReplyError) as refused:
        wish_for(extra_args, is_on=is_on)
    text = str(refused.value)
    assert text.startswith("vllm_xargs: ")
    return text.removeprefix("vllm_xargs: ")


def a_call(arguments: object) -> object:
    return [{"name": "f", "arguments": arguments}]


def failing(code: str = "server_error", message: str = MESSAGE, *, retryable: bool = False, **wished: Any) -> Wish:
    return Wish(finish_reason=ERROR, error=RequestError(code, message, retryable), **wished)


# What is asked for.


@pytest.mark.parametrize(
    ("asked", "wish"),
    [
        ({"text": "hello"}, Wish(text="hello")),
        ({"text": ""}, Wish(text="")),
        ({"token_ids": [1, 2.0, 999]}, Wish(token_ids=[1, 2, 999])),
        ({"token_ids": "[1, 2]"}, Wish(token_ids=[1, 2])),
        ({"token_ids": []}, Wish(token_ids=[])),
        ({"reasoning": "so", "text": "hi"}, Wish(reasoning="so", text="hi")),
        (
            {"tool_calls": '[{"name": "f", "arguments": {"x": [1, null]}}, {"name": "g", "arguments": "no JSON"}]'},
            Wish(tool_calls=[ToolCall("f", {"x": [1, None]}), ToolCall("g", "no JSON")]),
        ),
        ({"tool_calls": [{"name": "f"}]}, Wish(tool_calls=[ToolCall("f", {})])),
        ({"output_tokens": 7}, Wish(output_tokens=7)),
        ({"output_tokens": 7.0}, Wish(output_tokens=7)),
        ({"finish_reason": "length"}, Wish(finish_reason=FinishReason.LENGTH)),
        ({"finish_reason": "repetition"}, Wish(finish_reason=FinishReason.REPETITION)),
        ({"finish_reason": "error"}, Wish(finish_reason=ERROR)),
        ({"error_message": "m"}, failing(message="m", token_ids=())),
        ({"error_retryable": 1}, failing(retryable=True, token_ids=())),
        ({"error_retryable": False}, failing(token_ids=())),
        (
            {"error": '{"code": "c", "message": "m", "retryable": 1}', "text": "a"},
            failing("c", "m", retryable=True, text="a"),
        ),
        ({"error": {}, "finish_reason": "error"}, failing()),
        ({"error_code": "c", "output_tokens": 3}, failing("c", output_tokens=3)),
        ({"ttft_ms": 250}, Wish(timing=OwnTiming(ttft_s=0.25))),
        ({"ttft_ms": 0, "itl_ms": 12.5}, Wish(timing=OwnTiming(ttft_s=0.0, itl_s=0.0125))),
        ({"cached_tokens": 0}, Wish(cached_tokens=0)),
        ({"fault": "hang"}, Wish(timing=OwnTiming(ttft_s=inf))),
        ({"fault": "stall"}, Wish(timing=OwnTiming(stalls_after=1))),
        ({"fault": "stall:12", "itl_ms": 5}, Wish(timing=OwnTiming(itl_s=0.005, stalls_after=12))),
        ({"fault": "error"}, Wish(finish_reason=ERROR, token_ids=())),
        ({"fault": "error", "finish_reason": "error", "error_code": "c"}, failing("c", token_ids=())),
        ({"fault": "abort", "output_tokens": 5}, Wish(finish_reason=FinishReason.ABORT, output_tokens=5)),
        ({"fault": "brown-out.1", "itl_ms": 5}, Wish(rule="brown-out.1", timing=OwnTiming(itl_s=0.005))),
        ({"fault": "stall", "error_code": "c"}, failing("c", timing=OwnTiming(stalls_after=1))),
        ({"text": None, "fault": None}, Wish()),
    ],
)
def test_what_is_asked_for_is_wished(asked: dict[str, object], wish: Wish) -> None:
    flat = {f"mock_{name}": value for name, value in asked.items()}
    assert wish_for(flat) == wish
    assert wish_for({"mock": asked}) == wish
    assert wish_for({"mock": json.dumps(asked)}) == wish
    assert wish_for({"kv_transfer_params": {"mock_text": 1}, "hammock": 2, **flat}) == wish
    half, rest = dict(list(flat.items())[:1]), dict(list(asked.items())[1:])
    assert wish_for({**half, "mock": json.dumps(rest)}) == wish


def test_who_asks_for_nothing_is_left_alone() -> None:
    for extra_args in (None, {}, {"other": 1, "session_id": "s"}, {"Mock_text": "x"}):
        assert wish_for(extra_args) is None
        assert wish_for(extra_args, is_on=False) is None


def test_the_first_wish_leaves_open_what_it_does_not_say() -> None:
    script = Wish(text="script", timing=OwnTiming(ttft_s=1.0, itl_s=2.0))
    steered = wish_for({"mock_ttft_ms": 10, "mock_output_tokens": 3})
    assert steered is not None
    assert steered.over(script) == Wish(text="script", output_tokens=3, timing=OwnTiming(ttft_s=0.01, itl_s=2.0))


# What is refused.


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("text", 5, "int 5 where a text is expected"),
        ("text", b"x", "bin of 1 where a text is expected"),
        ("text", "\ud800", "a text with half a character (a lone surrogate) cannot be said"),
        ("text", "é" * 2**17 + "x", f"a text of {2**18 + 1} bytes where at most {2**18} are allowed"),
        ("token_ids", [1, 1_000], "int 1000 where a whole number from 0 to 999 is expected"),
        ("token_ids", [-1], "int -1 where a whole number from 0 to 999 is expected"),
        ("token_ids", [True], "bool True where a whole number from 0 to 999 is expected"),
        ("token_ids", "1, 2", "str '1, 2' is no JSON (Extra data: line 1 column 2 (char 1))"),
        ("token_ids", 7, "int 7 where a list of token ids, or JSON of one, is expected"),
        ("token_ids", "7", "str '7' where a list of token ids, or JSON of one, is expected"),
        ("token_ids", "[" * 100_000, "JSON that is nested too deep"),
        ("token_ids", "[NaN]", "str '[NaN]' is no JSON (NaN is not a number)"),
        ("token_ids", [1] * (MOST_TOKENS + 1), f"a list of {MOST_TOKENS + 1} where at most {MOST_TOKENS} are allowed"),
        ("token_ids", " " * 2**21, f"JSON of {2**21} characters where at most {MOST_JSON} are allowed"),
        ("tool_calls", [{"name": ""}], f"map of 1 where {A_CALL}"),
        ("tool_calls", [{"name": "f", "parameters": {}}], f"map of 2 where {A_CALL}"),
        ("tool_calls", [7], f"int 7 where {A_CALL}"),
        ("tool_calls", a_call([1]), "array of 1 where an object of arguments, or a text, is expected"),
        ("tool_calls", a_call({"x": b"1"}), "bin of 1 where what JSON can say is expected"),
        ("tool_calls", a_call({"x": inf}), "float inf where what JSON can say is expected"),
        ("tool_calls", a_call({"x": {1: 2}}), "int 1 where a text for a name is expected"),
        ("tool_calls", a_call(json.loads('{"x":' * 70 + "1" + "}" * 70)), "it is nested more than 64 deep"),
        ("tool_calls", a_call({"x": [0] * 10**6}), f"tool calls of 3000008 bytes where at most {2**18} are allowed"),
        ("output_tokens", 0, "int 0 where a whole number from 1 to 2147483647 is expected"),
        ("output_tokens", 1.5, "float 1.5 where a whole number from 1 to 2147483647 is expected"),
        ("output_tokens", "5", "str '5' where a whole number from 1 to 2147483647 is expected"),
        ("finish_reason", "STOP", "str 'STOP' where one of stop, length, abort, error, repetition is expected"),
        ("error", "no luck", "str 'no luck' is no JSON (Expecting value: line 1 column 1 (char 0))"),
        ("error", {"kind": 1}, "kind is unknown (allowed are code, message, retryable)"),
        ("error", {"retryable": 2}, "int 2 where true or false is expected"),
        ("error_retryable", "yes", "str 'yes' where true or false is expected"),
        ("ttft_ms", -0.5, "float -0.5 where a number from 0 to 3600000 is expected"),
        ("itl_ms", float("nan"), "float nan where a number from 0 to 3600000 is expected"),
        ("itl_ms", 10**400, f"int 1{'0' * 55}… where a number from 0 to 3600000 is expected"),
        ("itl_ms", True, "bool True where a number from 0 to 3600000 is expected"),
        ("cached_tokens", -1, "int -1 where a whole number from 0 to 2147483647 is expected"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(name: str, value: object, said: str) -> None:
    assert refusal({f"mock_{name}": value}) == f"mock_{name}: {said}"


@pytest.mark.parametrize(
    "fault", ["", "a b", "stall:", "stall:0", "stall:-1", "stall:x", "stall:²", "stall:9999999999", "hang:2"]
)
def test_a_fault_that_is_none_is_told(fault: str) -> None:
    said = refusal({"mock_fault": fault})
    assert said == f"mock_fault: str {fault!r} where one of {ALLOWED} is expected"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"fault": "hang", "itl_ms": 5, "text": "x"},
            "fault: hang says nothing, whatever mock_itl_ms, mock_text ask for",
        ),
        ({"text": "x", "token_ids": [1]}, "token_ids: they are said instead of mock_text"),
        ({"fault": "abort", "finish_reason": "stop"}, "fault: abort ends otherwise than mock_finish_reason: stop"),
        ({"fault": "abort", "error": {}}, "error: only a reply that ends with error has one"),
        ({"finish_reason": "stop", "error_code": "c"}, "error_code: only a reply that ends with error has one"),
        (
            {"error": {}, "error_code": "c", "error_retryable": 1},
            "error_code, mock_error_retryable: mock_error says it all",
        ),
    ],
)
def test_what_cannot_be_at_once_is_told(asked: dict[str, object], said: str) -> None:
    assert refusal({f"mock_{name}": value for name, value in asked.items()}) == f"mock_{said}"


def test_all_that_is_wrong_is_told_at_once() -> None:
    given = {
        "mock_txt": "x",
        "mockText": "y",
        "mock_ttft_ms": "soon",
        "mock_output_tokens": 3,
        "mock": {"output_tokens": 4, "itl_ms": -1, "txt": 1},
    }
    known = ", ".join(f"mock_{name}" for name in NAMES)
    assert refusal(given).split("; ") == [
        "mock_ttft_ms: str 'soon' where a number from 0 to 3600000 is expected",
        "mock.output_tokens: it is in mock_output_tokens already",
        "mock.itl_ms: int -1 where a number from 0 to 3600000 is expected",
        f"mock_txt, mockText, mock.txt: unknown (allowed are mock, {known})",
    ]
    for carried in (5, "5", "[]", '"x"', [1], {1: 2}):
        said = refusal({"mock": carried})
        assert re.match("mock: .* where an object of what may be asked for, or JSON of one, is expected", said)
    assert len(refusal({f"mock_{'x' * 1_000}{number}": 1 for number in range(1_000)})) < 3_000


def test_an_engine_that_is_not_steered_says_so() -> None:
    said = "mock_text, mock: clients do not steer this engine (steering is off; leave out whatever begins with mock)"
    assert refusal({"mock_text": "x", "mock": "{}", "other": 1}, is_on=False) == said
    (steering,) = set_up(Settings(steering=False)).replies.wishes
    params = SamplingParams(extra_args={"mock_text": "x"})
    with pytest.raises(ReplyError, match="steering is off"):
        steering.wish_for(Asked(request(), params, 1, None))


# Whatever is asked for.

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.binary(max_size=5),
    st.sampled_from(["[", "{}", "[1]", '{"text": 1}', '"\\ud800"', "1e999", "stall:3", "error", "stop", "NaN", "[[]]"]),
)
_ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.one_of(st.sampled_from([*NAMES, "name", "arguments", "code"]), _SCALARS), inner, max_size=4
        )
    ),
    max_leaves=12,
)
_KEYS = st.sampled_from(["mock", *(f"mock_{name}" for name in NAMES), "mock_", "mock_x", "mocking", "mock_\N{SNOWMAN}"])


CONFIG_OF_STEERED = replace(CONFIG, replies=RepliesConfig(vocab_size=VOCAB_SIZE, wishes=[Steering(VOCAB_SIZE)]))


def asking(request_id: str, extra_args: Mapping[str, object]) -> EngineCoreRequest:
    return request(request_id, sampling_params=SamplingParams(max_tokens=5, extra_args=extra_args))


@given(asked=st.dictionaries(_KEYS, _ANYTHING, max_size=5), carried=st.booleans())
def test_whatever_is_asked_for_is_wished_or_refused(asked: dict[str, Any], *, carried: bool) -> None:
    """Nothing that msgpack can say makes anything but a wish or a refusal, and both can be said to a frontend."""
    try:
        wire = unpack(pack({"extra_args": {"mock": asked} if carried else asked}))
        params = read_sampling_params(wire, "sampling_params", [])
    except ValueError:
        # Such a message is refused as a whole.
        return
    extra_args = params.extra_args
    with suppress(ReplyError):
        wish = wish_for(extra_args)
        json.dumps([] if wish is None else [call.arguments for call in wish.tool_calls or ()])
    rig = Rig(CONFIG_OF_STEERED)
    rig.add(asking("r", extra_args or {}))
    for _ in range(10):
        rig.step()
    rig.abort("r")
    rig.run()
    assert rig.ranks.num_requests == 0


@given(st.text(), st.text())
def test_any_carried_text_is_an_object_or_refused(text: str, name: str) -> None:
    for carried in (text, json.dumps({name: text}), json.dumps({"error": {name: text}, "text": text})):
        rig = Rig(CONFIG_OF_STEERED)
        rig.add(asking("r", {"mock": carried}))
        rig.step()


# What becomes of it.


def test_the_engine_answers_as_asked_and_refuses_what_it_cannot() -> None:
    rig = Rig(CONFIG_OF_STEERED)
    rig.add(
        asking("told", {"mock_token_ids": "[5, 6]", "mock_finish_reason": "repetition"}),
        asking("fails", {"mock_error_code": "c", "mock_error_retryable": 1}),
        asking("wrong", {"mock_txt": "x"}),
        asking("text", {"mock_text": "x"}),
    )
    rig.run()
    assert (rig.tokens("told"), rig.finish_reason("told")) == ([5, 6], FinishReason.REPETITION)
    (failed,) = rig.outputs("fails")
    assert (failed.new_token_ids, failed.finish_reason) == ((), ERROR)
    assert failed.error == RequestError("c", MESSAGE, retryable=True)
    for name, said in (("wrong", "vllm_xargs: mock_txt: unknown "), ("text", "this engine has no tokenizer")):
        (refused,) = rig.outputs(name)
        assert refused.finish_reason is ERROR
        assert refused.error is not None
        assert refused.error.code == "validation_error"
        assert refused.error.message.startswith(said)


# The docs.


def test_the_docs_have_every_key_and_every_fault() -> None:
    assert sorted(Steering(VOCAB_SIZE)._readers) == sorted(NAMES)
    rows = [[f"`mock_{key.name}`", key.allowed, key.meaning] for key in KEYS]
    assert table("## A client steers its request") == rows
    assert table("### Faults") == [
        [f"`{fault.name}`" + (f", `{fault.name}:N`" if fault.takes_number else ""), fault.meaning] for fault in MISHAPS
    ]
