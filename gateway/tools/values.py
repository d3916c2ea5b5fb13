"""Arguments that a model writes as plain text, as in XML: which types they may have, and their JSON. Pure."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gateway.tools.json_text import check_depth
from wire.json_schema import deciding, find_target, own_types

JSON_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as templates in Python write them
_MOST_PARTS = 1024  # of a schema, that are looked at for one value


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value may have; all where the schema does not tell. `root`: what its references are in."""
    found = set[str]()
    for part in _ends(schema, root):
        key = deciding(part)
        own = own_types(part) & JSON_TYPES
        if key == "const":
            found.add(type_of(part["const"]))
        elif key == "enum" and isinstance(part["enum"], list):
            found |= set(map(type_of, part["enum"]))
        elif own:
            found |= own | ({"integer"} if "number" in own else set())
        else:
            return JSON_TYPES
    return frozenset(found) or JSON_TYPES


def argument_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types of one argument. `schema`: that of all."""
    found = frozenset[str]()
    for part in _ends(schema, schema):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found |= value_types(properties[name], schema)
        elif not properties:
            found |= value_types(part.get("additionalProperties"), schema)
    return found or JSON_TYPES


def _ends(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the schemas that decide, behind references and choices; {} where not known, or if it takes too long."""
    left, seen = [schema], set[int]()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, Mapping) or len(seen) > _MOST_PARTS:
            yield {}
            return
        key = deciding(part)
        given = part.get(key) if key else None
        if key == "$ref":
            left.append(find_target(root, str(given)))
        elif key in ("anyOf", "oneOf") and isinstance(given, list) and given:
            left += given
        elif key == "allOf" and isinstance(given, list) and given:
            left.append(given[0])
        else:
            yield part


def as_value(text: str, types: Collection[str]) -> str:
    """JSON of what the text says in one of the types; else of the text itself."""
    stripped = text.strip()
    written = CONSTANTS.get(stripped, stripped)
    try:
        value = json.loads(written, parse_constant=_refuse)
        check_depth({"": value})
    except (ValueError, RecursionError):
        value = text
    is_text = isinstance(value, str)
    return f'"{escaped(text)}"' if is_text or type_of(value) not in types else written


def escaped(text: str) -> str:
    """A part of a string in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def type_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case None:
            return "null"
        case _:
            return "object"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")
