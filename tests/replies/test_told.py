# SPDX-License-Identifier: Apache-2.0
"""Replies whose tokens somebody gives: they are said, as far as the client allows, and end as is wished."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.ending import REPETITION, Ending
from mockengine.replies.planner import Planner, RepliesConfig
from mockengine.replies.wish import OwnTiming, Wish
from mockengine.wire.outputs import FinishReason, RequestError
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 2
EOS_PARAMS = {"eos_token_id": EOS, "all_stop_token_ids": (EOS,)}
FAILURE = RequestError("server_error", "the engine is out of luck")


class _Wanting:
    """Wants the same of every reply."""

    def __init__(self, wish: Wish | None) -> None:
        self._wish = wish

    def wish_for(self, asked: Asked) -> Wish | None:
        assert asked.request.request_id == "r"
        return self._wish


def _reply(*wishes: Wish | None, **params: Any) -> tuple[list[int], Ending]:
    """Return what is said to a request, an end that the source does not say included, and how it ends."""
    config = RepliesConfig(vocab_size=1_000, wishes=[_Wanting(wish) for wish in wishes])
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    request = EngineCoreRequest(request_id="r", prompt_token_ids=array("I", [5, 6]), sampling_params=sampling)
    plan = Planner(config, max_model_len=400).plan(request)
    said = plan.source.tokens(plan.key, 0, plan.ending.output_tokens)
    if plan.ending.last_token is not None:
        said[-1] = plan.ending.last_token
    return said, plan.ending


@pytest.mark.parametrize(
    ("params", "said", "reason", "stop_reason"),
    [
        (EOS_PARAMS, [7, 8, 9, EOS], STOP, None),
        ({**EOS_PARAMS, "max_tokens": 4}, [7, 8, 9, EOS], STOP, None),
        ({**EOS_PARAMS, "max_tokens": 3}, [7, 8, 9], LENGTH, None),
        ({**EOS_PARAMS, "max_tokens": 2}, [7, 8], LENGTH, None),
        ({**EOS_PARAMS, "min_tokens": 5}, [7, 8, 9, 7, 8, EOS], STOP, None),
        ({"max_tokens": 5, "all_stop_token_ids": (EOS,)}, [7, 8, 9, 7, 8], LENGTH, None),
        ({**EOS_PARAMS, "stop_token_ids": (8,)}, [7, 8], STOP, 8),
        ({**EOS_PARAMS, "stop_token_ids": (8,), "min_tokens": 1}, [7, 8], STOP, 8),
        ({**EOS_PARAMS, "stop_token_ids": (8,), "min_tokens": 2}, [7, 9, EOS], STOP, None),
        ({**EOS_PARAMS, "stop_token_ids": (8,), "min_tokens": 4}, [7, 9, 7, 9, EOS], STOP, None),
        ({**EOS_PARAMS, "bad_words_token_ids": ((8,),)}, [7, 9, EOS], STOP, None),
        ({**EOS_PARAMS, "allowed_token_ids": (8, EOS)}, [8, EOS], STOP, None),
        ({**EOS_PARAMS, "logit_bias": {7: -100.0, 9: 5.0}}, [8, 9, EOS], STOP, None),
    ],
)
def test_tokens_are_said_as_the_client_allows(
    params: dict[str, Any], said: Sequence[int], reason: FinishReason, stop_reason: int | None
) -> None:
    tokens, ending = _reply(Wish(token_ids=(7, 8, 9)), **params)

    assert (tokens, ending.finish_reason, ending.stop_reason) == (said, reason, stop_reason)


@pytest.mark.parametrize(
    ("reason", "said", "stop_reason"),
    [
        (FinishReason.STOP, [7, 8, EOS], None),
        (FinishReason.LENGTH, [7, 8], None),
        (FinishReason.ABORT, [7, 8], None),
        (FinishReason.ERROR, [7, 8], None),
        (FinishReason.REPETITION, [7, 8], REPETITION),
    ],
)
def test_a_reply_ends_for_the_reason_that_is_wished(
    reason: FinishReason, said: list[int], stop_reason: str | None
) -> None:
    error = FAILURE if reason is FinishReason.ERROR else None

    tokens, ending = _reply(Wish(token_ids=(7, 8), finish_reason=reason, error=error), **EOS_PARAMS)

    assert tokens == said
    assert (ending.finish_reason, ending.stop_reason, ending.error) == (reason, stop_reason, error)
    # An end that is wished for needs no EOS that the client would know.
    ignoring, ending = _reply(Wish(token_ids=(7, 8), finish_reason=reason), all_stop_token_ids=(EOS,))
    assert (ignoring, ending.finish_reason) == (said, reason)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_random_replies_end_for_it_too(reason: FinishReason) -> None:
    error = FAILURE if reason is FinishReason.ERROR else None

    tokens, ending = _reply(Wish(finish_reason=reason, output_tokens=6, error=error), **EOS_PARAMS)

    assert len(tokens) == 6
    assert (ending.finish_reason, ending.error) == (reason, error)
    assert (tokens[-1] == EOS) == (reason is FinishReason.STOP)
    assert EOS not in tokens[:-1]


def test_lengths_are_as_wished_within_what_the_client_allows() -> None:
    assert len(_reply(Wish(output_tokens=12), **EOS_PARAMS)[0]) == 12
    assert len(_reply(Wish(output_tokens=12), **EOS_PARAMS, max_tokens=5)[0]) == 5
    assert _reply(Wish(token_ids=(7, 8), output_tokens=6), **EOS_PARAMS)[0] == [7, 8, 7, 8, 7, EOS]
    assert _reply(Wish(token_ids=(7, 8, 9), output_tokens=2), **EOS_PARAMS)[0] == [7, EOS]
    assert _reply(Wish(token_ids=(), finish_reason=FinishReason.ERROR, error=FAILURE))[0] == []
    assert _reply(Wish(token_ids=()), **EOS_PARAMS)[0] == [EOS]


def test_where_nothing_is_left_to_say_tokens_are_made_up() -> None:
    forbidding = {"allowed_token_ids": (300, 301)}
    for wish, params, length in (
        (Wish(token_ids=(7, 8)), {"max_tokens": 6, "all_stop_token_ids": (EOS,)}, 6),
        (Wish(token_ids=()), {**EOS_PARAMS, "min_tokens": 5}, 6),
        (Wish(token_ids=(), output_tokens=4), EOS_PARAMS, 4),
        (Wish(token_ids=(), output_tokens=4, finish_reason=LENGTH), EOS_PARAMS, 4),
    ):
        tokens, ending = _reply(wish, **forbidding, **params)
        assert len(tokens) == length
        assert {*tokens} - {300, 301} == ({EOS} if ending.finish_reason is STOP else set())
        assert _reply(wish, **forbidding, **params) == (tokens, ending)
    nowhere_to_end, ending = _reply(Wish(token_ids=(7, 8), finish_reason=STOP))
    assert (nowhere_to_end, ending.finish_reason) == ([7, 8], STOP)


def test_the_first_who_wants_something_has_it() -> None:
    slow, slower = OwnTiming(ttft_s=1.0), OwnTiming(ttft_s=2.0)
    other = Wish(text="no", reasoning="no", reasons=True, timing=slower, cached_tokens=3)
    wish = Wish(token_ids=(7,), timing=slow).over(other)

    assert wish == Wish(token_ids=(7,), timing=slow, cached_tokens=3)
    assert _reply(None, Wish(token_ids=(7,)), Wish(token_ids=(8,)), **EOS_PARAMS)[0] == [7, EOS]


def test_what_is_said_ends_as_who_says_it_has_it() -> None:
    failing = Wish(output_tokens=3, finish_reason=FinishReason.ERROR, error=FAILURE, cached_tokens=3)

    assert Wish(token_ids=(7,)).over(failing) == Wish(token_ids=(7,), cached_tokens=3)
    assert Wish(finish_reason=LENGTH).over(failing) == Wish(output_tokens=3, finish_reason=LENGTH, cached_tokens=3)
    assert Wish(output_tokens=4).over(failing) == replace(failing, output_tokens=4)
    assert Wish(output_tokens=4).over(Wish(token_ids=(7,))) == Wish(output_tokens=4, token_ids=(7,))


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ReplyError, match=r"^this engine has no tokenizer to say a text with \(set tokenizer to "):
        _reply(Wish(text="hello"))
