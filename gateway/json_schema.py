"""Which part of a JSON schema answers might not match, as the decode workers' grammar compiler passes over it. Pure.

The compiler (xgrammar 0.2) makes a grammar of the types, and of what each type can be told to be; it skips what it does
not know, and most of what stands beside `$ref`, `enum` or `anyOf`. Must not know who compiles, and compiles nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from gateway.errors import bad_request

Schema = Mapping[str, Any]

_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_SEEN_TO = {  # type |-> keywords about it that grammars follow
    "object": {
        "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
        "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _RANGE | {"multipleOf"},
    "number": _RANGE,
    "boolean": set[str](),
    "null": set[str](),
}  # fmt: skip
_PASSED_OVER = {  # type |-> keywords about it that grammars do not follow
    "object": {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies"},
    "array": {"uniqueItems", "contains", "minContains", "maxContains"},
    "number": {"multipleOf"},
}
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # one of them decides; nothing but a type goes with it
_ASSERTIONS = set[str]().union(*_SEEN_TO.values(), *_PASSED_OVER.values(), _NEVER, _WHOLE)
_TOLD_BY = {  # keywords without a type beside them that make the compiler take a type for granted
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
_NOT_TOGETHER = (  # of each pair, the second is passed over
    ({"pattern"}, {"minLength", "maxLength"}),
    ({"format"}, {"pattern", "minLength", "maxLength"}),
    (_RANGE, {"multipleOf"}),
    ({"properties"}, {"patternProperties"}),
)
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name |-> schema
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
)  # fmt: skip
_MAX_HOPS = 4  # from reference to reference
_MAX_BRANCHES = 20  # that are compared with each other


def check_enforced(schema: Schema, param: str) -> None:
    """Raises ApiError naming what answers to the schema could disregard."""
    if (problem := find_unenforced(schema)) is not None:
        raise bad_request(f"{param} has {problem}, which cannot be enforced; say it in another way", param)


def find_unenforced(schema: Schema) -> str | None:
    """What answers may disregard, and where, such as "'uniqueItems' at #/properties/a"; None: they match all of it."""
    for path, part in _parts(schema):
        if (problem := _find_in(part, schema)) is not None:
            return f"{problem} at {path}"
    return None


def _parts(root: Schema) -> Iterator[tuple[str, Schema]]:
    """The schema and all within it, each with its place."""
    left: list[tuple[str, Any]] = [("#", root)]
    while left:
        path, schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        yield path, schema
        left += [(f"{path}/{key}", schema[key]) for key in _SINGLE if key in schema]
        for key in _MAPS:
            if isinstance(inner := schema.get(key), Mapping):
                left += [(f"{path}/{key}/{name}", part) for name, part in inner.items()]
        for key in _LISTS:
            if isinstance(inner := schema.get(key), list):
                left += [(f"{path}/{key}/{index}", part) for index, part in enumerate(inner)]


def _find_in(schema: Schema, root: Schema) -> str | None:
    """The same for the schema itself, without the schemas in it."""
    if _ASSERTIONS.isdisjoint(schema):
        return None
    for key in _NEVER:
        if key in schema:
            return repr(key)
    if (whole := next((key for key in _WHOLE if key in schema), None)) is not None:
        return _find_beside(whole, schema, root)
    return _find_of_types(schema)


def _find_beside(whole: str, schema: Schema, root: Schema) -> str | None:
    beside = next((key for key in schema if key in _ASSERTIONS and key not in (whole, "type")), None)
    if beside is not None:
        return f"{beside!r} beside {whole!r}"
    value = schema[whole]
    branches = value if whole in ("anyOf", "oneOf", "allOf") and isinstance(value, list) else []
    if whole == "$ref" and isinstance(value, str) and value != "#" and not value.startswith("#/"):
        return "a '$ref' to another schema"
    if whole == "allOf" and len(branches) > 1:
        return "'allOf' of several"
    if whole == "oneOf" and not _are_apart(branches, root):
        return "'oneOf' of schemas that may match at once"
    if "type" in schema:
        types = [_types_of(branch, root) for branch in branches] if branches else [_types_of({whole: value}, root)]
        if not set[str]().union(*types) <= _widened(_named(schema["type"])):
            return f"'type' beside {whole!r}"
    return None


def _find_of_types(schema: Schema) -> str | None:
    types = _named(schema["type"]) if "type" in schema else _types_told(schema)
    seen_to = set[str]().union(*(_SEEN_TO.get(name, ()) for name in types))
    if "type" in schema:
        passed_over = set[str]().union(*(_PASSED_OVER.get(name, ()) for name in types))
    else:
        passed_over = _ASSERTIONS - seen_to
    for key in schema:
        if key in passed_over and schema[key] is not False:
            return repr(key)
    for one, other in _NOT_TOGETHER:
        if (keys := one & schema.keys() & seen_to) and (passed := other & schema.keys() & seen_to):
            return f"{min(passed)!r} beside {min(keys)!r}"
    if any(mark in str(schema.get("pattern", "")) for mark in _LOOKAROUND):
        return "a 'pattern' that looks ahead or behind"
    if "object" in types:
        properties = _mapping(schema.get("properties"))
        missing = next((name for name in _names(schema.get("required")) if name not in properties), None)
        if missing is not None:
            return f"'required' of {missing[:64]!r}, which is not in 'properties',"
    return None


def _types_told(schema: Schema) -> set[str]:
    """The type that the compiler takes for granted."""
    return next(({name} for name, keys in _TOLD_BY.items() if any(key in schema for key in keys)), set())


def _types_of(schema: object, root: Schema) -> set[str]:
    """Types that a match may have; all of them when that is not plain to see."""
    schema = _followed(schema, root)
    if "const" in schema:
        return {_type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    return (_named(schema["type"]) if "type" in schema else _types_told(schema)) or set(_SEEN_TO)


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


def _widened(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


@dataclass(slots=True)
class _Branch:
    """One schema of several, and what can be seen of it."""

    schema: Schema  # at the end of references
    types: set[str]
    values: list[str] | None  # as JSON, when it names them

    @classmethod
    def of(cls, schema: object, root: Schema) -> "_Branch":
        return cls(_followed(schema, root), _widened(_types_of(schema, root)), _values_of(schema, root))


def _are_apart(schemas: Sequence[object], root: Schema) -> bool:
    """Whether no value matches two of them: they differ in type, as values, or in a property that each requires."""
    if len(schemas) > _MAX_BRANCHES:
        return False
    branches = [_Branch.of(schema, root) for schema in schemas]
    return all(_is_apart(one, other, root) for one, other in combinations(branches, 2))


def _is_apart(one: _Branch, other: _Branch, root: Schema) -> bool:
    if one.types.isdisjoint(other.types) or _differ(one.values, other.values):
        return True
    mine, others = _mapping(one.schema.get("properties")), _mapping(other.schema.get("properties"))
    needed = {*_names(one.schema.get("required"))} & {*_names(other.schema.get("required"))}
    return one.types == other.types == {"object"} and any(
        _differ(_values_of(mine[name], root), _values_of(others[name], root))
        for name in needed & mine.keys() & others.keys()
    )


def _values_of(schema: object, root: Schema) -> list[str] | None:
    schema = _followed(schema, root)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [json.dumps(value, sort_keys=True) for value in values] if isinstance(values, list) else None


def _differ(one: list[str] | None, other: list[str] | None) -> bool:
    return one is not None and other is not None and set(one).isdisjoint(other)


def _followed(schema: object, root: Schema) -> Schema:
    """The schema at the end of references; an empty one when there is none."""
    for _ in range(_MAX_HOPS):
        ref = _mapping(schema).get("$ref")
        if not isinstance(ref, str):
            break
        schema = root
        for name in ref.split("/")[1:]:
            schema = _mapping(schema).get(name)
    return _mapping(schema)


def _mapping(value: object) -> Schema:
    return value if isinstance(value, Mapping) else {}


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _named(types: object) -> set[str]:
    """The types of a schema's `type`."""
    return set(_names(types if isinstance(types, list) else [types]))
