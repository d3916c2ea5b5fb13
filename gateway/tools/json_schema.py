"""Which part of a JSON schema answers might not match, because the decode workers' compiler ignores it. Pure.

The compiler (xgrammar 0.2) makes a grammar of the types and of most keywords about each type. It ignores keywords that
it does not know, and most that stand beside `$ref`, `enum` or `anyOf`. Compiles nothing itself.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from gateway.errors import bad_request
from gateway.tools.values import type_of
from wire.formats import FORMATS, OTHER_FORMATS
from wire.json_schema import (
    MAX_SHOWN,
    WHOLE,
    Schema,
    deciding,
    find_target,
    has_odd_names,
    inner_schemas,
    names_pattern,
    own_types,
    text_pattern,
    written,
)
from wire.patterns import NotEnforcedError, PatternError, json_pattern, literal_begin

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
_ASSERTIONS = set[str]().union(*_ENFORCED.values(), *_IGNORED.values(), _NEVER, WHOLE)
_NOT_TOGETHER = (  # of each pair, the second is ignored
    ({"pattern"}, {"minLength", "maxLength"}),
    ({"format"}, {"pattern", "minLength", "maxLength"}),
    (_RANGE, {"multipleOf"}),
    ({"properties"}, {"patternProperties"}),
    ({"patternProperties"}, {"additionalProperties", "unevaluatedProperties"}),
)
_MAX_MULTIPLE = 1024  # of xgrammar
_TYPES = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
_MAX_HOPS = 4  # from reference to reference
_MAX_BRANCHES = 20  # that are compared with each other
_NOTHING: Schema = {}


class Comparisons:
    """How many values or properties may still be compared, and expressions read, in the schemas of one request."""

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
    """Finds what is not enforced, and where, such as "'uniqueItems' at #/properties/a"; None: all is."""
    facts = _Facts(schema, comparisons or Comparisons())
    left: list[tuple[tuple[str, ...], Schema]] = [((), schema)]
    while left:
        place, part = left.pop()
        never = next((key for key in _NEVER if key in part), "$id" if place and "$id" in part else None)
        if never is not None:
            problem: str | None = repr(never)
        elif (whole := deciding(part)) is not None:
            problem = _find_beside(whole, part, facts)
        else:
            problem = _find_of_types(part, facts)
        if problem is not None:
            return f"{problem} at {written(place)}"
        left += [(place + keys, inner) for keys, inner in inner_schemas(part)]
    return None


def as_object(schema: Schema) -> Schema:
    """The schema; of objects if it names no type."""
    return {"type": "object", **schema} if schema.keys().isdisjoint((*WHOLE, "type")) else schema


class _Shown(NamedTuple):
    """Facts that a schema shows of its values without a search."""

    types: frozenset[str]  # all of them if it does not show any
    values: frozenset[str] | None  # those that it lists, as JSON that is equal for equal values: 1 and 1.0, not true
    required: Mapping[str, object]  # name |-> schema, of its required properties


class _Facts:
    """Facts about the schema `root` and the parts in it. `root` must not change meanwhile.

    Clients write schemas: each part is read once, however many references lead to it, and comparisons are limited.
    """

    def __init__(self, root: Schema, comparisons: Comparisons) -> None:
        self._root = root
        self._comparisons = comparisons
        self._targets: dict[int, Schema] = {}  # of references, by the id of their part: parts live as long as the root
        self._shown: dict[int, _Shown] = {}  # by the id of a part
        self._patterns: dict[str, str | None] = {}  # expression |-> what cannot be followed of it

    def followed(self, part: object) -> Schema:
        """The schema at the end of the references; an empty one if there is none."""
        schema = _mapping(part)
        for _ in range(_MAX_HOPS):
            if not isinstance(schema.get("$ref"), str):
                break
            if id(schema) not in self._targets:
                self._targets[id(schema)] = _mapping(find_target(self._root, schema["$ref"]))
            schema = self._targets[id(schema)]
        return schema

    def of(self, part: object) -> _Shown:
        schema = self.followed(part)
        if id(schema) not in self._shown:
            listed = [schema["const"]] if "const" in schema else schema.get("enum")
            values, types = None, own_types(schema) or _TYPES
            if isinstance(listed, list):
                plain = list(map(_plain, listed))
                values = frozenset(json.dumps(value, sort_keys=True) for value in plain)
                types = frozenset(map(type_of, plain))
            properties = _mapping(schema.get("properties"))
            required = {name: properties[name] for name in _texts(schema.get("required")) if name in properties}
            self._shown[id(schema)] = _Shown(types, values, required)
        return self._shown[id(schema)]

    def find_in_pattern(self, pattern: str | None) -> str | None:
        """The part of an expression that cannot be followed. An invalid expression is refused by the decode worker."""
        if pattern is not None and pattern not in self._patterns:
            self._comparisons.num_left -= 3 * len(pattern)  # takes 1 us per character
            if self._comparisons.num_left < 0:
                return "more text than is read of the expressions of a request"
            self._patterns[pattern] = None
            try:
                json_pattern(pattern)
            except NotEnforcedError as error:
                self._patterns[pattern] = str(error)
            except PatternError:
                pass
        return None if pattern is None else self._patterns[pattern]

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


def _widened(types: frozenset[str]) -> frozenset[str]:
    """The types, with those that they include."""
    return types | {"integer"} if "number" in types else types


def _plain(value: object) -> object:
    """The value, with whole numbers as integers."""
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
    """The texts in a list."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _find_beside(whole: str, schema: Schema, facts: _Facts) -> str | None:
    beside = next((key for key in schema if key in _ASSERTIONS and key not in (whole, "type")), None)
    if beside is not None:
        return f"{beside!r} beside {whole!r}"
    value = schema[whole]
    branches = value if whole in ("anyOf", "oneOf", "allOf") and isinstance(value, list) else []
    if whole == "$ref" and isinstance(value, str) and value != "#" and not value.startswith("#/"):
        return "a '$ref' to another schema"
    if whole in ("const", "enum") and _has_long_integer(value):
        return f"{whole!r} with a number of more than 64 bits"
    if whole == "allOf" and len(branches) > 1:
        return "'allOf' of several"
    if whole == "oneOf" and not facts.are_apart(branches):
        return "'oneOf' of schemas that may match at once"
    if "type" in schema:
        parts = branches or [schema if whole in ("$ref", "const", "enum") else None]
        types = frozenset[str]().union(*[facts.of(part).types for part in parts])
        if not types <= _widened(own_types(schema)):
            return f"'type' beside {whole!r}"
    return None


def _find_of_types(schema: Schema, facts: _Facts) -> str | None:
    if _ASSERTIONS.isdisjoint(schema):
        return None
    if (format := schema.get("format")) in OTHER_FORMATS:
        return f"the 'format' {format!r}"
    if (choice := next((key for key in WHOLE if key in schema), None)) is not None:
        return f"{choice!r} beside 'properties'"
    types = own_types(schema)
    enforced = set[str]().union(*(_ENFORCED.get(name, ()) for name in types))
    ignored = _ASSERTIONS - enforced
    if "type" in schema:
        ignored = set[str]().union(*(_IGNORED.get(name, ()) for name in types))
    has_names = "object" in types and names_pattern(schema) is not None
    for key in schema:
        if key in ignored and not (_says_nothing(key, schema[key]) or (key == "propertyNames" and has_names)):
            return repr(key)
    keys = {key for key in schema.keys() & enforced if not _says_nothing(key, schema[key])}
    for one, other in _NOT_TOGETHER:
        if (found := one & keys) and (passed := other & keys):
            return f"{min(passed)!r} beside {min(found)!r}"
    if "integer" in types and "multipleOf" in schema and not _is_multiple(schema["multipleOf"]):
        return f"a 'multipleOf' that is no whole number up to {_MAX_MULTIPLE}"
    if "string" in types and (problem := facts.find_in_pattern(text_pattern(schema))) is not None:
        return f"a 'pattern' with {problem}"
    return _find_of_objects(schema, facts) if "object" in types else None


def _find_of_objects(schema: Schema, facts: _Facts) -> str | None:
    properties, patterned = _mapping(schema.get("properties")), _mapping(schema.get("patternProperties"))
    rest = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    for name in _texts(schema.get("required")):
        if name not in properties and (patterned or rest is False or "propertyNames" in schema):
            return f"'required' of {name[:MAX_SHOWN]!r}, which is not in 'properties',"
    for key, pattern in (("propertyNames", names_pattern(schema)), *(("patternProperties", key) for key in patterned)):
        if (problem := facts.find_in_pattern(pattern)) is not None:
            return f"{key!r} with {problem}"
    begins = sorted(map(literal_begin, patterned))
    if any(later.startswith(begin) for begin, later in pairwise(begins)):
        return "several 'patternProperties' that one name may match"
    if (
        (rest not in (None, False) or not properties)
        and isinstance(least := schema.get("minProperties"), (int, float))
        and least > 1
    ):
        return "'minProperties' of names that are free, and may be repeated,"
    return "'additionalProperties' beside a name that is not plain ASCII" if has_odd_names(schema) else None


def _says_nothing(key: str, value: object) -> bool:
    """Whether a keyword with this value leaves the others to decide."""
    if key == "format":
        return not isinstance(value, str) or value not in FORMATS
    return key in ("additionalProperties", "unevaluatedProperties", "uniqueItems") and value is False


def _is_multiple(value: object) -> bool:
    return isinstance(value, (int, float)) and 1 <= value <= _MAX_MULTIPLE and value == int(value)


def _has_long_integer(value: object) -> bool:
    match value:
        case int():
            return not -(2**63) <= value < 2**63
        case list():
            return any(map(_has_long_integer, value))
        case dict():
            return any(map(_has_long_integer, value.values()))
    return False
