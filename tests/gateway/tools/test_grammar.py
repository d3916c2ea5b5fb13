"""Grammars of calls and behind reasoning: what a decode worker's masks allow, the readers take apart again."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import jsonschema
import pytest

from decode_worker.grammar.compiler_process import Compile, Compiled, answer_call
from decode_worker.grammar.matcher import Matcher
from decode_worker.grammar.vocabulary import read_vocabulary
from demo.paths import TARGET_DIR
from gateway.router.engine_client import Grammar
from gateway.text.tokenizer import Tokenizer
from gateway.tools.formats import ENFORCED, FORMATS, Format
from gateway.tools.grammar import after_reasoning, call_grammar
from gateway.tools.json_text import JsonText
from gateway.tools.parse import CallParser
from gateway.tools.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningReader, ReasoningStart
from gateway.tools.request import Tool, ToolUse
from runtime.child import Refused
from runtime.peer_input import MAX_JSON_WHITESPACE
from tests.support.grammars import allowed_in, compile_here
from tests.support.texts import joined, summary
from tests.support.tiny_tokenizer import END, write_thinking

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
    Tool("any", None, {"anyOf": [{"properties": {}}, {"const": {}}]}),
    Tool(
        "say",
        None,
        {"properties": {"said": {"type": "string", "pattern": '^say "[a-z]{1,5}"\n?$'}}, "required": ["said"]},
    ),
)
STRICT = tuple(replace(tool, is_strict=True) for tool in TOOLS)
WALKS = 12


class Worker:
    """One model's tokenizer for the gateway and for a decode worker."""

    def __init__(self, folder: Path, end: int) -> None:
        self.tokenizer = Tokenizer(folder)
        self.words = read_vocabulary(folder, self.tokenizer.vocab_size)
        self.end = end
        closing = (b'"', b"}", b"]", b'"}')
        self._closing = {id for id in range(self.words.size) if self.tokenizer.token_bytes(id) in closing} | {end}

    def matcher(self, grammar: Grammar) -> Matcher:
        assert grammar.kind == "structural_tag"
        return compile_here(grammar.kind, grammar.text, self.words).new_matcher((self.end,))

    def takes(self, grammar: Grammar, text: str) -> Matcher | None:
        """The state after the text if each token is allowed by the mask before it, else None."""
        state = self.matcher(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if token not in allowed_in(state.fill(())[0]):
                return None
            state.accept([token])
        return state

    def walk(self, grammar: Grammar, rng: Random, starts: Sequence[str] = ("",)) -> str:
        """A text that the grammar allows, with one of `starts` first; prefers closing tokens."""
        state, ids = self.matcher(grammar), self.tokenizer.encode(rng.choice(starts), add_special_tokens=False)
        state.accept(ids)
        while not state.is_over:
            assert len(ids) < 2000
            allowed = set(allowed_in(state.fill(())[0]))
            is_closing = bool(allowed & self._closing) and rng.random() < 0.35 + len(ids) / 400
            token = rng.choice(sorted(allowed & self._closing if is_closing else allowed))
            if token == self.end:
                break
            ids.append(token)
            state.accept([token])
        return self.tokenizer.decode(ids)

    def may_end(self, state: Matcher | None) -> bool:
        return state is not None and self.end in allowed_in(state.fill(())[0])


@cache
def demo() -> Worker:
    return Worker(TARGET_DIR, 2)


def read(format: Format, text: str, is_trusted: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls; the arguments fit their tools."""
    ids = (f"id{n}" for n in itertools.count())
    parser = CallParser(format, [tool.name for tool in TOOLS], lambda: next(ids), is_trusted=is_trusted)
    return summary(joined([event for char in text for event in parser.push(char)] + parser.flush()))


def check_calls(calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        jsonschema.validate(value, {tool.name: tool.schema for tool in TOOLS}[name])


def grammar_of(use: ToolUse, answer: Grammar | None = None) -> Grammar:
    grammar = call_grammar(use, answer)
    assert grammar is not None
    return grammar


formats = pytest.mark.parametrize(
    "format", [FORMATS[name] for name in sorted(ENFORCED)], ids=lambda format: format.name
)


@formats
@pytest.mark.parametrize("named", [None, "get_weather"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls(format: Format, named: str | None, is_parallel: bool) -> None:
    grammar, rng, counts = grammar_of(ToolUse(format, TOOLS, True, named, is_parallel)), Random(1), set()
    for _ in range(WALKS):
        content, calls = read(format, demo().walk(grammar, rng))
        assert content == ""
        assert calls
        assert named is None or {name for name, _ in calls} == {named}
        check_calls(calls)
        counts.add(len(calls))
    assert (counts == {1}) != is_parallel


@formats
@pytest.mark.parametrize("is_parallel", [True, False])
def test_text_or_strict_calls(format: Format, is_parallel: bool) -> None:
    grammar, rng, found = grammar_of(ToolUse(format, STRICT, False, None, is_parallel)), Random(2), set()
    starts = ["", "Well, ", 'x {"name": "now"} '] + ['{"name"' if format.is_bare else f"a {format.opener}"] * 3
    for _ in range(2 * WALKS):
        content, calls = read(format, demo().walk(grammar, rng, starts), is_trusted=False)
        assert is_parallel or len(calls) <= 1
        check_calls(calls)
        found.add((bool(content), bool(calls)))
    assert {has_calls for _, has_calls in found} == {True, False}
    assert {has_content for has_content, _ in found} >= {True}


@formats
def test_a_call_of_a_tool_that_is_not_strict_is_any_object(format: Format) -> None:
    assert call_grammar(ToolUse(format, TOOLS, False, None, True)) is None
    grammar, rng = grammar_of(ToolUse(format, TOOLS, False, None, False)), Random(3)
    for _ in range(WALKS):
        start = '{"name": "now"' if format.is_bare else format.opener
        (_, calls) = read(format, demo().walk(grammar, rng, [start]), is_trusted=False)
        assert len(calls) == 1
        assert isinstance(json.loads(calls[0][1]), dict)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ANSWERS = [  # grammar, what it takes and what it does not
    (Grammar("json_schema", json.dumps(SCHEMA), "p"), '{"n": 1}', '{"m"'),
    (Grammar("json_object", "", "p"), '{"x": [1]}', "[1]"),
    (Grammar("regex", "yes|no", "p"), "yes", "maybe"),
    (Grammar("ebnf", 'root ::= "yes" | "no"', "p"), "no", "maybe"),
]


@formats
@pytest.mark.parametrize("answer", [answer for answer, *_ in ANSWERS], ids=lambda answer: answer.kind)
def test_calls_or_an_answer_in_a_form(format: Format, answer: Grammar) -> None:
    grammar, rng = grammar_of(ToolUse(format, STRICT, False, None, True), answer), Random(4)
    is_json = answer.kind.startswith("json")
    for _ in range(WALKS):
        text = demo().walk(grammar, rng)
        content, calls = read(format, text, is_trusted=False)
        check_calls(calls)
        assert content == ("" if calls else text)
        assert not content or is_json or content in ("yes", "no")
        assert not content or not is_json or isinstance(json.loads(JsonText().push(content, is_last=True)), dict)
    if is_json:  # it is not blank without end
        name = "n" if answer.kind == "json_schema" else ""
        assert demo().takes(grammar, f'{{{" " * MAX_JSON_WHITESPACE}"{name}')
        assert not demo().takes(grammar, f'{{{" " * (MAX_JSON_WHITESPACE + 1)}"{name}')


# -- behind reasoning ------------------------------------------------------------------------------------------------

THINK = REASONING_FORMATS["think"]
NOW = (Tool("now", None, SCHEMA),)
CALL = '<tool_call>\n{"name": "now", "arguments": {"n": 1}}\n</tool_call>'
GRAMMARS = [
    *ANSWERS,
    (grammar_of(ToolUse(FORMATS["hermes"], NOW, True, None, False)), CALL, "Hi"),
    (
        grammar_of(ToolUse(FORMATS["hermes"], (replace(NOW[0], is_strict=True),), False, None, True)),
        f"So: {CALL}",
        '<tool_call>\n{"name": "now", "arguments": {"n": "',
    ),
]
grammars = pytest.mark.parametrize(
    ("grammar", "good", "bad"), GRAMMARS, ids=["schema", "object", "regex", "ebnf", "required call", "strict call"]
)


@pytest.fixture(scope="module", params=[False, True], ids=["plain markers", "control markers"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(write_thinking(tmp_path_factory.mktemp("thinking"), has_control_markers=request.param), END)


@grammars
def test_a_grammar_begins_behind_reasoning(worker: Worker, grammar: Grammar, good: str, bad: str) -> None:
    assert after_reasoning(grammar, THINK, "off") is grammar
    after_open, after_possible = (after_reasoning(grammar, THINK, start) for start in ("inside", "possible"))
    assert after_open.param == after_possible.param == grammar.param
    for behind, before in (
        *((after_open, text) for text in ("Hm {[\n</\n</think>", "\n</think>\n\n", "</think>")),
        *((after_possible, text) for text in ("", "<think>\nSo:\n</think>\n\n")),
    ):
        assert worker.may_end(worker.takes(behind, before + good))
        assert worker.takes(behind, before + bad) is None
    assert worker.takes(after_possible, "<think>\nSo: yes") is not None
    reasoning = worker.takes(after_open, "So: yes")
    assert reasoning is not None
    assert not worker.may_end(reasoning)  # the answer cannot end before it begins
    control = set(worker.words.control) - set(worker.tokenizer.encode("</think>", add_special_tokens=False))
    assert control.isdisjoint(set(allowed_in(reasoning.fill(())[0])) - {END})


@pytest.mark.parametrize(
    "format", [one for one in REASONING_FORMATS.values() if not one.has_channels], ids=lambda format: format.name
)
def test_what_the_grammar_lets_through_is_what_the_reader_takes_out(worker: Worker, format: ReasoningFormat) -> None:
    grammar = after_reasoning(ANSWERS[0][0], format, "possible")
    text = f'{format.begin}\nOne, perhaps.\n{format.end}\n\n{{"n": 1}}'
    assert worker.may_end(worker.takes(grammar, text))
    assert ReasoningReader(format, "possible").push(text) == ("One, perhaps.", '{"n": 1}')


@pytest.mark.parametrize("start", ["inside", "possible"])
def test_a_grammar_that_cannot_be_followed_is_refused_behind_reasoning_too(
    worker: Worker, start: ReasoningStart
) -> None:
    hopeless = Grammar("json_schema", '{"$ref": "#"}', "p")
    for grammar, expected in ((hopeless, Refused), (ANSWERS[0][0], Compiled)):
        wrapped = after_reasoning(grammar, THINK, start)
        assert isinstance(answer_call(worker.words, Compile(wrapped.kind, wrapped.text), 10), expected)
