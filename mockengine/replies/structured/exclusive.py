# SPDX-License-Identifier: Apache-2.0
"""Whether the branches of a `oneOf` exclude each other, whatever is narrowed in them.

A document of a branch that was made narrower may be one of another branch as it was, so that one alone has to hold. It
cannot where their types differ, where a property that both require has other values in each, or where one of them
requires a property that the other does not allow.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final

_KINDS: Final = frozenset(("null", "boolean", "number", "string", "array", "object"))
_VALUES: Final = ("const", "enum", "default", "examples")
# Every pair of them is looked at.
_MOST_BRANCHES: Final = 64
_LONGEST_WAY: Final = 8


def excludes_itself(schema: Any) -> bool:
    """Tell whether the branches of every `oneOf` in a schema exclude each other, as far as is seen."""
    return all(_are_exclusive(branches, schema) for branches in _one_ofs(schema))


def _one_ofs(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "oneOf" in node:
                yield node["oneOf"]
            waiting += [item for keyword, item in node.items() if keyword not in _VALUES]
        elif isinstance(node, list):
            waiting += node


def _are_exclusive(branches: Any, root: Any) -> bool:
    if not isinstance(branches, list) or len(branches) > _MOST_BRANCHES:
        return False
    resolved = [_resolved(branch, root) for branch in branches]
    return all(_are_disjoint(one, other) for one, other in combinations(resolved, 2))


def _resolved(branch: Any, root: Any) -> Any:
    """Follow a branch that is but a reference into the schema; one that leads nowhere is left as it is."""
    for _ in range(_LONGEST_WAY):
        reference = branch.get("$ref") if isinstance(branch, dict) and len(branch) == 1 else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found = root
        for name in reference[2:].split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            break
        branch = found
    return branch


def _are_disjoint(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    shared = _kinds(one) & _kinds(other)
    if not shared:
        return True
    if _differ(one, other):
        return True
    if shared != {"object"}:
        return False
    return _requires_forbidden(one, other) or _requires_forbidden(other, one) or _differ_in_property(one, other)


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types of its documents; an integer is a number."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    kinds = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return frozenset(kinds) & _KINDS if kinds else _KINDS


def _values(schema: Any) -> list[Any] | None:
    """Return the only values that a schema allows, or None if it does not list them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= _MOST_BRANCHES else None


def _differ(one: Any, other: Any) -> bool:
    values, others = _values(one), _values(other)
    return values is not None and others is not None and not any(value == each for value in values for each in others)


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _requires_forbidden(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether `one` requires what `other` does not allow."""
    is_closed = other.get("additionalProperties") is False and "patternProperties" not in other
    return is_closed and bool(_required(one) - _properties(other).keys())


def _differ_in_property(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = _required(one) & _required(other)
    return any(_differ(_properties(one).get(name), _properties(other).get(name)) for name in names)
