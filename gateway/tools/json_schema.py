"""Which part of a JSON schema answers might not match, because the decode workers' compiler ignores it. Pure.

The compiler (xgrammar 0.2) makes a grammar of the types and of most keywords about each type. It ignores keywords that
it does not know, and most that stand beside `$ref`, `enum` or `anyOf`. Compiles nothing itself.
"""

from collections.abc import Iterator

from gateway.errors import bad_request
from gateway.tools.schema_facts import SchemaFacts, implied_types, mapping, named_types, names, widened
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
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")


def check_enforced(schema: Schema, param: str, *, is_strict: bool) -> tuple[str, ...]:
    """A warning that names what answers may disregard, if there is such a part. Raises ApiError instead if strict."""
    problem = find_unenforced(schema)
    if problem is not None and is_strict:
        raise bad_request(f"{param} has {problem}, which cannot be enforced; say it in another way", param)
    return () if problem is None else (f"{param} has {problem}, which is not enforced",)


def find_unenforced(schema: Schema) -> str | None:
    """What is not enforced, and where, such as "'uniqueItems' at #/properties/a"; None: all is."""
    facts = SchemaFacts(schema)
    for place, part in _parts(schema):
        if (problem := _find_in(part, facts)) is not None:
            return f"{problem} at {written(place)}"
    return None


def takes_objects_only(schema: Schema) -> bool:
    """Whether all answers to the schema are objects."""
    facts = SchemaFacts(schema)
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
        elif whole not in ("type", "const", "enum") or facts.types(part) != {"object"}:
            return False
    return True


def as_object(schema: Schema) -> Schema:
    """The schema; of objects if it names no type."""
    return {"type": "object", **schema} if schema.keys().isdisjoint((*_WHOLE, "type")) else schema


def _parts(root: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """The schema and all within it, each with the keys that lead to it."""
    left: list[tuple[tuple[str, ...], Schema]] = [((), root)]
    while left:
        place, schema = left.pop()
        yield place, schema
        left += [(place + keys, part) for keys, part in inner_schemas(schema)]


def _find_in(schema: Schema, facts: SchemaFacts) -> str | None:
    """What is not enforced of the schema itself, apart from the schemas in it."""
    if _ASSERTIONS.isdisjoint(schema):
        return None
    for key in _NEVER:
        if key in schema:
            return repr(key)
    if (whole := next((key for key in _WHOLE if key in schema), None)) is not None:
        return _find_beside(whole, schema, facts)
    return _find_of_types(schema)


def _find_beside(whole: str, schema: Schema, facts: SchemaFacts) -> str | None:
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
        types = frozenset[str]().union(*map(facts.types, parts))
        if not types <= widened(named_types(schema["type"])):
            return f"'type' beside {whole!r}"
    return None


def _find_of_types(schema: Schema) -> str | None:
    types = named_types(schema["type"]) if "type" in schema else implied_types(schema)
    enforced = set[str]().union(*(_ENFORCED.get(name, ()) for name in types))
    if "type" in schema:
        ignored_keys = set[str]().union(*(_IGNORED.get(name, ()) for name in types))
    else:
        ignored_keys = _ASSERTIONS - enforced
    for key in schema:
        if key in ignored_keys and schema[key] is not False:
            return repr(key)
    for one, other in _NOT_TOGETHER:
        if (keys := one & schema.keys() & enforced) and (passed := other & schema.keys() & enforced):
            return f"{min(passed)!r} beside {min(keys)!r}"
    if any(mark in str(schema.get("pattern", "")) for mark in _LOOKAROUND):
        return "a 'pattern' that looks ahead or behind"
    if "object" in types:
        properties = mapping(schema.get("properties"))
        missing = next((name for name in names(schema.get("required")) if name not in properties), None)
        if missing is not None:
            return f"'required' of {missing[:MAX_SHOWN]!r}, which is not in 'properties',"
    return None
