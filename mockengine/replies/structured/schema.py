# SPDX-License-Identifier: Apache-2.0
"""JSON schemas made narrower, so that a document that follows one is small and can be read.

Every document of a narrowed schema is one of the schema itself; some are left out: long strings and lists, large
numbers, properties that nobody named. Only schemas that stand alone are narrowed. Where several apply to one value
(`allOf`, or keywords beside `$ref`, `anyOf`, `oneOf`) what is added here could contradict what the others say.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from mockengine.replies.structured.constraint import ConstraintError
from mockengine.replies.structured.exclusive import excludes_itself

Schema: TypeAlias = Mapping[str, Any] | bool

_STRING_CHARACTERS: Final = 24
_ITEMS: Final = 3
_RANGE: Final = 1000
_MULTIPLES: Final = 32
_EXACT_INTEGERS: Final = 2.0**53
_MOST_NAMED: Final = 1000
# An anchor that is neither escaped nor what negates a class.
_ANCHOR: Final = re.compile(r"(?<![\[\\])\^|(?<!\\)\$")
_MORE_TEXT: Final = "[a-z]{0,8}"
_PROPERTY_NAME: Final = "^[a-z]{2,12}$"

_OF_TYPE: Final = {
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    ),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("minContains", "maxContains", "unevaluatedItems"),
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_APPLY_OTHERS: Final = frozenset(("$ref", "$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "allOf"))
_OTHERS: Final = frozenset(("type", "enum", "const", "not", "if", "then", "else", "dependencies"))
_CONSTRAINING: Final = _APPLY_OTHERS | _OTHERS | {keyword for keywords in _OF_TYPE.values() for keyword in keywords}
# Keywords of values, which are no schemas.
_VALUES: Final = frozenset(("enum", "const", "default", "examples", "example"))
_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)


def _any_of(*schemas: Schema) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def _scalar() -> dict[str, Any]:
    return _any_of(
        {"type": "string", "minLength": 1, "maxLength": _STRING_CHARACTERS},
        {"type": "integer", "minimum": 0, "maximum": _RANGE},
        {"type": "boolean"},
        {"type": "null"},
    )


def any_object() -> dict[str, Any]:
    """Return a schema of small objects with some properties of any kind."""
    value = _any_of(*_scalar()["anyOf"], {"type": "array", "items": _scalar(), "minItems": 1, "maxItems": _ITEMS})
    return _map_of(value, least=1)


def _map_of(value: Schema, least: int) -> dict[str, Any]:
    return {
        "type": "object",
        "patternProperties": {_PROPERTY_NAME: value},
        "additionalProperties": False,
        "minProperties": least,
        "maxProperties": max(least, _ITEMS),
    }


def narrow(schema: Schema) -> Schema:
    """Return a schema of some of the documents that `schema` allows; one that says nothing becomes that of an object.

    `$defs` stay where they are, so references into the schema keep their meaning.
    """
    if _says_nothing(schema):
        return any_object()
    if not excludes_itself(schema):
        # Which branch holds is for the compiler to judge, who has to see them as they are.
        return schema
    narrowed: Schema = _narrowed(schema)
    return narrowed


def without_unknown_formats(schema: Any) -> Any:
    """Take away formats that have no regex here: JSON schema lets any text pass there, and so do vLLM's backends."""
    if isinstance(schema, list):
        return [without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: item if keyword in _VALUES else without_unknown_formats(item)
        for keyword, item in schema.items()
        if keyword != "format" or not isinstance(item, str) or item in _FORMATS
    }


def without_additional_properties(schema: Any) -> Any:
    """Close objects that name their properties and do not say whether there may be more, as vLLM does on request."""
    if isinstance(schema, list):
        return [without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: without_additional_properties(item) for key, item in schema.items()}
    if "additionalProperties" not in schema and ("properties" in schema or "patternProperties" in schema):
        closed["additionalProperties"] = False
    return closed


def _says_nothing(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not _CONSTRAINING & schema.keys())


def _narrowed(schema: Any) -> Any:
    if _says_nothing(schema):
        # References into `$defs` and the like must still find them.
        return {**schema, **_scalar()} if isinstance(schema, dict) else _scalar()
    if not isinstance(schema, dict):
        return schema
    narrowed = dict(schema)
    for place in ("$defs", "definitions"):
        if isinstance(schema.get(place), dict):
            narrowed[place] = {name: _narrowed(item) for name, item in schema[place].items()}
    applied = _APPLY_OTHERS & schema.keys()
    beside = _CONSTRAINING & schema.keys() - applied
    if applied:
        return narrowed if beside or len(applied) > 1 else _narrowed_branches(narrowed, next(iter(applied)))
    if not {"enum", "const"} & schema.keys():
        _narrow_by_type(narrowed)
    return narrowed


def _narrowed_branches(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    branches = schema[keyword]
    if isinstance(branches, list) and (keyword != "allOf" or len(branches) == 1):
        schema[keyword] = [_narrowed(branch) for branch in branches]
    return schema


def _narrow_by_type(schema: dict[str, Any]) -> None:
    types = schema.get("type")
    if types is None:
        hinted = [name for name, keywords in _OF_TYPE.items() if schema.keys() & set(keywords)]
        if len(hinted) != 1:
            return
        types = schema["type"] = hinted[0]
    named = types if isinstance(types, list) else [types]
    if "string" in named:
        _narrow_string(schema)
    if "integer" in named or "number" in named:
        _narrow_number(schema)
    if "array" in named:
        _narrow_array(schema)
    if "object" in named:
        _narrow_object(schema)


def _narrow_string(schema: dict[str, Any]) -> None:
    if "pattern" in schema and not {"minLength", "maxLength", "format"} & schema.keys():
        schema["pattern"] = _whole_pattern(schema["pattern"])
    if "pattern" in schema or "format" in schema:
        return
    _narrow_count(schema, "minLength", "maxLength", _STRING_CHARACTERS)


def _whole_pattern(pattern: Any) -> Any:
    """Return a pattern of some of the texts in which `pattern` is found, so that nothing has to be strayed into."""
    if not isinstance(pattern, str) or "|" in pattern:
        return pattern
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    return pattern if _ANCHOR.search(inner) else f"^{inner}{'' if ends else _MORE_TEXT}$"


def _narrow_count(schema: dict[str, Any], lower: str, upper: str, usual: int) -> None:
    """Let the count be at most `usual`, or as many as there must be."""
    least, most = _count(schema.get(lower, 0)), _count(schema.get(upper, math.inf))
    if least is None or most is None or least > most:
        return
    # A count may be written 2.0, which the compiler does not take.
    schema[lower], schema[upper] = int(least), int(max(least, min(most, usual)))


def _count(value: Any) -> float | None:
    """Return a keyword's count, or None for what the compiler shall complain about."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        return None
    return value if value == math.inf or value == int(value) else None


def _narrow_number(schema: dict[str, Any]) -> None:
    low, high = _bound(schema, "minimum", "exclusiveMinimum"), _bound(schema, "maximum", "exclusiveMaximum")
    step = schema.get("multipleOf", 1)
    if isinstance(step, bool) or not isinstance(step, (int, float)) or _is_nan(low) or _is_nan(high):
        return
    # Wide enough for some multiples.
    if schema["type"] in ("integer", "number") and type(step) is int and step > 1:
        _narrow_multiples(schema, step)
        return
    span = max(_RANGE, _ITEMS * math.ceil(abs(step)))
    if low is None and high is None:
        schema["minimum"], schema["maximum"] = 0, span
    elif high is None and low is not None and abs(low) < _EXACT_INTEGERS:
        schema["maximum"] = low + span
    elif low is None and high is not None and abs(high) < _EXACT_INTEGERS:
        schema["minimum"] = high - span


def _bound(schema: Mapping[str, Any], *keywords: str) -> float | None:
    """Return one of the bounds given by `keywords`, None if there is none, NaN if it is no number."""
    given = [schema[keyword] for keyword in keywords if keyword in schema]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in given):
        return math.nan
    return given[0] if given else None


def _narrow_multiples(schema: dict[str, Any], step: int) -> None:
    """Name some multiples within the bounds; to count in steps takes as many states as a step is wide."""
    bounds = [schema[keyword] for keyword in _OF_TYPE["number"] if keyword in schema]
    if any(abs(bound) >= _EXACT_INTEGERS for bound in bounds):
        return
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    if low == -math.inf:
        low = 0 if high > 0 else high - _MULTIPLES * step
    first = math.ceil(low / step)
    multiples = [(first + index) * step for index in range(_MULTIPLES)]
    excluded = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    if within := [multiple for multiple in multiples if low <= multiple <= high and multiple not in excluded]:
        for keyword in _OF_TYPE["number"]:
            schema.pop(keyword, None)
        schema["enum"] = within


def _is_nan(bound: float | None) -> bool:
    return bound is not None and math.isnan(bound)


def _narrow_array(schema: dict[str, Any]) -> None:
    prefix = schema.get("prefixItems")
    if isinstance(prefix, list):
        schema["prefixItems"] = [_narrowed(item) for item in prefix]
    # Nothing else is applied to the list, so the others are those that `items` does not speak of.
    others = schema.pop("unevaluatedItems", True)
    if isinstance(schema.get("items", others), (dict, bool)):
        schema["items"] = _narrowed(schema.get("items", others))
    _narrow_count(schema, "minItems", "maxItems", max(_ITEMS, len(prefix) if isinstance(prefix, list) else 0))
    unique, fewest = schema.get("uniqueItems"), _count(schema.get("minItems", 0))
    if unique is False:
        del schema["uniqueItems"]
    elif unique is True and fewest is not None and fewest <= 1:
        # One item is like no other.
        del schema["uniqueItems"]
        schema["maxItems"] = min(schema.get("maxItems", 1), 1)


def _narrow_object(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    patterns, least = schema.get("patternProperties", {}), _count(schema.get("minProperties", 0))
    if not (isinstance(properties, dict) and isinstance(required, list) and isinstance(patterns, dict)):
        return
    if least is None or not all(isinstance(name, str) for name in required):
        return
    named = {name: _narrowed(item) for name, item in properties.items()}
    if patterns:
        schema["patternProperties"] = {name: _narrowed(item) for name, item in patterns.items()}
        schema["properties"] = named
        return
    # Nothing else is applied to the object, so the others are those that `properties` does not name.
    others = schema.get("additionalProperties", schema.pop("unevaluatedProperties", True))
    may_be_map = (
        not named and not required and not schema.get("dependentRequired") and least <= 1 and others is not False
    )
    name_pattern = _PROPERTY_NAME
    if "propertyNames" in schema:
        said = _said_of_names(schema["propertyNames"])
        if said is None or (said and not may_be_map):
            return
        del schema["propertyNames"]
        named |= {name: _narrowed(others) for name in said.get("enum", ())}
        name_pattern = said.get("pattern", _PROPERTY_NAME)
    if may_be_map and not named:
        _narrow_map(schema, name_pattern, others)
    else:
        _name_properties(schema, named, others, int(least))


def _said_of_names(names: Any) -> dict[str, Any] | None:
    """Return what `propertyNames` says of names, None if that is more than names can be given."""
    if not isinstance(names, dict):
        return {} if names is True else None
    said = {keyword: names[keyword] for keyword in _CONSTRAINING & names.keys()}
    if said.pop("type", "string") != "string" or len(said) > 1:
        return None
    listed = said.get("enum")
    is_list = isinstance(listed, list) and all(isinstance(name, str) for name in listed)
    return said if not said or is_list or isinstance(said.get("pattern"), str) else None


def _narrow_map(schema: dict[str, Any], name_pattern: str, others: Schema) -> None:
    """Let an object that names no properties have a few, whose names can be read."""
    fewest, most = _count(schema.get("minProperties", 0)) or 0, _count(schema.get("maxProperties", _ITEMS))
    narrowed = _map_of(_narrowed(others), int(fewest))
    narrowed["patternProperties"] = {name_pattern: narrowed["patternProperties"][_PROPERTY_NAME]}
    if most is None or most < fewest:
        return
    schema |= {**narrowed, "type": schema["type"], "maxProperties": int(min(most, _ITEMS))}


def _name_properties(schema: dict[str, Any], named: dict[str, Any], others: Schema, least: int) -> None:
    """Close an object: it has the properties that are named or required, and as many as there must be."""
    required = list(dict.fromkeys([*schema.get("required", []), *_dependents(schema)]))
    named |= {name: _narrowed(others) for name in required if name not in named}
    if others is not False:
        # Names that the grammar makes up may be alike, so what there must be gets names here.
        spare = (f"property_{number}" for number in range(1, min(least, _MOST_NAMED) + 1))
        named |= {name: _narrowed(others) for name in spare if name not in named and len(named) < least}
    required += [name for name in named if name not in required][: max(0, least - len(required))]
    schema |= {"properties": named, "required": required, "additionalProperties": False}
    if len(required) >= least:
        schema.pop("minProperties", None)
    most = _count(schema.get("maxProperties", math.inf))
    if most is not None and len(named) <= most:
        schema.pop("maxProperties", None)


def _dependents(schema: dict[str, Any]) -> list[str]:
    """Take `dependentRequired` away and return the properties that satisfy it whatever else there is."""
    dependents = schema.get("dependentRequired")
    if not isinstance(dependents, dict) or not all(isinstance(names, list) for names in dependents.values()):
        return []
    names = [name for names in dependents.values() for name in names]
    if not all(isinstance(name, str) for name in names):
        raise ConstraintError("dependentRequired has names that are no strings")
    del schema["dependentRequired"]
    return names
