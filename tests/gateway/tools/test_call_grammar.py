"""The parsers read all that the grammars allow: random walks over their masks, with the demo's tokenizer."""

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from gateway.router.engine_client import Grammar
from gateway.text.tokenizer import Tokenizer
from gateway.tools.formats import FORMATS, Format
from gateway.tools.grammar import call_grammar
from gateway.tools.json_text import JsonText
from gateway.tools.parse import CallParser
from gateway.tools.request import Tool, ToolUse
from runtime.peer_input import MAX_JSON_WHITESPACE
from tests.support.texts import joined, summary

xgrammar = pytest.importorskip("xgrammar")
DEMO = Path(__file__).resolve().parents[3] / "demo" / "target"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 30}},
}
TOOLS = (
    Tool("get_weather", "Get the weather.", WEATHER),
    Tool("now"),
    Tool("flag", None, {"type": "object", "properties": {"on": {"type": "boolean"}}}),
)
STRICT = tuple(Tool(tool.name, tool.description, tool.parameters, True) for tool in TOOLS)
WALKS = 12
END = 2  # the demo's end token


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@cache
def compiler() -> Any:
    size = tokenizer().vocab_size
    texts = [tokenizer()._backend.id_to_token(index) or "" for index in range(size)]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


@cache
def closing_tokens() -> frozenset[int]:
    closing = (b'"', b"}", b"]", b'"}')
    return frozenset(token for token in range(tokenizer().vocab_size) if tokenizer().raw_bytes(token) in closing) | {
        END
    }


@cache
def control_tokens() -> frozenset[int]:
    return frozenset(filter(tokenizer().is_silent, range(tokenizer().vocab_size))) - {END}


def matcher(grammar: Grammar) -> Any:
    assert grammar.kind == "structural_tag"
    return xgrammar.GrammarMatcher(compiler().compile_structural_tag(grammar.text))


def walk(grammar: Grammar, rng: Random, starts: Sequence[str] = ("",)) -> str:
    """A text that the grammar allows, with one of `starts` first; prefers closing tokens."""
    state, mask = matcher(grammar), xgrammar.allocate_token_bitmask(1, tokenizer().vocab_size)
    ids = tokenizer().encode(rng.choice(starts), add_special_tokens=False)
    assert all(state.accept_token(token) for token in ids)
    while not state.is_terminated():
        assert len(ids) < 2000
        state.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        allowed = frozenset(np.flatnonzero(bits).tolist()) - control_tokens()
        closing = allowed & closing_tokens()
        is_closing = bool(closing) and rng.random() < 0.35 + len(ids) / 400
        ids.append(rng.choice(sorted(closing if is_closing else allowed)))
        assert state.accept_token(ids[-1])
    return tokenizer().decode(ids)


def read(format: Format, text: str, is_trusted: bool = True) -> tuple[str, list[tuple[str, str]]]:
    ids = (f"id{n}" for n in itertools.count())
    parser = CallParser(format, [tool.name for tool in TOOLS], lambda: next(ids), is_trusted=is_trusted)
    return summary(joined([event for char in text for event in parser.push(char)] + parser.flush()))


def check_calls(calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        schema = {tool.name: tool.schema for tool in TOOLS}[name]
        jsonschema.validate(json.loads(arguments), schema)


formats = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)


@formats
@pytest.mark.parametrize("named", [None, "get_weather"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls(format: Format, named: str | None, is_parallel: bool) -> None:
    use = ToolUse(format, TOOLS, True, named, is_parallel)
    grammar, rng = call_grammar(use), Random(1)
    assert grammar is not None
    counts = set()
    for _ in range(WALKS):
        content, calls = read(format, walk(grammar, rng))
        assert content == ""
        assert calls
        assert named is None or {name for name, _ in calls} == {named}
        check_calls(calls)
        counts.add(len(calls))
    assert (counts == {1}) != is_parallel


@formats
@pytest.mark.parametrize("parameters", [{}, {"title": "t"}, {"anyOf": [{"properties": {}}, {"const": {}}]}])
def test_a_required_call_whose_parameters_tell_no_type(format: Format, parameters: dict[str, Any]) -> None:
    grammar, rng = call_grammar(ToolUse(format, (Tool("now", None, parameters),), True, None, False)), Random(5)
    assert grammar is not None
    for _ in range(WALKS):
        content, calls = read(format, walk(grammar, rng))
        assert (content, [name for name, _ in calls]) == ("", ["now"])
        assert isinstance(json.loads(calls[0][1]), dict)


@formats
@pytest.mark.parametrize("is_parallel", [True, False])
def test_text_or_strict_calls(format: Format, is_parallel: bool) -> None:
    grammar, rng = call_grammar(ToolUse(format, STRICT, False, None, is_parallel)), Random(2)
    assert grammar is not None
    starts = ["", "Well, ", 'x {"name": "now"} '] + ['{"name"' if format.is_bare else f"a {format.opener}"] * 3
    found = []
    for _ in range(2 * WALKS):
        content, calls = read(format, walk(grammar, rng, starts), is_trusted=False)
        assert is_parallel or len(calls) <= 1
        check_calls(calls)
        found.append((bool(content), bool(calls)))
    assert {has_calls for _, has_calls in found} == {True, False}
    assert {has_content for has_content, _ in found} >= {True}


@formats
def test_a_call_of_a_tool_that_is_not_strict_is_any_object(format: Format) -> None:
    assert call_grammar(ToolUse(format, TOOLS, False, None, True)) is None
    grammar, rng = call_grammar(ToolUse(format, TOOLS, False, None, False)), Random(3)
    assert grammar is not None
    start = '{"name": "now"' if format.is_bare else format.opener
    for _ in range(WALKS):
        (_, calls) = read(format, walk(grammar, rng, [start]), is_trusted=False)
        assert len(calls) == 1
        assert isinstance(json.loads(calls[0][1]), dict)


ANSWERS = [
    Grammar("json_object", "", "response_format"),
    Grammar("json_schema", json.dumps(WEATHER), "response_format"),
    Grammar("regex", "yes|no", "structured_outputs"),
    Grammar("ebnf", 'root ::= "yes" | "no"', "structured_outputs"),
]


@formats
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind)
def test_calls_or_an_answer_in_a_form(format: Format, answer: Grammar) -> None:
    grammar, rng = call_grammar(ToolUse(format, STRICT, False, None, True), answer), Random(4)
    assert grammar is not None
    for _ in range(WALKS):
        text = walk(grammar, rng)
        content, calls = read(format, text, is_trusted=False)
        check_calls(calls)
        assert content == ("" if calls else text)
        if content and answer.kind in ("regex", "ebnf"):
            assert content in ("yes", "no")
        elif content:
            assert isinstance(json.loads(JsonText().push(content)), dict)


@formats
@pytest.mark.parametrize("answer", ANSWERS[:2], ids=lambda answer: answer.kind)
def test_an_answer_in_a_form_is_not_blank_without_end(format: Format, answer: Grammar) -> None:
    grammar = call_grammar(ToolUse(format, STRICT, False, None, True), answer)
    assert grammar is not None
    walk(grammar, Random(6), [f'{{{" " * MAX_JSON_WHITESPACE}"'])
    with pytest.raises(AssertionError):
        walk(grammar, Random(6), [f'{{{" " * (MAX_JSON_WHITESPACE + 1)}"'])


def test_many_tools_compile_in_time() -> None:
    tools = tuple(Tool(f"tool_{n}", "It does something.", WEATHER) for n in range(128))
    grammar = call_grammar(ToolUse(FORMATS["hermes"], tools, True, None, True))
    assert grammar is not None
    assert matcher(grammar).accept_string('<tool_call>\n{"name": "tool_99", "arguments": {"city": "x", "days": []}}')
