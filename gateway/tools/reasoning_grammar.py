"""Grammars that begin after the reasoning, as xgrammar's structural tags. Pure."""

from typing import Any

import msgspec

from gateway.ring.generation import Grammar
from gateway.tools.grammar import answer_node
from gateway.tools.reasoning import ReasoningFormat, ReasoningStart

_Node = dict[str, Any]
# Models are trained to write up to two newlines after the end marker; without a limit they may never stop writing them.
_LAYOUT: _Node = {"type": "regex", "pattern": r"\n{0,2}"}


def after_reasoning(grammar: Grammar, format: ReasoningFormat, start: ReasoningStart) -> Grammar:
    """The grammar of a whole answer: free reasoning up to the end marker, then `grammar`.

    Reasoning is required if `start` is inside, optional if it is possible. The grammar's text has the markers, so masks
    allow them even if they are control tokens.
    """
    if start == "off":
        return grammar
    begin = "" if start == "inside" else format.begin
    reasoning: _Node = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": format.end}
    before = _sequence(reasoning, _LAYOUT)
    if start == "possible":
        before = {"type": "optional", "content": before}
    node = {"type": "structural_tag", "format": _sequence(before, answer_node(grammar))}
    return Grammar("structural_tag", msgspec.json.encode(node).decode(), grammar.param)


def _sequence(*elements: _Node) -> _Node:
    return {"type": "sequence", "elements": list(elements)}
