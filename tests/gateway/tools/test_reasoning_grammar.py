"""Reasoning is unconstrained before a grammar begins: a decode worker's masks, with markers of both kinds."""

import json
from pathlib import Path

import pytest

from decode_worker.grammar.bindings import compile_text
from decode_worker.grammar.compiler_process import Compile, Compiled, Refused, answer_call
from decode_worker.grammar.matcher import Grammar as CompiledGrammar
from decode_worker.grammar.matcher import Matcher
from decode_worker.grammar.tokenizer_file import read_vocabulary
from gateway.ring.generation import Grammar
from gateway.text.tokenizer import Tokenizer
from gateway.tools.formats import FORMATS
from gateway.tools.grammar import after_reasoning, call_grammar
from gateway.tools.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningStart
from gateway.tools.reasoning_reader import ReasoningReader
from gateway.tools.request import Tool, ToolUse
from tests.support.grammars import allowed_in
from tests.support.tiny_tokenizer import END, write_thinking

THINK = REASONING_FORMATS["think"]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CALL = '<tool_call>\n{"name": "now", "arguments": {"n": 1}}\n</tool_call>'
REQUIRED = call_grammar(ToolUse(FORMATS["hermes"], (Tool("now", None, SCHEMA),), True, None, False))
STRICT = call_grammar(ToolUse(FORMATS["hermes"], (Tool("now", None, SCHEMA, True),), False, None, True))
assert REQUIRED is not None
assert STRICT is not None
GRAMMARS = [
    (Grammar("json_schema", json.dumps(SCHEMA), "p"), '{"n": 1}', '{"m"'),
    (Grammar("json_object", "", "p"), '{"x": [1]}', "[1]"),
    (Grammar("regex", "yes|no", "p"), "yes", "maybe"),
    (Grammar("ebnf", 'root ::= "yes" | "no"', "p"), "no", "maybe"),
    (REQUIRED, CALL, "Hi"),
    (STRICT, f"So: {CALL}", '<tool_call>\n{"name": "now", "arguments": {"n": "'),
]
grammars = pytest.mark.parametrize(
    ("grammar", "good", "bad"), GRAMMARS, ids=["schema", "object", "regex", "ebnf", "required call", "strict call"]
)


class Worker:
    """One model's tokenizer for the gateway and for a decode worker."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        self.words = read_vocabulary(folder, self.tokenizer.vocab_size)

    def matcher(self, grammar: Grammar) -> Matcher:
        assert grammar.kind == "structural_tag"
        compiled = compile_text(grammar.kind, grammar.text, self.words.info)
        mask = self.words.text_mask(grammar.kind, grammar.text)
        return CompiledGrammar(compiled, self.words, mask).new_matcher((END,))

    def takes(self, grammar: Grammar, text: str) -> Matcher | None:
        """The state after the text if each token is allowed by the mask before it, else None."""
        state = self.matcher(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if token not in allowed_in(state.fill(())[0]):
                return None
            state.accept([token])
        return state


def is_end_allowed(state: Matcher | None) -> bool:
    return state is not None and END in allowed_in(state.fill(())[0])


@pytest.fixture(scope="module", params=[False, True], ids=["plain markers", "control markers"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(write_thinking(tmp_path_factory.mktemp("thinking"), has_control_markers=request.param))


@grammars
def test_a_grammar_begins_behind_reasoning_that_is_open(worker: Worker, grammar: Grammar, good: str, bad: str) -> None:
    grammar = after_reasoning(grammar, THINK, "inside")
    assert grammar.param in ("p", "tools")
    for before in ("Hm {[\n</\n</think>", "\n</think>\n\n", "</think>"):
        assert is_end_allowed(worker.takes(grammar, before + good))
        assert worker.takes(grammar, before + bad) is None
    reasoning = worker.takes(grammar, "So: yes")
    assert reasoning is not None
    assert not is_end_allowed(reasoning)  # the answer cannot end before it begins
    control = set(worker.words.control) - set(worker.tokenizer.encode("</think>", add_special_tokens=False))
    assert control.isdisjoint(set(allowed_in(reasoning.fill(())[0])) - {END})


@grammars
def test_a_grammar_begins_behind_reasoning_that_may_come(worker: Worker, grammar: Grammar, good: str, bad: str) -> None:
    grammar = after_reasoning(grammar, THINK, "possible")
    for before in ("", "<think>\nSo:\n</think>\n\n"):
        assert is_end_allowed(worker.takes(grammar, before + good))
        assert worker.takes(grammar, before + bad) is None
    assert worker.takes(grammar, "<think>\nSo: yes") is not None


@grammars
def test_a_grammar_is_the_whole_answer_where_reasoning_is_off(grammar: Grammar, good: str, bad: str) -> None:
    assert after_reasoning(grammar, THINK, "off") is grammar


@pytest.mark.parametrize("format", REASONING_FORMATS.values(), ids=lambda format: format.name)
def test_what_the_grammar_lets_through_is_what_the_reader_takes_out(worker: Worker, format: ReasoningFormat) -> None:
    grammar = after_reasoning(GRAMMARS[0][0], format, "possible")
    text = f'{format.begin}\nOne, perhaps.\n{format.end}\n\n{{"n": 1}}'
    assert is_end_allowed(worker.takes(grammar, text))
    assert ReasoningReader(format, is_inside=False).push(text) == ("One, perhaps.", '{"n": 1}')


@pytest.mark.parametrize("start", ["inside", "possible"])
def test_a_grammar_that_cannot_be_followed_is_refused_behind_reasoning_too(
    worker: Worker, start: ReasoningStart
) -> None:
    hopeless = Grammar("json_schema", '{"$ref": "#"}', "p")
    for grammar, expected in ((hopeless, Refused), (GRAMMARS[0][0], Compiled)):
        wrapped = after_reasoning(grammar, THINK, start)
        assert isinstance(answer_call(worker.words, Compile(wrapped.kind, wrapped.text), 10), expected)
