"""Warnings list exactly what answers can violate. Random schemas, and random answers to them."""

import json
import random
import sys
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.grammar.errors import GrammarMismatchError
from demo.paths import TARGET_DIR
from gateway.text.tokenizer import Tokenizer
from gateway.tools.json_schema import as_object, find_unenforced
from gateway.tools.values import value_types
from tests.support.combinations import examples
from tests.support.grammars import compile_here, vocabulary, walk

STOP = 2
NUMBERS = st.integers(-9, 9) | st.sampled_from([0.5, -2.5])
COUNTS = st.integers(0, 3)
VALUES = st.sampled_from([0, 1, 2.5, "a", "abc", None, True, [1], {"a": 1}])
NAMES = st.sampled_from(["a", "b", "xa", "é", 'a"'])
PATTERNS = st.sampled_from(["^a+$", "b", "^[a-c]{2,3}$", "^x", r'^"\\|\n$', "^[^a]", r"a\b"])
DISTINCT: list[Any] = [1, True, "1", "True", None, "None", [], {}, "[]", "{}", [1]]
TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
REFS = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "http://host/schema", "#there"])


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Keyword |-> strategy for its value."""
    listed = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    return {
        "$ref": REFS, "const": VALUES, "enum": st.lists(VALUES, min_size=1, max_size=3), "anyOf": listed,
        "oneOf": listed, "allOf": listed, "not": inner, "if": inner, "then": inner, "properties": named,
        "required": st.lists(NAMES, max_size=2, unique=True), "additionalProperties": inner | st.booleans(),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": inner | st.fixed_dictionaries({"pattern": PATTERNS}) | st.just({"enum": ["é", "b"]}),
        "minProperties": COUNTS, "maxProperties": COUNTS, "dependentRequired": st.just({"a": ["b"]}),
        "items": inner, "prefixItems": listed, "minItems": COUNTS, "maxItems": COUNTS, "uniqueItems": st.booleans(),
        "contains": inner, "minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS,
        "format": st.sampled_from(["date", "ipv4", "json-pointer", "unheard-of", "iri"]),
        "minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMinimum": NUMBERS, "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 3, 0.5]),
        "title": st.just("t"), "default": VALUES, "unevaluatedProperties": st.booleans(),
    }  # fmt: skip


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """Schemas with few keywords: most schemas with many allow nothing."""
    offered = keywords(schemas(depth - 1) if depth else st.sampled_from([{"type": "integer"}, {"type": "string"}, {}]))
    names = draw(st.lists(st.sampled_from(sorted(offered)), max_size=3, unique=True))
    schema = {name: draw(offered[name]) for name in names}
    if draw(st.integers(0, 4)):
        schema["type"] = draw(
            st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True)
        )
    return schema


def answers(text: str, count: int) -> list[Any]:
    """Values that the schema's grammar allows; fewer if it is refused or does not end."""
    try:
        grammar = compile_here("json_schema", text, vocabulary())
    except (RuntimeError, ValueError):
        return []  # refused
    found = []
    for seed in range(count):
        try:
            tokens = walk(grammar, (STOP,), random.Random(seed), most=120)
        except (GrammarMismatchError, IndexError):
            continue  # too ambiguous, or nothing is allowed
        written = "\ufffd" if tokens is None else Tokenizer(TARGET_DIR).decode(tokens)
        if "\ufffd" not in written:
            found.append(json.loads(written))
    return found


@settings(max_examples=examples(150))
@given(schemas(), schemas(depth=0), schemas(depth=1))
def test_answers_match_all_that_is_not_reported(
    schema: dict[str, Any], one: dict[str, Any], other: dict[str, Any]
) -> None:
    schema = {**schema, "$defs": {"a": one, "b": other}}
    problem = find_unenforced(schema)
    if problem is not None:
        assert " at #" in problem
        return
    for answer in answers(json.dumps(schema), 2):
        jsonschema.Draft202012Validator(schema).validate(answer)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' at #/properties/a"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "'maxLength' beside 'pattern' at #"),
        ({"anyOf": [{"type": "null"}, {"minimum": 3, "maxLength": 1}]}, "'maxLength' at #/anyOf/1"),
        ({"$ref": "http://host/schema"}, "a '$ref' to another schema at #"),
        ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 3}, "'minimum' beside '$ref' at #"),
        ({"type": "integer", "enum": [1, "a"]}, "'type' beside 'enum' at #"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' of schemas that may match at once at #"),
        (
            {"type": "object", "required": ["a"], "patternProperties": {"^b": {}}},
            "'required' of 'a', which is not in 'properties', at #",
        ),
        ({"type": "array", "contains": False}, "'contains' at #"),
        ({"type": "integer", "multipleOf": 1.5}, "a 'multipleOf' that is no whole number up to 1024 at #"),
        (
            {"type": "object", "patternProperties": {"^a": {}, "b": {}}},
            "several 'patternProperties' that one name may match at #",
        ),
        (
            {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": {"type": "null"}},
            "'additionalProperties' beside 'patternProperties' at #",
        ),
        ({"type": "object", "patternProperties": {"a\\b": {}}}, "'patternProperties' with '\\b' at #"),
        ({"type": "object", "propertyNames": {"pattern": "(?=a)"}}, "'propertyNames' with a lookahead at #"),
        ({"type": "object", "propertyNames": {"not": {}}}, "'propertyNames' at #"),
        ({"type": "object", "minProperties": 2}, "'minProperties' of names that are free, and may be repeated, at #"),
        (
            {"properties": {"é": {}}, "additionalProperties": {"type": "null"}},
            "'additionalProperties' beside a name that is not plain ASCII at #",
        ),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "'anyOf' beside 'properties' at #"),
        ({"type": "string", "pattern": "(?<!a)b"}, "a 'pattern' with a lookbehind at #"),
        ({"type": "string", "format": "iri"}, "the 'format' 'iri' at #"),
        ({"const": [2**64]}, "'const' with a number of more than 64 bits at #"),
        ({"properties": {"a": {"$id": "b"}}}, "'$id' at #/properties/a"),
        *(
            ({"oneOf": [{"const": one}, {"enum": [2, other]}]}, "'oneOf' of schemas that may match at once at #")
            for one, other in ((1, 1.0), (2**70, float(2**70)), ([1.0, {"b": 1, "a": 2}], [1, {"a": 2, "b": 1}]))
        ),
        ({"type": "string", "anyOf": []}, "'type' beside 'anyOf' at #"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "'allOf' of several at #"),
        ({"properties": {"x" * 999: {"not": {}}}}, f"'not' at #/properties/{'x' * 64}"),
    ],
)
def test_what_is_not_enforced_is_named_with_its_place(schema: dict[str, Any], problem: str) -> None:
    assert find_unenforced(schema) == problem


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "items": {"type": ["string", "null"]}},
        {"type": "string", "minimum": 3, "title": "a text, which minimum says nothing of"},
        {"oneOf": [{"const": value} for value in DISTINCT]},
        {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}, {"const": 5}]},
        {"oneOf": [{"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")]},
        {"$defs": {"a": {"type": "object"}}, "type": "object", "anyOf": [{"$ref": "#/$defs/a"}]},
        {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "description": "a note", "default": 3, "x-own": 1},
        {"type": "object", "patternProperties": {"^s_": {"type": "string"}, "^i_": {}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "string"}},
        {"type": "string", "pattern": "a", "format": "color"},
        {"minimum": 3},
        {"type": "object", "required": ["a"]},
    ],
)
def test_what_users_write_is_taken(schema: dict[str, Any]) -> None:
    assert find_unenforced(schema) is None


ENUM = {"enum": list(range(4000))}
BUSY: dict[str, dict[str, Any]] = {
    "the same values everywhere": {
        "$defs": {"e": ENUM},
        "properties": {f"a{n}": {"oneOf": [{"$ref": "#/$defs/e"}, {"type": "string"}]} for n in range(500)},
    },
    "values without end to compare": {
        "$defs": {f"e{n}": {"enum": list(range(n * 1000, n * 1000 + 1000))} for n in range(10)},
        "anyOf": [{"oneOf": [{"$ref": f"#/$defs/e{n}"} for n in range(10)]} for _ in range(200)],
    },
    "one set of types for all": {
        "$defs": {"e": ENUM}, "anyOf": [{"$ref": "#/$defs/e"} for _ in range(1500)], "type": "integer",
    },
    "expressions without end": {
        "properties": {f"a{n}": {"type": "string", "pattern": f"[a-z]\\d.x{{{n}}}" * 9} for n in range(900)},
    },
    "a long name above many": {"properties": {"x" * 30000: {"properties": {f"a{n}": {} for n in range(2000)}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", BUSY)
def test_looking_costs_no_more_than_writing(name: str) -> None:
    """Counted in Python calls, which do not depend on the machine."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        find_unenforced(BUSY[name])
    finally:
        sys.setprofile(None)
    assert num_calls < 12 * len(json.dumps(BUSY[name]))


@pytest.mark.parametrize(
    ("schema", "is_sure"),
    [
        ({}, True),
        ({"title": "t"}, True),
        ({"$defs": {"a": {"properties": {}}}, "$ref": "#/$defs/a"}, True),
        ({"anyOf": [{"type": "object"}, {"oneOf": [{"const": {}}]}]}, True),
        ({"type": "object", "anyOf": [{"type": "integer"}]}, False),
        ({"anyOf": [{}]}, False),
        ({"anyOf": []}, False),
        ({"$ref": "#"}, False),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, True),
        ({"allOf": [{"type": "object"}]}, True),
        ({"enum": [{}, 1]}, False),
        ({"items": {}, "type": ["object", "array"]}, False),
    ],
)
def test_what_takes_objects_only_answers_with_objects(schema: dict[str, Any], is_sure: bool) -> None:
    assert (value_types(as_object(schema), as_object(schema)) == {"object"}) == is_sure
    if is_sure:
        found = answers(json.dumps(as_object(schema)), 3)
        assert found and all(isinstance(answer, dict) for answer in found)
