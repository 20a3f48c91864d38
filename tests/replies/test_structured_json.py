# SPDX-License-Identifier: Apache-2.0
"""Replies that are JSON: they follow their schemas, fit, end, vary and reproduce."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mockengine.replies.structured.constraint import Constraint, ConstraintError, Kind, read_constraint
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["value", "children"],
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    "empty": {},
    "true": True,
    "string": STRING,
    "string of a length": {"type": "string", "minLength": 40, "maxLength": 60},
    "short string": {"type": "string", "maxLength": 2},
    "long string": {"type": "string", "maxLength": 1_000_000},
    "pattern": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
    "pattern without anchors": {"type": "string", "pattern": "b[0-9]"},
    "pattern of 40": {"type": "string", "pattern": "^[a-f0-9]{40}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "unknown format": {"type": "string", "format": "colour"},
    "integer": INTEGER,
    "negative integer": {"type": "integer", "maximum": -5},
    "large integer": {"type": "integer", "minimum": 10**12},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "number": {"type": "number"},
    "number in a range": {"type": "number", "minimum": 0.25, "maximum": 0.5},
    "number without type": {"minimum": 3},
    "multiple": {"type": "integer", "multipleOf": 7},
    "large multiple": {"type": "integer", "multipleOf": 2500, "minimum": 100_001},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "const": {"const": {"a": [1, None, "é"]}},
    "enum": {"enum": ["red", "green", 5, None, {"deep": [True]}]},
    "types": {"type": ["string", "integer", "null"]},
    "array": {"type": "array"},
    "array of strings": {"type": "array", "items": STRING},
    "array with bounds": {"type": "array", "items": INTEGER, "minItems": 5, "maxItems": 7},
    "unique array": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 3},
    "array of arrays": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}, "minItems": 1},
    "object": {"type": "object"},
    "person": {
        "type": "object",
        "properties": {"name": STRING, "age": INTEGER, "email": STRING, "tags": {"type": "array", "items": STRING}},
        "required": ["name", "age"],
    },
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "object", "required": ["c"]}}}},
        "required": ["a"],
    },
    "required but not described": {"type": "object", "required": ["x", "y"]},
    "closed": {"type": "object", "properties": {"a": STRING}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"a": STRING}, "additionalProperties": INTEGER, "required": ["b"]},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "map of many": {"type": "object", "additionalProperties": INTEGER, "minProperties": 5},
    "map of named": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
    "map of patterns": {"type": "object", "propertyNames": {"pattern": "^x_"}, "minProperties": 1},
    "typed names": {"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]+$": INTEGER, "^s_[a-z]+$": STRING},
        "additionalProperties": False,
    },
    "some of the properties": {"type": "object", "properties": {"a": STRING, "b": INTEGER}, "minProperties": 1},
    "dependent": {"type": "object", "properties": {"a": STRING}, "dependentRequired": {"a": ["b"]}},
    "any of": {"anyOf": [STRING, INTEGER, {"type": "array", "items": INTEGER}]},
    "optional field": {
        "type": "object",
        "properties": {"n": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}},
        "required": ["n"],
    },
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "x": INTEGER}, "required": ["kind", "x"]},
            {"type": "object", "properties": {"kind": {"const": "b"}, "y": STRING}, "required": ["kind", "y"]},
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
            {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]},
        ]
    },
    "all of a pattern": {"allOf": [STRING, {"pattern": "^[0-9]{30}$"}]},
    "reference beside keywords": {"$defs": {"s": STRING}, "$ref": "#/$defs/s", "minLength": 30},
    "tree": TREE,
    "recursion": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    "reference into properties": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": STRING}, "b": {"$ref": "#/properties/a/items"}},
        "required": ["a", "b"],
    },
    "closed by unevaluated": {"type": "object", "properties": {"a": STRING}, "unevaluatedProperties": False},
    "annotated": {"title": "T", "description": "d", "type": "string", "examples": [1], "deprecated": True, "x-y": 1},
}


def _json(schema: Any) -> Constraint:
    constraint = read_constraint({"json": schema})
    assert constraint is not None
    return constraint


@pytest.mark.parametrize("name", SCHEMAS)
def test_replies_follow_their_schema(writer: StructuredWriter, tokenizer: Tokenizer, name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for max_tokens in (150, 400, 2000):
        for key in range(6):
            written = writer.write(_json(SCHEMAS[name]), key, max_tokens)
            assert written.complete
            assert len(written.tokens) < max_tokens
            validator.validate(json.loads(tokenizer.decode(written.tokens)))


@pytest.mark.parametrize("name", ["person", "tree", "one of", "map", "array of strings", "number", "date-time"])
def test_what_is_said_to_be_complete_is_so_under_any_budget(
    writer: StructuredWriter, tokenizer: Tokenizer, name: str
) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for max_tokens in range(1, 61):
        written = writer.write(_json(SCHEMAS[name]), max_tokens, max_tokens)
        assert len(written.tokens) <= max_tokens
        if written.complete:
            validator.validate(json.loads(tokenizer.decode(written.tokens)))
        else:
            assert len(written.tokens) == max_tokens


@pytest.mark.parametrize(
    ("name", "shortest"),
    [
        ("person", '{"name": "", "age": 0}'),
        ("tree", '{"value": 0, "children": []}'),
        ("array of strings", "[]"),
        ("map", '{"aa": true}'),
        ("recursion", "{}"),
        ("boolean", "true"),
        ("optional field", '{"n": 0}'),
        ("nested", '{"a": {}}'),
    ],
)
def test_a_reply_that_can_fit_fits(writer: StructuredWriter, tokenizer: Tokenizer, name: str, shortest: str) -> None:
    room = len(tokenizer.encode(shortest)) + 4
    for key in range(20):
        assert writer.write(_json(SCHEMAS[name]), key, room).complete


def test_a_schema_that_nothing_finite_satisfies_is_refused(writer: StructuredWriter) -> None:
    endless = {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}
    with pytest.raises(ConstraintError, match="no reply can be written"):
        writer.write(_json(endless), 1, 500)


@pytest.mark.parametrize("name", ["string", "person", "object", "tree", "integer", "enum"])
def test_keys_vary_replies_and_reproduce_them(tokenizer: Tokenizer, writer: StructuredWriter, name: str) -> None:
    replies = [writer.write(_json(SCHEMAS[name]), key, 200) for key in range(30)]
    assert len({tuple(written.tokens) for written in replies}) >= 4
    other = StructuredWriter(tokenizer)
    backwards = [other.write(_json(SCHEMAS[name]), key, 200) for key in reversed(range(30))]
    assert backwards[::-1] == replies


def test_strings_are_made_of_words(writer: StructuredWriter, tokenizer: Tokenizer) -> None:
    texts = [json.loads(tokenizer.decode(writer.write(_json(STRING), key, 200).tokens)) for key in range(100)]
    readable = [text for text in texts if re.fullmatch(r"[A-Za-z]+( [A-Za-z]+)* ?", text)]
    assert len(readable) > 80


def test_special_tokens_never_come_by_chance(writer: StructuredWriter, tokenizer: Tokenizer) -> None:
    for key in range(100):
        written = writer.write(_json(SCHEMAS["person"]), key, 200)
        assert not tokenizer.special_ids & set(written.tokens)


def test_json_object_gives_an_object(writer: StructuredWriter, tokenizer: Tokenizer) -> None:
    constraint = read_constraint({"json_object": True})
    assert constraint == Constraint(Kind.JSON_OBJECT, value=True)
    objects = [json.loads(tokenizer.decode(writer.write(constraint, key, 300).tokens)) for key in range(40)]
    assert all(isinstance(value, dict) and value for value in objects)
    assert {type(item) for value in objects for item in value.values()} >= {str, int, bool, list}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, '{"a": 5, "b": [1, 2]}'),
        ({"disable_any_whitespace": True, "_backend": "xgrammar"}, '{"a": 5, "b": [1, 2]}'),
        ({"disable_any_whitespace": True, "_backend": "guidance"}, '{"a":5,"b":[1,2]}'),
        ({"whitespace_pattern": "\n", "_backend": "outlines"}, None),
    ],
)
def test_the_style_of_json(
    writer: StructuredWriter, tokenizer: Tokenizer, options: dict[str, Any], text: str | None
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 5}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    constraint = read_constraint({"json": schema, **options})
    assert constraint is not None
    reply = tokenizer.decode(writer.write(constraint, 1, 200).tokens)
    assert json.loads(reply) == {"a": 5, "b": [1, 2]}
    assert reply == text or (text is None and " " not in reply)


def test_additional_properties_can_be_forbidden(writer: StructuredWriter, tokenizer: Tokenizer) -> None:
    schema = {"allOf": [{"properties": {"a": INTEGER}, "type": "object"}]}
    constraint = read_constraint({"json": schema, "disable_additional_properties": True})
    assert constraint is not None
    assert all(
        set(json.loads(tokenizer.decode(writer.write(constraint, key, 200).tokens))) <= {"a"} for key in range(20)
    )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"not": STRING}, r'Unimplemented keys: \["not"\]'),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "#/$defs/x"}, "does not exist"),
        ({"$ref": "https://example.org/x"}, "not present"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "(a{1000}){1000}"}, "unfolds to 1000000 parts"),
        ({"type": "string", "minLength": "x"}, "minLength"),
        (False, "allows nothing"),
        ("{", "json is not valid JSON"),
        ("[1]", "not a JSON schema"),
        (5, "not a JSON schema"),
    ],
)
def test_a_wrong_schema_is_refused_with_the_reason(writer: StructuredWriter, schema: Any, said: str) -> None:
    for _ in range(2):
        with pytest.raises(ConstraintError, match=said):
            writer.write(_json(schema), 1, 100)


def test_public_suite_of_schemas(writer: StructuredWriter, tokenizer: Tokenizer) -> None:
    """Every schema gets conforming replies or a clean error, as many as the docs say."""
    suite = json.loads(gzip.decompress((ROOT / "tests" / "fixtures" / "json_schema_suite.json.gz").read_bytes()))
    counts = Counter(_outcome(writer, tokenizer, case["schema"]) for case in suite["schemas"])
    conforming, refused = counts["conforming"], counts["refused"]
    said = f"{conforming} of its {counts.total()} schemas get replies that conform, {refused} are refused"
    assert set(counts) == {"conforming", "refused"}
    assert said in " ".join((ROOT / "docs" / "replies.md").read_text().split())


def _outcome(writer: StructuredWriter, tokenizer: Tokenizer, schema: Any) -> str:
    validator = jsonschema.Draft202012Validator(schema)
    for key in range(5):
        try:
            written = writer.write(_json(schema), key, 300)
        except ConstraintError:
            return "refused"
        if not written.complete or not validator.is_valid(json.loads(tokenizer.decode(written.tokens))):
            return "wrong"
    return "conforming"


def test_a_branch_that_holds_whenever_another_does_is_not_made_to_exclude_it(writer: StructuredWriter) -> None:
    branches = [{"type": "object"}, {"type": "object", "required": ["a"]}]

    with pytest.raises(ConstraintError, match="oneOf"):
        writer.write(_json({"oneOf": branches}), 1, 100)
