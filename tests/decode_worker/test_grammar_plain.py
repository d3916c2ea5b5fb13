"""What grammars take of schemas, expressions and EBNF: the texts of the values that these mean, and only those."""

import ipaddress
import json
import random
import re
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.grammar.matcher import LoadedGrammar
from tests.support.grammars import allowed_in, compile_here, vocabulary
from wire.formats import FORMATS
from wire.patterns import NotEnforcedError, PatternError, json_pattern

STOP = 2


def takes(grammar: LoadedGrammar, text: str) -> bool:
    matcher = grammar.new_matcher((STOP,))
    return matcher.begin_with(text) and STOP in allowed_in(matcher.fill(())[0])


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def named(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


DEFS = {"$defs": {"a/b~c": {"type": "integer"}, "Page[int]": {"type": "null"}, "x": {"anyOf": [{"type": "null"}]}}}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # expressions are about values
        (string(pattern='^say "[a-z]+"$'), ['say "hi"'], ['say ""', "say hi"]),
        (string(pattern=r"^C:\\[a-z]+$"), [r"C:\abc"], ["C:abc"]),
        (string(pattern="^a\nb$"), ["a\nb"], ["ab"]),
        (string(pattern=r"^[a-z]+\t[a-z]+$"), ["a\tb"], ["a b"]),
        (string(pattern=r"^a\sb$"), ["a b", "a\nb", "a\xa0b"], ["ab"]),
        (string(pattern="^a.b$"), ["a/b", 'a"b', "a\x00b"], ["a\nb", "ab"]),
        (string(pattern="^[^a]$"), ["\x1f", "é", "\U0001f600", "\\"], ["a"]),
        # and match anywhere
        (string(pattern=r"\S"), ["hello world", "x"], ["", " \n"]),
        (string(pattern="^ab"), ["ab", "abcde"], ["xab"]),
        (string(pattern="(?:^|,)x(?:,|$)"), ["x", "a,x,b"], ["ax"]),
        (string(pattern="^a|b$"), ["ax", "xb"], ["xa", "bx"]),
        # lengths count characters
        (string(maxLength=4), ['a"b\n', "\\\\\\\\", "\U0001f600" * 4, ""], ["abcde"]),
        (string(maxLength=200), ["", "a", 'a"' * 100, "é" * 200], ["a" * 201, 'a"' * 100 + "\n"]),
        (string(minLength=150), ["a" * 150, '"' * 151], ["a" * 149, '"' * 149]),
        (string(minLength=2, maxLength=3.0), ['""', "\n\n\n"], ['"', "abcd"]),
        # names are strings
        ({"type": "object", "patternProperties": {"^s_": INTEGER}}, [{"s_": 1}, {'s_"\n': 1}], [{"x": 1}, {"s_": ""}]),
        ({"type": "object", "propertyNames": {"enum": ["a", 'b"']}, "additionalProperties": INTEGER},
         [{}, {"a": 1}, {'b"': 1}], [{"c": 1}, {"a": ""}]),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, [{'"': 1}], [{"ab": 1}]),
        ({**named(ab=INTEGER), "additionalProperties": TEXT},
         [{"ab": 1, "c": "x"}, {'"\n': ""}], [{"ab": "x"}, {"ab": 1, "x": 1}]),
        # formats
        (string(format="json-pointer"), ['/a"b', "/~0/é"], ["/~", "a"]),
        (string(format="email"), ["a.b+c@example.com"], ["a@", "a b@c.d"]),
        (string(format="date"), ["2024-02-29"], ["2024-02-30", "2023-02-29"]),
        (string(format="ipv4"), ["25.0.1.255"], ["25.01.1.1", "25.1.1.256"]),
        # what schemas say
        ({**DEFS, "type": "array", "items": {"$ref": "#/$defs/a~1b~0c"}}, [[1]], [[None]]),
        ({**DEFS, "$ref": "#/$defs/Page%5Bint%5D"}, [None], [1]),
        ({**DEFS, "$ref": "#/$defs/x/anyOf/0"}, [None], [1]),
        ({"type": "array", "items": [INTEGER, True], "additionalItems": TEXT}, [[1, 2], [1, 2, "a"]], [["a", 2]]),
        ({"type": "array", "minItems": 1, "maxItems": 2.0}, [[1], ["a", {}]], [[], [1, 1, 1]]),
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({**named(a=INTEGER), "required": ["a", "b"]}, [{"a": 1, "b": []}], [{"a": 1}]),
        ({**named(a=INTEGER, b=TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [1, {"a": ""}]),
        ({"type": "integer", "minimum": 0.5, "maximum": 2**64 - 1}, [1, 2**63 - 1], [0]),
        ({"maxLength": 2}, ["ab"], ["abc", 1]),
    ],
)  # fmt: skip
def test_a_schema_takes_what_it_says(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    grammar = compile_here("json_schema", json.dumps(schema), vocabulary())
    for value in right:
        assert takes(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in wrong:
        assert not takes(grammar, json.dumps(value, ensure_ascii=False)), value
    for text in (value for value in right if isinstance(value, str) and '"' in value):
        assert not takes(grammar, f'"{text}"'), "that is no JSON"


def test_no_name_beside_the_named_ones_spells_one_of_them() -> None:
    grammar = compile_here("json_schema", json.dumps({**named(ab=INTEGER), "additionalProperties": TEXT}), vocabulary())
    assert not takes(grammar, '{"ab": 1, "ab": "x"}')
    assert not takes(grammar, r'{"ab": 1, "\u0061b": "x"}')


@pytest.mark.parametrize("name", ["é", 'c"d', "a\\b"])
def test_names_that_xgrammar_cannot_compare_leave_the_answer_json(name: str) -> None:
    schema = {**named(**{name: INTEGER}), "additionalProperties": TEXT}
    grammar = compile_here("json_schema", json.dumps(schema), vocabulary())
    assert takes(grammar, json.dumps({name: 1, "x": "y"}, ensure_ascii=False))
    assert not takes(grammar, f'{{"{name[0]}"": "x"}}')


REPEATS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,2}", "{0,2}", "{2,}", "{130,140}", "+?"])
ATOMS = st.sampled_from(["a", "b", '"', r"\\", r"\n", ".", "[^a]", '[a"]', r"\w", r"\s", r"\x22", "(a|)", "(?:b?)"])


def expressions() -> st.SearchStrategy[str]:
    """That Python and ECMA-262 read alike, but for "$"."""

    def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        parts = st.lists(st.tuples(inner, REPEATS).map("".join), max_size=3).map("".join)
        ends = st.tuples(st.sampled_from(["", "", "^"]), parts, st.sampled_from(["", "", "$"])).map("".join)
        return st.lists(ends, min_size=1, max_size=3).map("|".join)

    return joined(st.one_of(ATOMS, joined(ATOMS).map("({})".format), joined(ATOMS).map("(?:{})".format)))


@given(expressions(), st.lists(st.text('ab"\\\n', max_size=6), min_size=10, max_size=10))
def test_expressions_take_what_they_match(pattern: str, texts: list[str]) -> None:
    try:
        expected = re.compile(pattern.replace("$", r"\Z"))
        json_pattern(pattern)
    except (re.error, ValueError):  # such as an anchor between other parts
        return
    grammar = compile_here("json_schema", json.dumps(string(pattern=pattern)), vocabulary())
    for text in texts:
        assert takes(grammar, json.dumps(text)) == bool(expected.search(text)), text


@pytest.mark.parametrize("pattern", [r"^[-.\w]+$", "[^]", r"^\u{1f600}\ud83d\ude00$", r"^\cJ\0\/\-$", "^(?<a>x){1,}?$"])
def test_ecma_s_own_ways_to_write_are_read(pattern: str) -> None:
    grammar = compile_here("json_schema", json.dumps(string(pattern=pattern)), vocabulary())
    assert [
        text
        for text in ("-a.", "\U0001f600" * 2, "\n\0/-", "xx")
        if takes(grammar, json.dumps(text, ensure_ascii=False))
    ]


@pytest.mark.parametrize(
    ("pattern", "error", "why"),
    [
        ("(?=a)", NotEnforcedError, "a lookahead"), ("(?<!a)b", NotEnforcedError, "a lookbehind"),
        (r"\bx", NotEnforcedError, r"'\\b'"), (r"(a)\1", NotEnforcedError, r"'\\1'"), (r"\p{L}", NotEnforcedError, "p"),
        ("a^b", NotEnforcedError, r"'\^' between"), ("(?i)a", NotEnforcedError, "modifier"),
        (r"\ud800", NotEnforcedError, "half"), ("(?>a)", NotEnforcedError, "modifier"),
        ("a(", PatternError, r"'\('"), ("a)", PatternError, r"'\)'"), ("[a", PatternError, r"'\['"),
        ("[b-a]", PatternError, "order"), ("a**", PatternError, "nothing to repeat"), ("a{3,2}", PatternError, "3,2"),
        ("a\\", PatternError, "ends with"), ("[]", PatternError, "no character"),
        ("(" * 99 + ")" * 99, PatternError, "64"),
        ("(" * 60 + "x{2,}" + "){2,}" * 60, PatternError, "too long"),
    ],
)  # fmt: skip
def test_an_expression_that_is_none_or_cannot_be_followed_says_why(
    pattern: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        json_pattern(pattern)


def test_an_expression_for_the_whole_answer_is_the_dialect_s() -> None:
    grammar = compile_here("regex", "^a.c|[[]b$", vocabulary())
    assert [text for text in ("abc", "a\nc", "[b", "abcd", "xabc") if takes(grammar, text)] == ["abc", "[b"]


def test_empty_alternatives_of_a_grammar_are_read() -> None:
    text = 'ws ::= | " " | "\\n" [ \\t]{0,20}  # "|" as in llama.cpp\nroot ::= "a" (| "|" | ) ws "b" |\nx ::= [|]'
    grammar = compile_here("ebnf", text, vocabulary())
    assert all(takes(grammar, one) for one in ("", "ab", "a b", "a|b", "a|\n\t\tb"))
    assert not takes(grammar, "a  b")


def test_dates_and_addresses_are_those_that_there_are() -> None:
    dates, ipv6, ipv4 = (re.compile(FORMATS[name]) for name in ("date", "ipv6", "ipv4"))
    assert all(dates.fullmatch(str(date(1896, 1, 1) + timedelta(day))) for day in range(0, 200 * 365, 29))
    wrong = ("2024-02-30", "2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-01", "2024-01-00")
    assert not any(map(dates.fullmatch, wrong))
    assert ipv4.fullmatch("255.0.10.199") and not any(map(ipv4.fullmatch, ("25.01.1.1", "256.1.1.1", "1.1.1")))
    draw = random.Random(0)
    for _ in range(5000):
        words = draw.choices(["0", "12ab", "fffff", "", "1.2.3.4"], [8, 8, 1, 3, 1], k=draw.randint(1, 9))
        try:
            is_right = bool(ipaddress.IPv6Address(text := ":".join(words)))
        except ValueError:
            is_right = False
        assert bool(ipv6.fullmatch(text)) == is_right, text


@pytest.mark.parametrize(
    ("kind", "text", "lead"),
    [
        ("json_schema", '{"maxLength": 1}', '"'),
        ("json_object", "", '{"'),
        ("regex", "[^a]*", ""),
        ("ebnf", "root ::= [^a]*", ""),
    ],
)
def test_bytes_that_are_no_utf8_are_never_allowed(kind: str, text: str, lead: str) -> None:
    words = vocabulary()
    of_byte = {one[0]: token for token, one in enumerate(words.info.decoded_vocab()) if len(one) == 1}
    grammar = compile_here(kind, text, words)
    for whole in (b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xe0\xa0\x80", b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf"):
        matcher = grammar.new_matcher(())
        matcher.accept([of_byte[byte] for byte in lead.encode() + whole])
    for broken in (b"\xed\xa0", b"\xe0\x9f", b"\xf0\x8f", b"\xf4\x90"):  # surrogates, too long, beyond Unicode
        matcher = grammar.new_matcher(())
        tokens = [of_byte[byte] for byte in lead.encode() + broken]
        matcher.accept(tokens[:-1])
        assert tokens[-1] not in allowed_in(matcher.fill(())[0])
        assert len(grammar.new_matcher(()).fill(tokens)) < len(tokens) + 1  # nor as a draft
