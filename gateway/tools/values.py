"""Arguments that a model writes as plain text, as in XML: which types they may have, and their JSON. Pure."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from gateway.tools.json_text import check_depth
from wire.json_schema import deciding, find_target, own_types

JSON_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as templates in Python write them
_MOST_STEPS = 8  # of references and choices in one another


def value_types(schema: Any, root: Mapping[str, Any], steps: int = _MOST_STEPS) -> frozenset[str]:
    """The types that a value may have; all where the schema does not tell. `root`: what its references are in."""
    if not isinstance(schema, Mapping) or not steps:
        return JSON_TYPES
    key = deciding(schema)
    given = schema.get(key) if key else None
    if key == "$ref":
        return value_types(find_target(root, str(given)), root, steps - 1)
    if key == "const":
        return frozenset((_type_of(given),))
    if key == "enum" and isinstance(given, list):
        return frozenset(map(_type_of, given)) or JSON_TYPES
    if key in ("anyOf", "oneOf") and isinstance(given, list):
        return frozenset().union(*[value_types(one, root, steps - 1) for one in given]) or JSON_TYPES
    types = own_types(schema) & JSON_TYPES
    return types | {"integer"} if "number" in types else types or JSON_TYPES


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
    return f'"{escaped(text)}"' if is_text or _type_of(value) not in types else written


def escaped(text: str) -> str:
    """A part of a string in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _type_of(value: object) -> str:
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
