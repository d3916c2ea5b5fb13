"""Values that stand in XML as plain text: their types by the schema, and the JSON of them."""

import json
from typing import Any

import pytest

from gateway.tools.values import JSON_TYPES, argument_types, as_value, value_types

ROOT: dict[str, Any] = {"$defs": {"a": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}

UNTYPED: list[Any] = [{}, {"$ref": "#/x"}, {"$ref": "#/$defs/loop"}, {"anyOf": []}, True, 7]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"$ref": "#/$defs/a"}, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, {"integer", "null"}),
        ({"enum": ["a", 1, True]}, {"string", "integer", "boolean"}),
        ({"const": None}, {"null"}),
        ({"properties": {}}, {"object"}),
        ({"minLength": 1}, {"string"}),
        ({"allOf": [{"type": "string"}]}, {"string"}),
        ({"format": {}}, JSON_TYPES),
        *((schema, JSON_TYPES) for schema in UNTYPED),
        ({"type": "other"}, JSON_TYPES),
        ({"enum": []}, JSON_TYPES),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    assert value_types(schema, ROOT) == types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"x": {"type": "string"}}}, {"string"}),
        ({"additionalProperties": {"type": "string"}}, {"string"}),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {"type": "string"}}}}}, {"string"}),
        ({"anyOf": [{"properties": {"x": {"type": kind}}} for kind in ("string", "null")]}, {"string", "null"}),
        ({"properties": {"y": {"type": "string"}}}, JSON_TYPES),
    ],
)
def test_types_of_an_argument(schema: dict[str, Any], types: set[str]) -> None:
    assert argument_types(schema, "x") == types


def test_a_schema_of_many_references_is_looked_at_once() -> None:
    many: dict[str, Any] = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}}
    many["$defs"]["a"]["anyOf"] = [{"$ref": "#/$defs/a"}] * 20_000  # 20,000^4 ways through it
    assert argument_types(many, "x") == JSON_TYPES


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"string"}, "3"),
        ("3", {"integer"}, 3),
        (" 3\n", {"integer", "string"}, 3),
        ("3.5", {"integer"}, "3.5"),
        ("three", {"integer"}, "three"),
        ("True", {"boolean"}, True),
        ("None", {"string", "null"}, None),
        ("None", {"string"}, "None"),
        ('{"a": [1]}', JSON_TYPES, {"a": [1]}),
        ('{"a": [1', JSON_TYPES, '{"a": [1'),
        ('"quoted"', JSON_TYPES, '"quoted"'),
        ("NaN", JSON_TYPES, "NaN"),
        ("[" * 100_000, JSON_TYPES, "[" * 100_000),
        ("[" * 100 + "]" * 100, JSON_TYPES, "[" * 100 + "]" * 100),  # deeper than arguments may be
        ("1" * 5000, JSON_TYPES, "1" * 5000),
        ('a "b"\n\x00\\ 🙂', {"string"}, 'a "b"\n\x00\\ 🙂'),
    ],
)
def test_values(text: str, types: set[str], value: Any) -> None:
    assert json.loads(as_value(text, types)) == value
