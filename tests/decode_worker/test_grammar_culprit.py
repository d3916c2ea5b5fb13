"""Errors for grammars that cannot be compiled: chains that are too long, and the part at fault."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.grammar.bindings import compile_text
from decode_worker.grammar.culprit import MAX_CHAIN, find_culprit, find_long_chain, rule_depth, schema_depth
from tests.support.grammars import vocabulary

STRING = {"type": "string"}
FOOL = {"type": "fool"}
ABOUT_FOOL = 'Unsupported type "fool"'


def problem_of(kind: str, text: str) -> str | None:
    try:
        compile_text(kind, text, vocabulary().info)
    except (RuntimeError, ValueError) as error:
        return ABOUT_FOOL if ABOUT_FOOL in str(error) else "another"
    return None


def culprit(kind: str, value: Any) -> tuple[str, str]:
    text = json.dumps(value)
    problem = problem_of(kind, text)
    assert problem is not None
    return find_culprit(kind, text, problem, problem_of)


def within(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": STRING, "x": schema, "y": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (FOOL, "#"),
        (within(**FOOL), "#/properties/x"),
        (within(type="array", items=within(**FOOL)), "#/properties/x/items/properties/x"),
        (within(anyOf=[STRING, {"type": "array", "prefixItems": [FOOL]}]), "#/properties/x/anyOf/1/prefixItems/0"),
        ({"type": "object", "additionalProperties": FOOL}, "#/additionalProperties"),
        ({**within(**{"$ref": "#/$defs/p"}), "$defs": {"q": FOOL, "p": within(**FOOL)}}, "#/$defs/p/properties/x"),
        ({**within(type="array", items={"$ref": "#"}), "additionalProperties": FOOL}, "#/additionalProperties"),
        ({"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}, "b": FOOL}}, None),
        (within(**{"$ref": "#/$defs/none"}), "#/properties/x"),
    ],
)
def test_a_schema_is_searched_for_its_innermost_bad_part(schema: dict[str, Any], place: str | None) -> None:
    if place is None:  # no reachable part is bad
        assert problem_of("json_schema", json.dumps(schema)) is None
        return
    param, problem = culprit("json_schema", schema)
    assert (param, problem.split(" at ")[1]) == ("", place)
    assert problem.startswith((ABOUT_FOOL, "another"))


def test_a_structural_tag_says_whose_part_is_bad() -> None:
    def tag(*parts: dict[str, Any]) -> dict[str, Any]:
        tags = [{"type": "tag", "begin": f"{index}", "content": part, "end": "!"} for index, part in enumerate(parts)]
        return {"type": "structural_tag", "format": {"type": "or", "elements": tags}}

    def schema(param: str, of: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": of, "param": param}

    fine, regex = schema("tools[0]", within(**STRING)), {"type": "regex", "pattern": "a(", "param": "regex"}
    bad = tag(fine, schema("tools[1]", within(**FOOL)), schema("tools[2]", FOOL))
    assert culprit("structural_tag", bad) == ("tools[1]", f"{ABOUT_FOOL} at #/properties/x")
    assert culprit("structural_tag", tag(fine, regex)) == ("regex", "another")
    grammar = {"type": "grammar", "grammar": "no grammar", "param": "grammar"}
    assert culprit("structural_tag", tag(grammar, fine)) == ("grammar", "another")
    assert culprit("structural_tag", {"type": "structural_tag"}) == ("", "another")  # no part is at fault


def test_a_search_without_time_says_what_is_known() -> None:
    text = json.dumps(within(**FOOL))
    assert find_culprit("json_schema", text, "too slow", lambda _kind, _text: None) == ("", "too slow at #")


# -- chains ----------------------------------------------------------------------------------------------------------


def chain(count: int, link: Any) -> dict[str, Any]:
    named = {f"a{number}": link({"$ref": f"#/$defs/a{number + 1}"}) for number in range(count)}
    return {"$defs": named | {f"a{count}": STRING}, "$ref": "#/$defs/a0"}


LINKS = {
    1: lambda following: following,
    2: lambda following: {"type": "array", "items": following},
    3: lambda following: {"properties": {"a": following}},
}


@pytest.mark.parametrize("levels", LINKS)
@given(count=st.integers(0, 50))
def test_references_count_as_what_they_name(levels: int, count: int) -> None:
    assert schema_depth(chain(count, LINKS[levels])) == 2 + levels * count + 1  # the whole, its "$defs", the last


def test_cycles_count_once() -> None:
    everything = {"anyOf": [{"type": "array", "items": {"$ref": "#"}} for _ in range(2 * MAX_CHAIN)]}
    assert schema_depth(everything) < 10
    assert schema_depth({"$ref": "#"}) < 3
    assert rule_depth("root ::= a\n" + "\n".join(f"r{i} ::= root" for i in range(50)) + "\na ::= root | r1") <= 4


@given(st.integers(1, 60), st.randoms())
def test_rules_are_counted_in_any_order(count: int, draw: Any) -> None:
    rules = [f'r{i} ::= "r{i + 9} ::= x" [ab-r] r{i + 1}? # r{i + 7}' for i in range(count)]
    rules.append(f'r{count} ::= "]" | "a"')
    draw.shuffle(rules)
    assert rule_depth("\n".join(["root ::= r0", *rules])) == count + 2


def test_chains_that_are_too_long_are_refused_before_they_are_compiled() -> None:
    fitting, long = (MAX_CHAIN - 3) // 2, MAX_CHAIN // 2
    assert find_long_chain("json_schema", json.dumps(chain(fitting, LINKS[2]))) is None
    assert "references are followed" in str(find_long_chain("json_schema", json.dumps(chain(long, LINKS[2]))))
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(MAX_CHAIN))
    assert f"{MAX_CHAIN} rules" in str(find_long_chain("ebnf", rules + f'\nr{MAX_CHAIN} ::= "a"'))
    assert find_long_chain("json_schema", "{") is None
