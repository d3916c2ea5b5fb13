"""Grammars of calls and behind reasoning: what a decode worker's masks allow, the readers take apart again."""

import ast
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from decode_worker.grammar.compiler_process import Compile, Compiled, answer_call
from decode_worker.grammar.matcher import LoadedGrammar, Matcher, load_grammar
from decode_worker.grammar.vocabulary import read_vocabulary
from demo.paths import TARGET_DIR
from gateway.router.engine_client import Grammar
from gateway.text.tokenizer import Tokenizer
from gateway.tools.grammar import after_reasoning, call_grammar, in_dialect
from gateway.tools.json_text import JsonText
from gateway.tools.parse import CallParser
from gateway.tools.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningReader, ReasoningStart
from gateway.tools.request import Tool, ToolUse
from runtime.fork import Refused
from runtime.peer_input import MAX_JSON_WHITESPACE
from tests.support.grammars import allowed_in, compile_here
from tests.support.texts import joined, summary
from tests.support.tiny_tokenizer import END, write_thinking
from wire.dialects import FORMATS, NAME, NUMBER, SPACE, Format

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
VALIDATORS = {tool.name: jsonschema.Draft202012Validator(tool.schema) for tool in TOOLS}
STRICT = tuple(replace(tool, is_strict=True) for tool in TOOLS)
WALKS = 12


class Worker:
    """One model's tokenizer for the gateway and for a decode worker."""

    def __init__(self, folder: Path, end: int) -> None:
        self.tokenizer = Tokenizer(folder)
        self.words = read_vocabulary(folder, self.tokenizer.vocab_size)
        self.end = end
        closing = (b'"', b"}", b"]", b'"}', b"\n", b"<", b")")
        self._closing = {id for id in range(self.words.size) if self.tokenizer.token_bytes(id) in closing} | {end}

    def load(self, grammar: Grammar) -> LoadedGrammar:
        assert grammar.kind == "structural_tag"
        return compile_here(grammar.kind, grammar.text, self.words)

    def matcher(self, grammar: Grammar | LoadedGrammar) -> Matcher:
        return (self.load(grammar) if isinstance(grammar, Grammar) else grammar).new_matcher((self.end,))

    def takes(self, grammar: Grammar, text: str) -> Matcher | None:
        """The state after the text if each token is allowed by the mask before it, else None."""
        state = self.matcher(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if token not in allowed_in(state.fill(())[0]):
                return None
            state.accept([token])
        return state

    def walk(
        self, grammar: Grammar | LoadedGrammar, rng: Random, starts: Sequence[str] = ("",), closer: str = ""
    ) -> str:
        """A text that the grammar allows, with one of `starts` first; prefers closing tokens, and `closer`."""
        closing = self.tokenizer.encode(closer, add_special_tokens=False)
        state, ids = self.matcher(grammar), self.tokenizer.encode(rng.choice(starts), add_special_tokens=False)
        state.accept(ids)
        while not state.is_over:
            assert len(ids) < 2000
            if closing and rng.random() < 0.2 and len(state.fill(closing)) > len(closing):
                ids += closing
                state.accept(closing)
                continue
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


@cache
def ended_by_tool() -> Worker:
    """The same with another stop token: harmony's messages end with <|end|>, after which others follow."""
    words = demo().words
    return Worker(TARGET_DIR, next(token for token, text in words.control.items() if text == "<|tool|>"))


def read(
    format: Format, text: str, is_trusted: bool = True, tools: Sequence[Tool] = TOOLS
) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls; the arguments fit their tools."""
    ids, schemas = (f"id{n}" for n in itertools.count()), {tool.name: tool.schema for tool in tools}
    parser = CallParser(format, schemas, lambda: next(ids), is_trusted=is_trusted, schemas=schemas)
    return summary(joined([event for char in text for event in parser.push(char)] + parser.flush()))


def check_calls(calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        VALIDATORS[name].validate(value)


def grammar_of(use: ToolUse, answer: Grammar | None = None) -> Grammar:
    grammar = call_grammar(use, answer)
    assert grammar is not None
    return grammar


def behind(
    grammar: Grammar | None, format: ReasoningFormat, start: ReasoningStart, dialect: str = "", **more: Any
) -> Grammar:
    found = after_reasoning(grammar, format, start, dialect, **more)
    assert found is not None
    return found


ENFORCED = {name: row for name, row in FORMATS.items() if row.is_enforced}
JSON_FORMATS = [  # the others: see below
    row for row in ENFORCED.values() if not (row.writing or row.is_single or row.answer_begin)
]
formats = pytest.mark.parametrize("format", JSON_FORMATS, ids=lambda format: format.name)


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
    assert is_parallel or counts == {1}


@formats
@pytest.mark.parametrize("is_parallel", [True, False])
def test_text_or_strict_calls(format: Format, is_parallel: bool) -> None:
    grammar, rng, found = grammar_of(ToolUse(format, STRICT, False, None, is_parallel)), Random(2), set()
    starts = ["", "Well, ", 'x {"name": "now"} '] + ['{"name"' if format.bare_opener else f"a {format.opener}"] * 3
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
        start = '{"name": "now"' if format.bare_opener else format.opener
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
    after_open, after_possible = (behind(grammar, THINK, start) for start in ("inside", "possible"))
    assert after_open.param == after_possible.param == grammar.param
    for whole, before in (
        *((after_open, text) for text in ("Hm {[\n</\n</think>", "\n</think>\n\n", "</think>")),
        *((after_possible, text) for text in ("", "<think>\nSo:\n</think>\n\n")),
    ):
        assert worker.may_end(worker.takes(whole, before + good))
        assert worker.takes(whole, before + bad) is None
    assert worker.takes(after_possible, "<think>\nSo: yes") is not None
    reasoning = worker.takes(after_open, "So: yes")
    assert reasoning is not None
    assert not worker.may_end(reasoning)  # the answer cannot end before it begins
    control = set(worker.words.control) - set(worker.tokenizer.encode("</think>", add_special_tokens=False))
    assert control.isdisjoint(set(allowed_in(reasoning.fill(())[0])) - {END})


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS.keys() - {"harmony"}))  # whose end is a stop token here
def test_what_the_grammar_lets_through_is_what_the_reader_takes_out(worker: Worker, name: str) -> None:
    format = REASONING_FORMATS[name]
    grammar = behind(ANSWERS[0][0], format, "possible")
    text = f'{format.begin}\nOne, perhaps.\n{format.end}\n\n{{"n": 1}}'
    assert worker.may_end(worker.takes(grammar, text))
    assert ReasoningReader(format, "possible").push(text) == ("One, perhaps.", '{"n": 1}')


@pytest.mark.parametrize("start", ["inside", "possible"])
def test_a_grammar_that_cannot_be_followed_is_refused_behind_reasoning_too(
    worker: Worker, start: ReasoningStart
) -> None:
    hopeless = Grammar("json_schema", '{"$ref": "#"}', "p")
    for grammar, expected in ((hopeless, Refused), (ANSWERS[0][0], Compiled)):
        wrapped = behind(grammar, THINK, start)
        assert isinstance(answer_call(worker.words, Compile(wrapped.kind, wrapped.text), 10), expected)


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("start", ["inside", "possible"])
@pytest.mark.parametrize("answer", [None, ANSWERS[2][0]], ids=["any text", "expression"])
def test_reasoning_ends_with_its_budget(
    worker: Worker, answer: Grammar | None, start: ReasoningStart, budget: int
) -> None:
    grammar = behind(answer, THINK, start, budget=budget)
    compiled = answer_call(worker.words, Compile(grammar.kind, grammar.text), 10)
    assert isinstance(compiled, Compiled)
    loaded = load_grammar(worker.words, compiled.grammar.decode(), grammar.kind, grammar.text)
    begin, end, long, yes = (
        worker.tokenizer.encode(text, add_special_tokens=False)
        for text in ("<think>", "</think>", "So many words to think about", "yes")
    )
    for thought in (long[:budget], long[: budget // 2]):
        state = loaded.new_matcher((END,))
        state.accept(begin if start == "possible" else [])
        assert len(state.fill(long)) == budget + 1  # of drafts, only so many are good
        state.accept(thought)
        texts = {worker.tokenizer.decode([token], with_control_tokens=True) for token in allowed_in(state.fill(())[0])}
        assert "</think>" in texts
        assert all("</think>".startswith(text) for text in texts) == (len(thought) == budget)
        state.accept([*end, *yes])
        assert worker.may_end(state)
    assert worker.takes(grammar, "<think>So</think>yes, <think>") is None  # no second thought has no bound
    assert after_reasoning(answer, THINK, "off", budget=budget) is answer


# -- in every dialect ------------------------------------------------------------------------------------------------

TRIP = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "seat": {"enum": ["first", 'a "b"']},
        "pets": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 4}, "is_cat": {"type": "boolean"}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "maxItems": 2,
        },
        "note": {"type": ["string", "null"], "maxLength": 3},
        "code": {"type": "string", "pattern": "^[A-Z<]{2}$"},
        "back": {"$ref": "#/$defs/day"},
        "meal": {"anyOf": [{"enum": ["rice", "corn"]}, {"type": "null"}]},
    },
    "required": ["code", "meal"],
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 30}},
}
TREE = {"type": "object", "properties": {"n": {"type": "integer"}, "more": {"$ref": "#"}}, "required": ["n"]}
CALLED = (*TOOLS[:3], Tool("trip", None, TRIP), Tool("tree", None, TREE), *TOOLS[3:])
dialects = pytest.mark.parametrize("dialect", ENFORCED)


def between(row: Format, text: str) -> list[tuple[str, str]]:
    """The calls' names, and what stands between the beginning and the end of each."""
    before = re.escape(row.before).replace(SPACE, " ?")
    listed = re.fullmatch(f"{before}(.*){re.escape(row.after)}", text, re.DOTALL)
    assert listed, text
    begin = re.escape(row.begin).replace(NAME, r"([\w-]+)").replace(re.escape(NUMBER), r"\d{1,3}")
    marks = list(re.finditer(begin, listed[1]))
    ends = [mark.start() - len(row.between) for mark in marks[1:]] + [len(listed[1])]
    found = [(mark[1], listed[1][mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]
    assert marks[0].start() == 0
    assert all(inner.endswith(row.end) for _, inner in found), text
    return [(name, inner[: len(inner) - len(row.end)]) for name, inner in found]


class Constants(ast.NodeTransformer):
    """JSON's words in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"f": node, "true": ast.Constant(True), "false": ast.Constant(False), "null": ast.Constant(None)}
        return words[node.id]


def arguments_of(row: Format, written: str, schema: Mapping[str, Any]) -> Any:
    """Read by other means than the service's, so that both may err alone."""
    match row.style:
        case "python":
            call = Constants().visit(ast.parse(f"f({written})", mode="eval").body)
            return {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        case "gemma":
            plain = re.sub(
                r'<\|"\|>(.*?)<\|"\|>|(\w+):',
                lambda found: f'"{found[2]}":' if found[2] else json.dumps(found[1]),
                written,
                flags=re.DOTALL,
            )
            return json.loads(plain)
        case "json":
            return json.loads(JsonText().push(written, is_last=True))
    member = {
        "qwen-xml": r"<parameter=(\w+)>\n(.*?)\n</parameter>\n",
        "minimax": r'<parameter name="(\w+)">(.*?)</parameter>\n',
        "glm": r"\n?<arg_key>(\w+)</arg_key>\n?<arg_value>(.*?)</arg_value>\n?",
    }[row.name]
    assert re.fullmatch(f"\n?({member})*", written, re.DOTALL), written
    texts = dict(re.findall(member, written, re.DOTALL))
    given = schema.get("properties", {})
    return {name: value_of(text, given[name]) for name, text in texts.items()}


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of a text in XML, by its schema's type."""
    if schema.get("type") == "string" or "enum" in schema:
        return text
    if schema.get("type") == ["string", "null"] or "anyOf" in schema:
        return None if text == "null" else text
    return json.loads(text)


CLOSERS = {"qwen-xml": "\n</parameter>\n", "minimax": "</parameter>\n", "glm": "</arg_value>", "gemma4": '<|"|>'}


@dialects
def test_required_calls_of_every_dialect_fit_their_schemas(dialect: str) -> None:
    row, rng = ENFORCED[dialect], Random(5)
    grammar = demo().load(grammar_of(ToolUse(FORMATS[dialect], CALLED, True, None, True)))
    schemas = {tool.name: tool.schema for tool in CALLED}
    for _ in range(12):  # of all dialects together, some 220 answers
        text = demo().walk(grammar, rng, closer=CLOSERS.get(row.name, ""))
        found = [(name, arguments_of(row, written, schemas[name])) for name, written in between(row, text)]
        for name, arguments in found:
            jsonschema.validate(arguments, schemas[name])
        text = text.replace(" <|constrain|>json", "")  # as reasoning.py brings headers of harmony into one form
        for is_trusted in (True, False):
            content, calls = read(FORMATS[dialect], text, is_trusted, CALLED)
            assert content == ""
            assert [(name, json.loads(arguments)) for name, arguments in calls] == found


def call_of(row: Format, name: str) -> str:
    """A call without arguments."""
    given = "{}" if row.style in ("json", "gemma") else ""
    return row.begin.replace(NAME, name).replace(NUMBER, "0") + given + row.end


@dialects
@pytest.mark.parametrize("is_required", [True, False])
def test_which_calls_every_dialect_allows(dialect: str, is_required: bool) -> None:
    row, no_argument = ENFORCED[dialect], {"type": "object", "additionalProperties": False}
    tools = tuple(Tool(name, None, no_argument, is_strict=True) for name in ("one", "two", "three"))
    one, two, three = (call_of(row, tool.name) for tool in tools)
    begin, end = row.before.replace(SPACE, ""), row.after

    def takes(text: str, is_parallel: bool = True, named: str | None = None, allowed: Any = None) -> bool:
        use = ToolUse(FORMATS[dialect], tools, is_required, named, is_parallel, allowed=allowed)
        return demo().may_end(demo().takes(grammar_of(use), f"{begin}{text}{end}"))

    both = f"{one}{row.between}{two}"
    assert takes(one)
    assert takes(one, is_parallel=False)
    assert takes(both) == (not row.is_single)
    assert not takes(both, is_parallel=False)
    assert takes(two, allowed=frozenset(("one", "two")))
    assert not takes(three, allowed=frozenset(("one", "two")))
    assert not is_required or (takes(two, named="two") and not takes(one, named="two"))


THOUGHTS = {
    "gemma4": REASONING_FORMATS["gemma4"],
    "mistral-args": REASONING_FORMATS["mistral"],
    "cohere": REASONING_FORMATS["cohere"],
    "harmony": REASONING_FORMATS["harmony"],
}


@dialects
def test_a_form_and_a_call_behind_a_thought_in_every_dialect(dialect: str) -> None:
    worker, row, thought = ended_by_tool(), ENFORCED[dialect], THOUGHTS.get(dialect, THINK)
    before = f"{thought.begin}Hm{thought.end}{row.after_thought}"
    shown = f'{row.answer_begin}{{"n": 1}}'
    tools = (Tool("now", None, {"type": "object", "additionalProperties": False}),)
    call = f"{row.before.replace(SPACE, '')}{call_of(row, 'now')}{row.after}"
    use = ToolUse(FORMATS[dialect], tools, False, None, True)
    form = ANSWERS[0][0]
    for grammar, taken in (
        (in_dialect(form, dialect), [shown]),
        (grammar_of(use, form), [shown, call]),
        (grammar_of(replace(use, is_required=True)), [call]),
        (call_grammar(use, None, thought), [call, f"{row.answer_begin}Hi"]),
        (None, [f"{row.answer_begin}Hi"]),
    ):
        whole = behind(grammar, thought, "possible", dialect, budget=9)
        for text in (shown, call, f"{row.answer_begin}Hi", "<|END_ACTION|>{"):
            for said in (before + text, text):
                is_taken = worker.may_end(worker.takes(whole, said))
                assert is_taken or text not in taken, said
                assert not is_taken or text in taken or grammar is None or grammar.param != "p", said
    preamble = f"{row.preamble_begin}I look.<|end|>{row.after_thought}{call}"
    auto = behind(call_grammar(use, None, thought), thought, "possible", dialect, budget=9)
    assert not row.preamble_begin or worker.may_end(worker.takes(auto, before + preamble))
    assert not row.controls or worker.takes(auto, f"{row.answer_begin}Hi <|channel|>") is None


def test_control_tokens_within_a_budget_are_those_that_answers_may_show(worker: Worker) -> None:
    grammar = behind(None, THINK, "inside", budget=4, controls=["<|tool|>"])
    text = worker.takes(grammar, "So</think>\n")
    assert text is not None
    shown = {worker.words.control[token] for token in allowed_in(text.fill(())[0]) if token in worker.words.control}
    assert shown - {"<think>", "</think>"} == {"<|tool|>", "<|end|>"}


PLAIN_TEXTS: Sequence[dict[str, Any]] = (
    {"type": "string"},
    {"type": "string", "format": "password"},
    {"$ref": "#/$defs/S"},
    {"allOf": [{"type": "string"}]},
    {"anyOf": [{"$ref": "#/$defs/S"}, {"type": "null"}]},
)


@pytest.mark.parametrize("schema", PLAIN_TEXTS, ids=str)
@pytest.mark.parametrize("dialect", ["qwen-xml", "glm", "minimax"])
def test_texts_in_xml_have_no_quotes_however_the_schema_says_text(dialect: str, schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"S": {"type": "string"}}}
    tools, row = (Tool("f", None, parameters),), ENFORCED[dialect]
    grammar = grammar_of(ToolUse(FORMATS[dialect], tools, True, None, True))
    arguments = {
        "qwen-xml": "<parameter=x>\na \\d\n</parameter>\n",
        "minimax": '<parameter name="x">a \\d</parameter>\n',
        "glm": "<arg_key>x</arg_key>\n<arg_value>a \\d</arg_value>\n",
    }
    text = row.before.replace(SPACE, "") + row.begin.replace(NAME, "f") + arguments[dialect] + row.end
    assert demo().takes(grammar, text) is not None, text
    ((_, found),) = read(FORMATS[dialect], text + row.after, True, tools)[1]
    assert json.loads(found) == {"x": "a \\d"}


def test_arguments_that_a_dialect_cannot_write_are_refused_by_name() -> None:
    for name, schema, why in (
        ("gemma4", {"properties": {"a": {"properties": {"b c": {}}}}}, "the argument's name 'b c'"),
        ("lfm2", {"properties": {"a-b": {}}}, "the argument's name 'a-b'"),
        ("qwen-xml", {"properties": {"a": {"const": "<p>"}}}, "the value '<p>'"),
        ("glm", {"properties": {"a": {"type": "string", "pattern": "a<b"}}}, "the expression 'a<b' needs"),
        ("minimax", {"patternProperties": {"^a": {}}}, "not in 'properties'"),
    ):
        tools = (Tool("f", None, {"type": "object", **schema}, param="p", schema_param="p.parameters"),)
        grammar = grammar_of(ToolUse(FORMATS[name], tools, True, None, True))
        refused = answer_call(demo().words, Compile(grammar.kind, grammar.text), 10)
        assert isinstance(refused, Refused)
        assert why in refused.message
        assert refused.param == "p.parameters"
