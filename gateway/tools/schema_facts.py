"""What a part of a JSON schema shows of its values without a search: their types, and listed values. Pure.

Clients write schemas: each part is read once, however many references lead to it, and comparisons are limited.
"""

import json
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from wire.json_schema import Schema

T = TypeVar("T")

_NOTHING: Schema = {}
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_IMPLIED_BY = {  # keywords from which the grammar compiler infers a type if none is named
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
_MAX_HOPS = 4  # from reference to reference
_MAX_BRANCHES = 20  # that are compared with each other
_MAX_OWN_HASH = sys.hash_info.modulus  # whole numbers below it are their own hash
_MAX_COMPARISONS = 50_000  # of values or properties, in all of a schema; takes some 20 ms


class SchemaFacts:
    """Of the schema `root` and the parts within it. `root` must not change meanwhile."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = _MAX_COMPARISONS
        # By what was found and the id of a part: all parts live as long as the root does.
        self._found: dict[tuple[Callable[[Schema], Any], int], Any] = {}

    def followed(self, part: object) -> Schema:
        """The schema at the end of the references; an empty one if there is none."""
        schema = part if isinstance(part, Mapping) else _NOTHING
        for _ in range(_MAX_HOPS):
            if not isinstance(schema.get("$ref"), str):
                break
            schema = self._once(self._target, schema)
        return schema

    def types(self, part: object) -> frozenset[str]:
        """Types that a match may have; all of them if the part does not show it."""
        return self._once(_types_of, self.followed(part))

    def are_apart(self, parts: Sequence[object]) -> bool:
        """Whether no value can match two of them: they differ in type, in listed values, or in a required property.

        Also False if there is too much to compare.
        """
        schemas = [self.followed(part) for part in parts]
        return len(parts) <= _MAX_BRANCHES and all(self._differ(*pair) for pair in combinations(schemas, 2))

    def _differ(self, one: Schema, other: Schema) -> bool:
        types = widened(self.types(one)), widened(self.types(other))
        if types[0].isdisjoint(types[1]) or self._differ_in_values(one, other):
            return True
        mine, others = self._once(_required_of, one), self._once(_required_of, other)
        self._num_left -= 1 + min(len(mine), len(others))
        return types[0] == types[1] == {"object"} and any(
            self._differ_in_values(one["properties"][name], other["properties"][name])
            for name in mine & others
            if self._num_left > 0
        )

    def _differ_in_values(self, one: object, other: object) -> bool:
        values, others = (self._once(_values_of, self.followed(part)) for part in (one, other))
        if values is None or others is None:
            return False
        self._num_left -= 1 + min(len(values), len(others))
        return self._num_left > 0 and values.isdisjoint(others)

    def _once(self, find: Callable[[Schema], T], schema: Schema) -> T:
        """What `find` finds of the schema, which it reads only once."""
        key = find, id(schema)
        if key not in self._found:
            self._found[key] = find(schema)
        found: T = self._found[key]
        return found

    def _target(self, schema: Schema) -> Schema:
        found: object = self._root
        for name in schema["$ref"].split("/")[1:]:
            found = mapping(found).get(name)
        return mapping(found)


def _values_named(schema: Schema) -> list[Any] | None:
    """Values that the schema itself lists."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _values_of(schema: Schema) -> frozenset[Hashable] | None:
    """Keys of the values that the schema lists, if it does."""
    values = _values_named(schema)
    return None if values is None else frozenset(map(_value_key, values))


def _required_of(schema: Schema) -> frozenset[str]:
    """Of its properties."""
    return frozenset(names(schema.get("required"))) & mapping(schema.get("properties")).keys()


def _types_of(schema: Schema) -> frozenset[str]:
    if (values := _values_named(schema)) is not None:
        return frozenset(map(_type_of, values))
    return (named_types(schema["type"]) if "type" in schema else implied_types(schema)) or frozenset(_TYPES)


def implied_types(schema: Schema) -> frozenset[str]:
    """The type that the grammar compiler infers where none is named."""
    implied = (name for name, keys in _IMPLIED_BY.items() if any(key in schema for key in keys))
    return frozenset({name} if (name := next(implied, None)) else ())


def named_types(types: object) -> frozenset[str]:
    """The types of a schema's `type`."""
    return frozenset(names(types if isinstance(types, list) else [types]))


def widened(types: frozenset[str]) -> frozenset[str]:
    """With the types that others include."""
    return types | {"integer"} if "number" in types else types


def mapping(value: object) -> Schema:
    """The value, or an empty object if it is not one."""
    return value if isinstance(value, Mapping) else _NOTHING


def names(value: object) -> list[str]:
    """The texts of a list."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _value_key(value: object) -> Hashable:
    """Equal for values that JSON Schema calls equal: 1 equals 1.0, but not true.

    Clients cannot choose values whose keys have equal hashes: those of texts are salted, those of small numbers differ.
    """
    match value:
        case str():
            return f'"{value}'
        case bool() | None:
            return str(value)
        case int() | float():
            return value if abs(value) < _MAX_OWN_HASH else str(int(value))
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    """With whole numbers as such."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(inner) for inner in value]
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
    return value
