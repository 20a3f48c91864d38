# SPDX-License-Identifier: Apache-2.0
"""Schemas that nobody thought of: whatever is written follows them, or they are refused."""

import json
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from mockengine.replies.structured.constraint import ConstraintError, read_constraint
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer

_Schemas = st.SearchStrategy[Any]
_NAMES = st.sampled_from(["a", "b", "cd"])
_SOME_NAMES = st.lists(_NAMES, unique=True, max_size=2)
_BOUNDS = st.integers(-50, 50) | st.sampled_from([0.5, -1.25, 1e3, 2.0])
_PATTERNS = ["^a", "b$", "[0-9]{3}", "^x|y$", "a.c", "^[^a]*$", r"\d\\", r"^\$", r"a\$", r"\^b", "[$^]", "^$", "(ab)+"]

_NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number", ["integer", "null"], ["number", "string"]])},
    optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _BOUNDS)
    | {"multipleOf": st.sampled_from([1, 2, 3, 7, 0.5, 0.25, 100, 1.5])},
)
_STRINGS = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", ["string", "null"]])},
    optional={
        "minLength": st.integers(0, 30),
        "maxLength": st.integers(0, 40),
        "pattern": st.sampled_from(_PATTERNS),
        "format": st.sampled_from(["date", "email", "uuid", "ipv6", "uri", "unknown"]),
    },
)
_OTHERS = st.sampled_from(
    [{"type": "boolean"}, {}, True, {"enum": [1, "a", None, [1]]}, {"const": 'x"y\\'}, {"$ref": "#/$defs/d"}]
)


def _objects(inner: _Schemas) -> _Schemas:
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(_NAMES, inner, max_size=3),
            "required": _SOME_NAMES,
            "additionalProperties": inner | st.booleans(),
            "minProperties": st.integers(0, 3),
            "maxProperties": st.integers(0, 4),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "x"]), inner, max_size=2),
            "propertyNames": st.sampled_from([{"type": "string"}, {"pattern": "^a"}, {"enum": ["a", "q"]}]),
            "dependentRequired": st.dictionaries(_NAMES, _SOME_NAMES, max_size=1),
            "unevaluatedProperties": st.booleans(),
        },
    )


def _arrays(inner: _Schemas) -> _Schemas:
    return st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner | st.booleans(),
            "prefixItems": st.lists(inner, min_size=1, max_size=3),
            "minItems": st.integers(0, 4),
            "maxItems": st.integers(0, 5),
            "uniqueItems": st.booleans(),
            "unevaluatedItems": st.booleans(),
        },
    )


def _beside(schemas: tuple[Any, Any]) -> Any:
    first, second = schemas
    return {**(first if isinstance(first, dict) else {}), "anyOf": [second]}


def _larger(inner: _Schemas) -> _Schemas:
    branches = st.lists(inner, min_size=1, max_size=2)
    joined = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), branches).map(lambda pair: {pair[0]: pair[1]})
    return joined | st.tuples(inner, inner).map(_beside) | _objects(inner) | _arrays(inner)


_SCHEMAS = st.recursive(_NUMBERS | _STRINGS | _OTHERS, _larger, max_leaves=6).filter(lambda schema: schema is not True)
_LEAVES = _NUMBERS | _STRINGS


@settings(max_examples=150, deadline=None)
@given(schema=_SCHEMAS, definition=_LEAVES, key=st.integers(0, 2**64 - 1), max_tokens=st.sampled_from([20, 400]))
def test_what_is_written_follows_the_schema(
    writer: StructuredWriter, tokenizer: Tokenizer, schema: Any, definition: Any, key: int, max_tokens: int
) -> None:
    schema = {**schema, "$defs": {"d": definition}}
    constraint = read_constraint({"json": schema})
    assert constraint is not None
    try:
        written = writer.write(constraint, key, max_tokens)
    except ConstraintError:
        return
    assert len(written.tokens) <= max_tokens
    if written.complete:
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(written.tokens)))
