# SPDX-License-Identifier: Apache-2.0
"""Constraints that nobody means well with: at most one kind of error, no crash, no hang."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.replies.structured.constraint import ConstraintError, read_constraint
from mockengine.replies.structured.schema import _CONSTRAINING
from mockengine.replies.structured.writer import StructuredWriter

# 1.5 s on one core, where a copy of the grammar's state for every character that may end it took 13 s.
LONG_DOCUMENT_CPU_S = 5.0

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*sorted(_CONSTRAINING), "$defs", "$id", "x-guidance"]), inner, max_size=4)
    ),
    max_leaves=12,
)
_TYPES = st.sampled_from(["string", "integer", "number", "array", "object", "null", "boolean"])
_KEYWORDS = st.sampled_from(sorted(_CONSTRAINING - {"$dynamicRef", "$recursiveRef", "not", "if", "then", "else"}))
_SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": _TYPES}) | st.just({"$ref": "#"}) | st.booleans(),
    lambda inner: st.dictionaries(
        _KEYWORDS,
        inner
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=3)
        | st.integers(-2, 5)
        | st.lists(st.sampled_from("abc"), max_size=3)
        | st.text("ab^$.*|()[]", max_size=6)
        | _TYPES,
        max_size=4,
    ),
    max_leaves=10,
)
_PIECES = ["start:", "root ::=", "%json", "%regex", "{2,3}", *'ab01(){}[]|*+?^$.,:"/\\-=~&%#<>@ \n_']
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=40).map("".join)


def _survives(writer: StructuredWriter, asked: dict[str, Any], max_tokens: int = 40) -> None:
    try:
        constraint = read_constraint(asked)
        written = None if constraint is None else writer.write(constraint, 1, max_tokens)
    except ConstraintError:
        return
    assert written is None or len(written.tokens) <= max_tokens


@settings(max_examples=75, deadline=None)
@given(key=st.sampled_from(["json", "choice", "structural_tag", "json_object", "regex", "grammar"]), value=_VALUES)
def test_any_value(writer: StructuredWriter, key: str, value: Any) -> None:
    _survives(writer, {key: value})


@settings(max_examples=100, deadline=None)
@given(schema=_SCHEMAS)
def test_schemas_of_any_keywords(writer: StructuredWriter, schema: Any) -> None:
    _survives(writer, {"json": schema})


@settings(max_examples=100, deadline=None)
@given(text=_TEXTS, key=st.sampled_from(["regex", "grammar"]))
def test_any_regex_and_grammar(writer: StructuredWriter, key: str, text: str) -> None:
    _survives(writer, {key: text})
    _survives(writer, {key: f"start: {text}"})
    _survives(writer, {key: f"root ::= {text}"})


@settings(max_examples=100, deadline=None)
@given(form=st.dictionaries(st.sampled_from(["type", "elements", "content", "tags", "begin", "end"]), _VALUES))
def test_any_format_of_a_structural_tag(writer: StructuredWriter, form: dict[str, Any]) -> None:
    for kind in ("or", "sequence", "tag", "star", "triggered_tags", "tags_with_separator", "repeat", "dispatch"):
        _survives(writer, {"structural_tag": {"format": {**form, "type": kind}}})


def _nested(depth: int, keyword: str) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {keyword: [schema, schema] if depth < 15 else [schema]} if keyword == "allOf" else {keyword: schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep schema": {"json": _nested(5_000, "items")},
    "schema at the limit": {"json": _nested(60, "items")},
    "wide allOf": {"json": _nested(12, "allOf")},
    "large enum": {"json": {"enum": list(range(9_000))}},
    "huge enum": {"json": {"enum": list(range(1_000_000))}},
    "chain of references": {
        "json": {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2_000)}, "$ref": "#/$defs/d0"}
    },
    "doubling references": {
        "json": {
            "$defs": {
                f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(25)
            }
            | {"d25": {"type": "string"}},
            "$ref": "#/$defs/d0",
        }
    },
    "long string": {"json": {"type": "string", "minLength": 100_000}},
    "long list": {"json": {"type": "array", "minItems": 100_000}},
    "many properties": {"json": {"type": "object", "minProperties": 10**9}},
    "large number": {"json": {"type": "number", "minimum": 1e308}},
    "large multiple": {"json": {"type": "integer", "multipleOf": 10**15}},
    "small multiple": {"json": {"type": "number", "multipleOf": 1e-9}},
    "long constant": {"json": {"const": "a" * 90_000}},
    "nested repetition": {"regex": "((a{70}){70}){70}"},
    "repetition at the limit": {"regex": "(a{70}){70}"},
    "nested stars": {"regex": "((((a*)*)*)*)*b"},
    "alternatives of anything": {"regex": "(.*a.*b.*c.*){30}"},
    "deep regex": {"regex": "(" * 20_000 + ")" * 20_000},
    "deep grammar": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "deep GBNF": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "chain of rules": {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(400)) + '\na400: "x"'},
    "doubling terminals": {
        "grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'
    },
    "rule of itself": {"grammar": "start: start"},
    "complement": {"grammar": 'start: A\nA: /(?s:.*)/ & ~/(?s:.*)a.{200}b(?s:.*)/ "c"'},
    "many choices": {"choice": [f"choice {number}" for number in range(5_000)]},
    "names that are none": {"json": {"properties": {5: {"type": "string"}}}},
    "values that are none": {"json": {"const": b"bytes"}},
    "deep tag": {"structural_tag": {"format": _nested(5_000, "content")}},
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints(writer: StructuredWriter, name: str) -> None:
    _survives(writer, HOSTILE[name], max_tokens=200)


def test_a_long_document_is_closed_soon(writer: StructuredWriter) -> None:
    """The time for a token must not grow with the document; it did, to several milliseconds."""
    names = [f"p{number}" for number in range(300)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    constraint = read_constraint({"json": schema})
    assert constraint is not None
    began = time.process_time()
    assert len(writer.write(constraint, 5, 4_096).tokens) == 4_096
    assert time.process_time() - began < LONG_DOCUMENT_CPU_S
