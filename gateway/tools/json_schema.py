"""Which part of a JSON schema answers might not match, because the decode workers' compiler ignores it. Pure.

The compiler (xgrammar 0.2) makes a grammar of the types and of most keywords about each type. It ignores keywords that
it does not know, and most that stand beside `$ref`, `enum` or `anyOf`. Compiles nothing itself.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from gateway.errors import bad_request
from wire.json_schema import MAX_SHOWN, Schema, inner_schemas, written

_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ENFORCED = {  # type |-> keywords about it that grammars enforce
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
_IGNORED = {  # type |-> keywords about it that grammars ignore
    "object": {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies"},
    "array": {"uniqueItems", "contains", "minContains", "maxContains"},
    "number": {"multipleOf"},
}
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # one of them decides; only `type` may stand beside it
_ASSERTIONS = set[str]().union(*_ENFORCED.values(), *_IGNORED.values(), _NEVER, _WHOLE)
_NOT_TOGETHER = (  # of each pair, the second is ignored
    ({"pattern"}, {"minLength", "maxLength"}),
    ({"format"}, {"pattern", "minLength", "maxLength"}),
    (_RANGE, {"multipleOf"}),
    ({"properties"}, {"patternProperties"}),
)
_TYPES = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
_IMPLIED_BY = {  # type |-> keywords from which the compiler infers it if none is named
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
_TYPE_OF_JSON = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_MAX_HOPS = 4  # from reference to reference
_MAX_BRANCHES = 20  # that are compared with each other
_NOTHING: Schema = {}


class Comparisons:
    """How many values or properties may still be compared in the schemas of one request."""

    def __init__(self, num_left: int = 50_000) -> None:  # some 20 ms
        self.num_left = num_left


def check_enforced(
    schema: Schema, param: str, comparisons: Comparisons | None = None, *, is_strict: bool
) -> tuple[str, ...]:
    """A warning that names what answers may disregard, if there is such a part. Raises ApiError instead if strict.

    `comparisons`: of a request with several schemas.
    """
    problem = find_unenforced(schema, comparisons)
    if problem is not None and is_strict:
        raise bad_request(f"{param} has {problem}, which cannot be enforced; say it in another way", param)
    return () if problem is None else (f"{param} has {problem}, which is not enforced",)


def find_unenforced(schema: Schema, comparisons: Comparisons | None = None) -> str | None:
    """What is not enforced, and where, such as "'uniqueItems' at #/properties/a"; None: all is."""
    facts = _Facts(schema, comparisons or Comparisons())
    left: list[tuple[tuple[str, ...], Schema]] = [((), schema)]
    while left:
        place, part = left.pop()
        never, whole = (next((key for key in keys if key in part), None) for keys in (_NEVER, _WHOLE))
        if never is not None:
            problem: str | None = repr(never)
        else:
            problem = _find_of_types(part) if whole is None else _find_beside(whole, part, facts)
        if problem is not None:
            return f"{problem} at {written(place)}"
        left += [(place + keys, inner) for keys, inner in inner_schemas(part)]
    return None


def takes_objects_only(schema: Schema) -> bool:
    """Whether all answers to the schema are objects."""
    facts = _Facts(schema, Comparisons())
    left: list[object] = [schema]
    seen = set[int]()
    while left:
        part = facts.followed(left.pop())
        if id(part) in seen:
            continue
        seen.add(id(part))
        whole = next((key for key in _WHOLE if key in part), "type")
        if whole in ("anyOf", "oneOf") and isinstance(part[whole], list) and part[whole]:
            left += part[whole]
        elif whole not in ("type", "const", "enum") or facts.of(part).types != {"object"}:
            return False
    return True


def as_object(schema: Schema) -> Schema:
    """The schema; of objects if it names no type."""
    return {"type": "object", **schema} if schema.keys().isdisjoint((*_WHOLE, "type")) else schema


class _Shown(NamedTuple):
    """What a schema shows of its values without a search."""

    types: frozenset[str]  # all of them if it does not show any
    values: frozenset[str] | None  # those that it lists, as JSON that is equal for equal values: 1 and 1.0, not true
    required: Mapping[str, object]  # name |-> schema, of its required properties


class _Facts:
    """Of the schema `root` and the parts in it. `root` must not change meanwhile.

    Clients write schemas: each part is read once, however many references lead to it, and comparisons are limited.
    """

    def __init__(self, root: Schema, comparisons: Comparisons) -> None:
        self._root = root
        self._comparisons = comparisons
        self._targets: dict[int, Schema] = {}  # of references, by the id of their part: parts live as long as the root
        self._shown: dict[int, _Shown] = {}  # by the id of a part

    def followed(self, part: object) -> Schema:
        """The schema at the end of the references; an empty one if there is none."""
        schema = _mapping(part)
        for _ in range(_MAX_HOPS):
            if not isinstance(schema.get("$ref"), str):
                break
            if id(schema) not in self._targets:
                found: object = self._root
                for name in schema["$ref"].split("/")[1:]:
                    found = _mapping(found).get(name)
                self._targets[id(schema)] = _mapping(found)
            schema = self._targets[id(schema)]
        return schema

    def of(self, part: object) -> _Shown:
        schema = self.followed(part)
        if id(schema) not in self._shown:
            listed = [schema["const"]] if "const" in schema else schema.get("enum")
            values, types = None, _own_types(schema) or _TYPES
            if isinstance(listed, list):
                values = frozenset(json.dumps(_plain(value), sort_keys=True) for value in listed)
                types = frozenset(map(_type_of, values))
            properties = _mapping(schema.get("properties"))
            required = {name: properties[name] for name in _texts(schema.get("required")) if name in properties}
            self._shown[id(schema)] = _Shown(types, values, required)
        return self._shown[id(schema)]

    def are_apart(self, parts: Sequence[object]) -> bool:
        """Whether no value can match two of them: they differ in type, in listed values, or in a required property.

        Also False if there is too much to compare.
        """
        if len(parts) > _MAX_BRANCHES:
            return False
        return all(self._differ(*pair) for pair in combinations([self.of(part) for part in parts], 2))

    def _differ(self, one: _Shown, other: _Shown) -> bool:
        if _widened(one.types).isdisjoint(_widened(other.types)) or self._differ_in_values(one, other):
            return True
        self._comparisons.num_left -= 1 + min(len(one.required), len(other.required))
        return one.types == other.types == {"object"} and any(
            self._differ_in_values(self.of(one.required[name]), self.of(other.required[name]))
            for name in one.required.keys() & other.required.keys()
            if self._comparisons.num_left > 0
        )

    def _differ_in_values(self, one: _Shown, other: _Shown) -> bool:
        if one.values is None or other.values is None:
            return False
        self._comparisons.num_left -= 1 + min(len(one.values), len(other.values))
        return self._comparisons.num_left > 0 and one.values.isdisjoint(other.values)


def _own_types(schema: Schema) -> frozenset[str]:
    """Those that the schema names, or the one that the compiler infers."""
    if "type" in schema:
        return frozenset(_texts(schema["type"] if isinstance(schema["type"], list) else [schema["type"]]))
    implied = [name for name, keys in _IMPLIED_BY.items() if not schema.keys().isdisjoint(keys)]
    return frozenset(implied[:1])


def _widened(types: frozenset[str]) -> frozenset[str]:
    """With the types that others include."""
    return types | {"integer"} if "number" in types else types


def _type_of(written: str) -> str:
    """Of a value as JSON."""
    return _TYPE_OF_JSON.get(written[0]) or ("integer" if written.lstrip("-").isdigit() else "number")


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


def _mapping(value: object) -> Schema:
    """The value, or an empty object if it is not one."""
    return value if isinstance(value, Mapping) else _NOTHING


def _texts(value: object) -> list[str]:
    """Those of a list."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _find_beside(whole: str, schema: Schema, facts: _Facts) -> str | None:
    beside = next((key for key in schema if key in _ASSERTIONS and key not in (whole, "type")), None)
    if beside is not None:
        return f"{beside!r} beside {whole!r}"
    value = schema[whole]
    branches = value if whole in ("anyOf", "oneOf", "allOf") and isinstance(value, list) else []
    if whole == "$ref" and isinstance(value, str) and value != "#" and not value.startswith("#/"):
        return "a '$ref' to another schema"
    if whole == "allOf" and len(branches) > 1:
        return "'allOf' of several"
    if whole == "oneOf" and not facts.are_apart(branches):
        return "'oneOf' of schemas that may match at once"
    if "type" in schema:
        parts = branches or [schema if whole in ("$ref", "const", "enum") else None]
        types = frozenset[str]().union(*[facts.of(part).types for part in parts])
        if not types <= _widened(_own_types(schema)):
            return f"'type' beside {whole!r}"
    return None


def _find_of_types(schema: Schema) -> str | None:
    if _ASSERTIONS.isdisjoint(schema):
        return None
    types = _own_types(schema)
    enforced = set[str]().union(*(_ENFORCED.get(name, ()) for name in types))
    ignored = _ASSERTIONS - enforced
    if "type" in schema:
        ignored = set[str]().union(*(_IGNORED.get(name, ()) for name in types))
    for key in schema:
        if key in ignored and schema[key] is not False:
            return repr(key)
    for one, other in _NOT_TOGETHER:
        if (keys := one & schema.keys() & enforced) and (passed := other & schema.keys() & enforced):
            return f"{min(passed)!r} beside {min(keys)!r}"
    if any(mark in str(schema.get("pattern", "")) for mark in ("(?=", "(?!", "(?<=", "(?<!")):
        return "a 'pattern' that looks ahead or behind"
    if "object" in types:
        properties = _mapping(schema.get("properties"))
        for name in _texts(schema.get("required")):
            if name not in properties:
                return f"'required' of {name[:MAX_SHOWN]!r}, which is not in 'properties',"
    return None
