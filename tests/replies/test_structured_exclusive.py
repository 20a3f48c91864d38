# SPDX-License-Identifier: Apache-2.0
"""Branches of `oneOf`: those that exclude each other are told from those of which a document may hold two."""

from typing import Any

import pytest

from mockengine.replies.structured.exclusive import excludes_itself

OBJECT = {"type": "object"}


def _kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
NEEDS_B = {"type": "object", "required": ["b"]}
NAMED = {"$defs": {"cat": _kind("cat"), "dog": _kind("dog")}}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"type": ["string", "null"]}, OBJECT]},
        {"oneOf": [_kind("cat"), _kind("dog")]},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], **NAMED},
        {"oneOf": [CLOSED, NEEDS_B]},
        {"oneOf": [NEEDS_B, CLOSED]},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
        {"oneOf": [OBJECT, False]},
        {"oneOf": [OBJECT]},
        {"enum": [{"oneOf": [OBJECT, OBJECT]}]},
        OBJECT,
    ],
)
def test_branches_exclude_each_other(schema: Any) -> None:
    assert excludes_itself(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [OBJECT, OBJECT]},
        {"oneOf": [OBJECT, {"type": "object", "dependentRequired": {"a": ["a"]}}]},
        {"properties": {"x": {"oneOf": [OBJECT, OBJECT]}}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [_kind("cat"), _kind("cat")]},
        {"oneOf": [{"properties": {"kind": {"const": "cat"}}}, {"properties": {"kind": {"const": "dog"}}}]},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}], **NAMED},
        {"oneOf": [{"$ref": "#/$defs/none"}, {"$ref": "#/$defs/dog"}], **NAMED},
        {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"oneOf": [{**CLOSED, "patternProperties": {"b": {}}}, NEEDS_B]},
        {"oneOf": [{"type": "string", "minLength": 3}, {"type": "string"}]},
        {"oneOf": [True, OBJECT]},
        {"oneOf": 5},
        {"oneOf": [{"const": number} for number in range(65)]},
    ],
)
def test_they_may_not(schema: Any) -> None:
    assert not excludes_itself(schema)
