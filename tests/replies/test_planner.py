# SPDX-License-Identifier: Apache-2.0
"""Plans of replies: what may be said is said, and it ends where it has to."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.asked import ReplyError
from mockengine.replies.ending import Ending
from mockengine.replies.length import LengthDraw, fixed_length, normal_length
from mockengine.replies.planner import Plan, Planner, RepliesConfig, ReplyKind
from mockengine.replies.steering import Steering
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.outputs import FinishReason
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from tests.support.stack import ROOT

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
VOCAB_SIZE = 50
EOS = 2
LENGTHS: dict[str, LengthDraw | None] = {
    "max_tokens": None,
    "1": fixed_length(1),
    "17": fixed_length(17),
    "normal:50:100": normal_length(50, 100),
}


def _planner(kind: ReplyKind = ReplyKind.RANDOM, output_length: str = "max_tokens", default: int = 0) -> Planner:
    config = RepliesConfig(
        vocab_size=VOCAB_SIZE,
        default_output_tokens=default,
        output_length=LENGTHS[output_length],
        kind=kind,
    )
    return Planner(config, max_model_len=400)


def _plan(planner: Planner, prompt: Sequence[int] = (5, 6, 7), **params: Any) -> Plan:
    sampling = SamplingParams(**{"max_tokens": 200, **params})
    request = EngineCoreRequest(request_id="r", prompt_token_ids=array("I", prompt), sampling_params=sampling)
    return planner.plan(request)


def _said(plan: Plan) -> list[int]:
    said = plan.source.tokens(plan.key, 0, plan.ending.output_tokens)
    if plan.ending.last_token is not None:
        said[-1] = plan.ending.last_token
    return said


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({}, set(range(VOCAB_SIZE))),
        ({"all_stop_token_ids": (2, 3)}, set(range(VOCAB_SIZE)) - {2, 3}),
        ({"stop_token_ids": (9,), "eos_token_id": EOS}, set(range(VOCAB_SIZE)) - {9, EOS}),
        ({"bad_words_token_ids": ((4,), (1, 8))}, set(range(VOCAB_SIZE)) - {4, 8}),
        ({"allowed_token_ids": (11, 12, 99)}, {11, 12}),
        ({"allowed_token_ids": (11, 12, EOS), "eos_token_id": EOS}, {11, 12}),
        ({"logit_bias": {11: -100.0, 12: 5.0}}, set(range(VOCAB_SIZE)) - {11}),
        ({"logit_bias": {11: 100.0, 12: 99.0}}, {11}),
        ({"logit_bias": {11: 100.0, 12: 100.0}, "allowed_token_ids": (12, 13)}, {12}),
    ],
)
def test_only_what_may_be_said_is_said_and_all_of_it(params: dict[str, object], allowed: set[int]) -> None:
    planner = _planner()
    said = {token for number in range(20) for token in _said(_plan(planner, prompt=(number,), **params))}
    assert said == allowed


@pytest.mark.parametrize(
    ("params", "said", "ending"),
    [
        ({"allowed_token_ids": (EOS,), "eos_token_id": EOS}, [EOS], Ending(1, STOP)),
        ({"logit_bias": {9: 100.0}, "stop_token_ids": (9,)}, [9], Ending(1, STOP, 9)),
        ({"logit_bias": {9: 100.0}, "all_stop_token_ids": (9,)}, None, Ending(200)),
    ],
)
def test_where_nothing_else_may_be_said_it_stops(
    params: dict[str, Any], said: list[int] | None, ending: Ending
) -> None:
    plan = _plan(_planner(), **params)
    assert plan.ending == ending
    assert said is None or _said(plan) == said


def test_a_defect_in_reading_a_constraint_costs_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(ROOT / "deploy" / "model")
    writer = StructuredWriter(tokenizer)
    planner = Planner(RepliesConfig(vocab_size=2**20, tokenizer=tokenizer, writer=writer), max_model_len=400)
    nothing: dict[str, int] = {}
    monkeypatch.setattr(writer, "write", lambda *_: nothing["absent"])
    with pytest.raises(ReplyError, match="structured_outputs cannot be read: KeyError"):
        _plan(planner, structured_outputs={"choice": ["yes"]})


def test_a_constraint_begins_after_the_reasoning_and_ends_with_eos() -> None:
    tokenizer = Tokenizer.load(ROOT / "deploy" / "model")
    eos = tokenizer.eos_ids[0]
    config = RepliesConfig(vocab_size=2**20, tokenizer=tokenizer, writer=StructuredWriter(tokenizer))
    planner = Planner(config, max_model_len=400)

    def said(*, reasoning_ended: bool | None, eos_token_id: int | None) -> list[int]:
        params = SamplingParams(max_tokens=40, structured_outputs={"regex": "[ab]{3}"}, eos_token_id=eos_token_id)
        asked = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=array("I", [5]),
            sampling_params=params,
            reasoning_ended=reasoning_ended,
        )
        return _said(planner.plan(asked))

    *tokens, last = said(reasoning_ended=None, eos_token_id=eos)
    assert re.fullmatch("[ab]{3}", tokenizer.decode(tokens))
    assert last == eos
    *tokens, last = said(reasoning_ended=False, eos_token_id=eos)
    assert re.fullmatch("<think>\n\n</think>\n\n[ab]{3}", tokenizer.decode(tokens))
    assert last == eos
    ignoring = said(reasoning_ended=True, eos_token_id=None)
    assert len(ignoring) == 40
    assert set(ignoring[10:]) == {eos}


def test_a_length_that_is_wished_bounds_what_is_under_a_constraint_or_a_trace() -> None:
    tokenizer = Tokenizer.load(ROOT / "deploy" / "model")
    eos = tokenizer.eos_ids[0]
    writer = StructuredWriter(tokenizer)
    config = RepliesConfig(vocab_size=2**20, tokenizer=tokenizer, writer=writer, wishes=[Steering(VOCAB_SIZE)])

    def reply(length: int, **params: Any) -> Plan:
        return _plan(Planner(config, 400), extra_args={"mock_output_tokens": length}, eos_token_id=eos, **params)

    for length in (2, 6, 30):
        plan = reply(length, max_tokens=100, structured_outputs={"regex": "[ab]{1,40}"})
        assert (plan.ending.finish_reason, _said(plan)[-1]) == (FinishReason.STOP, eos)
        assert plan.ending.output_tokens <= length
    cut = reply(3, max_tokens=100, structured_outputs={"regex": "(ab ){20}"})
    assert cut.ending == Ending(3)
    traced = reply(3, max_tokens=100, trace_decode_token_ids=(5, 6, 7, 8))
    assert (_said(traced), traced.ending) == ([5, 6, 7], Ending(3))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), "NaN"])
def test_numbers_that_json_has_not_are_refused(number: object) -> None:
    tokenizer = Tokenizer.load(ROOT / "deploy" / "model")
    config = RepliesConfig(vocab_size=2**20, tokenizer=tokenizer, writer=StructuredWriter(tokenizer))
    schema = '{"maxLength": NaN}' if number == "NaN" else {"maxLength": number}
    with pytest.raises(ReplyError, match="which JSON has not"):
        _plan(Planner(config, max_model_len=400), structured_outputs={"json": schema})


def test_special_tokens_are_said_only_if_a_client_names_them() -> None:
    tokenizer = Tokenizer.load(ROOT / "deploy" / "model")
    eos, special = tokenizer.eos_ids[0], max(tokenizer.special_ids)
    config = RepliesConfig(vocab_size=2**20, tokenizer=tokenizer)
    planner = Planner(config, max_model_len=20_000)
    assert not set(_said(_plan(planner, max_tokens=19_000))) & tokenizer.special_ids
    assert set(_said(_plan(planner, allowed_token_ids=(special, 300)))) == {special, 300}
    assert _said(_plan(planner, allowed_token_ids=(eos,), eos_token_id=eos)) == [eos]
    assert set(_said(_plan(planner, logit_bias={special: 100.0}))) == {special}
    words = Planner(replace(config, kind=ReplyKind.WORDS), max_model_len=20_000)
    assert set(_said(_plan(words))) <= set(tokenizer.word_ids)
    assert set(_said(_plan(words, allowed_token_ids=(300,)))) == {300}


SEVENS = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 9}


@pytest.mark.parametrize(
    "asked",
    [
        {"trace_decode_token_ids": (5,)},
        {"allowed_token_ids": (EOS,), "eos_token_id": EOS, "min_tokens": 2**30},
        {
            "allowed_token_ids": (7,),
            "repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 9},
        },
    ],
)
def test_no_reply_of_a_huge_context_is_held_in_memory(asked: dict[str, Any]) -> None:
    planner = Planner(RepliesConfig(vocab_size=VOCAB_SIZE), max_model_len=2**31 - 1)
    plan = _plan(planner, max_tokens=2**31 - 10, **asked)
    assert plan.ending.output_tokens <= 2**20


def test_it_stops_not_before_min_tokens() -> None:
    plan = _plan(_planner(), allowed_token_ids=(EOS,), eos_token_id=EOS, all_stop_token_ids=(EOS,), min_tokens=5)
    assert plan.ending == Ending(6, STOP)
    assert _said(plan).index(EOS) == 5


def test_ruling_everything_out_is_no_end_of_the_engine() -> None:
    plan = _plan(_planner(), allowed_token_ids=(4,), bad_words_token_ids=((4,),))
    assert len(_said(plan)) == 200


@pytest.mark.parametrize("kind", ReplyKind)
def test_output_length_ends_a_reply_by_itself(kind: ReplyKind) -> None:
    plan = _plan(_planner(kind, "17"), eos_token_id=EOS, all_stop_token_ids=(EOS,))
    said = _said(plan)
    assert (len(said), said.index(EOS)) == (17, 16)
    assert (plan.ending.finish_reason, plan.ending.stop_reason) == (STOP, None)


@pytest.mark.parametrize("kind", ReplyKind)
def test_clients_allow_less_or_ignore_the_end(kind: ReplyKind) -> None:
    planner = _planner(kind, "17")
    assert _plan(planner, max_tokens=9, eos_token_id=EOS).ending.output_tokens == 9
    assert _plan(planner, max_tokens=9, eos_token_id=EOS).ending.finish_reason is LENGTH
    ignoring = _plan(planner, max_tokens=30, all_stop_token_ids=(EOS,))
    assert (ignoring.ending.output_tokens, ignoring.ending.finish_reason) == (30, LENGTH)
    assert EOS not in _said(ignoring)


def test_a_client_that_set_no_length_gets_the_default_one() -> None:
    planner = _planner(default=40)
    assert _plan(planner, max_tokens=397, eos_token_id=EOS).ending == Ending(40, STOP, None, EOS)
    assert _plan(planner, max_tokens=None, eos_token_id=EOS).ending == Ending(40, STOP, None, EOS)
    assert _plan(planner, max_tokens=None).ending == Ending(40)
    assert _plan(planner, max_tokens=396, eos_token_id=EOS).ending == Ending(396)
    assert _plan(planner, prompt=range(390), max_tokens=None, eos_token_id=EOS).ending == Ending(10)


def test_an_echo_is_the_prompt_and_an_end() -> None:
    plan = _plan(_planner(ReplyKind.ECHO), prompt=(5, 6, EOS, 7), eos_token_id=EOS)
    assert _said(plan) == [5, 6, 7, EOS]
    assert plan.ending == Ending(4, STOP)


def test_an_echo_goes_on_where_it_has_to_be_longer() -> None:
    planner = _planner(ReplyKind.ECHO)
    assert _said(_plan(planner, max_tokens=8)) == [5, 6, 7, 5, 6, 7, 5, 6]
    assert _said(_plan(planner, eos_token_id=EOS, min_tokens=4)) == [5, 6, 7, 5, EOS]
    assert len(_said(_plan(planner, prompt=(EOS,), eos_token_id=EOS))) == 2


def test_a_trace_is_said_as_it_is() -> None:
    trace = (40, 41, EOS, 42)
    planner = _planner()
    assert _said(_plan(planner, trace_decode_token_ids=trace, max_tokens=4)) == list(trace)
    assert _plan(planner, trace_decode_token_ids=trace, max_tokens=2).ending == Ending(2)
    assert _plan(planner, trace_decode_token_ids=trace, eos_token_id=EOS).ending == Ending(3, STOP)
    longer = _said(_plan(planner, trace_decode_token_ids=trace, max_tokens=9))
    assert (longer[:4], len(longer)) == (list(trace), 9)


def test_a_reply_that_repeats_itself_ends() -> None:
    asked = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 4}
    plan = _plan(_planner(), allowed_token_ids=(7,), repetition_detection=asked)
    assert plan.ending == Ending(4, FinishReason.REPETITION, "repetition_detected")
    assert _said(plan) == [7] * 4
    assert _plan(_planner(), repetition_detection=asked).ending == Ending(200)


@given(
    params=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.none() | st.integers(1, 500),
            "min_tokens": st.integers(0, 500),
            "eos_token_id": st.integers(0, 60),
            "stop_token_ids": st.lists(st.integers(0, 60), max_size=3).map(tuple),
            "all_stop_token_ids": st.lists(st.integers(0, 60), max_size=3).map(tuple),
            "bad_words_token_ids": st.lists(st.lists(st.integers(0, 60), max_size=3).map(tuple), max_size=3).map(tuple),
            "allowed_token_ids": st.lists(st.integers(0, 60), max_size=3).map(tuple),
            "logit_bias": st.dictionaries(st.integers(0, 60), st.floats(-200, 200), max_size=4),
            "repetition_detection": st.fixed_dictionaries(
                {name: st.integers(-2, 9) for name in ("min_pattern_size", "max_pattern_size", "min_count")}
            ),
            "trace_decode_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
        },
    ),
    kind=st.sampled_from(ReplyKind),
    output_length=st.sampled_from(list(LENGTHS)),
    prompt=st.lists(st.integers(0, 60), min_size=1, max_size=399),
)
def test_whatever_is_asked_the_reply_is_one_that_ends_as_it_says(
    params: dict[str, object], kind: ReplyKind, output_length: str, prompt: list[int]
) -> None:
    plan = _plan(_planner(kind, output_length, default=20), prompt, **params)
    said, ending = _said(plan), plan.ending
    asked = SamplingParams(**{"max_tokens": 200, **params})  # type: ignore[arg-type]  # the names are those of the class
    room = 400 - len(prompt)
    stops = {*asked.stop_token_ids, asked.eos_token_id}
    assert len(said) == ending.output_tokens <= min(room, room if asked.max_tokens is None else asked.max_tokens)
    assert not stops & set(said[:-1])
    assert (said[-1] in stops) == (ending.finish_reason is STOP)
    if ending.finish_reason is STOP:
        assert ending.stop_reason == (None if said[-1] == asked.eos_token_id else said[-1])
