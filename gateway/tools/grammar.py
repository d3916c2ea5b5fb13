"""Grammars of answers that call functions, in the format that `parse.py` reads, and of answers behind reasoning.

Pure. Writes xgrammar's structural tags (0.2.8).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.router.engine_client import Grammar
from gateway.tools.reasoning import ReasoningFormat, ReasoningStart
from gateway.tools.request import ToolUse
from runtime.peer_input import MAX_JSON_WHITESPACE

_Node = dict[str, Any]
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
# Models are trained to write up to two newlines after the end marker; without a limit they may never stop writing them.
_LAYOUT: _Node = {"type": "regex", "pattern": r"\n{0,2}"}


def call_grammar(use: ToolUse, answer: Grammar | None = None) -> Grammar | None:
    """What the whole answer must match; None if it is free. `answer`: what it must match unless it calls.

    Arguments fit a tool's schema when a call is required, or the tool is strict; otherwise they are any object.
    """
    form = use.format
    tags = _tags(use)
    one_or_more: _Node = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not use.is_parallel,
    }
    calls = one_or_more  # and nothing else
    if form.form == "array":
        space = {"type": "optional", "content": {"type": "const_string", "value": " "}}
        calls = _tag(form.opener, _sequence(space, {"type": "const_string", "value": "["}, one_or_more), "]")
        tags = [calls]
    if use.is_required:
        return _grammar(calls)
    if answer is not None:
        return _grammar({"type": "or", "elements": [calls, _answer_node(answer)]}, answer.param)
    if use.is_parallel and not any(tool.is_strict for tool in use.tools):
        return None
    if form.is_bare:  # any text; without an opener the first character must show that it is a call
        text = {"type": "any_text", "excludes": [form.opener]}
        prose = _sequence({"type": "regex", "pattern": r"[^{<\s]"}, text)
        return _grammar({"type": "or", "elements": [calls, {"type": "optional", "content": prose}]})
    in_text = {
        "type": "triggered_tags",
        "triggers": [form.opener],
        "tags": tags,
        "stop_after_first": form.form == "array" or not use.is_parallel,
    }
    return _grammar(in_text)


def after_reasoning(grammar: Grammar, format: ReasoningFormat, start: ReasoningStart) -> Grammar:
    """The grammar of a whole answer: free reasoning up to the end marker, then `grammar`.

    Reasoning is required if `start` is inside, optional if it is possible. The grammar's text has the markers, so masks
    allow them even if they are control tokens.
    """
    if start == "off":
        return grammar
    begin = "" if start == "inside" else format.begin
    before = _sequence(_tag(begin, {"type": "any_text"}, format.end), _LAYOUT)
    if start == "possible":
        before = {"type": "optional", "content": before}
    return _grammar(_sequence(before, _answer_node(grammar)), grammar.param)


def _grammar(node: _Node, param: str = "tools") -> Grammar:
    text = msgspec.json.encode({"type": "structural_tag", "format": node}).decode()
    return Grammar("structural_tag", text, param)


def _tags(use: ToolUse) -> list[_Node]:
    """One call of each tool that may be called."""
    tags, format = [], use.format
    for tool in use.callable_tools:
        if format.form == "named":
            begin, end = f"{format.opener}{tool.name}{format.args_marker}", ""
        else:
            begin, end = f'{{"name": "{tool.name}", "{format.arguments_key}": ', "}"
            if not (format.form == "array" or format.is_bare):
                begin, end = f"{format.opener}{format.layout}{begin}", f"{end}{format.layout}{format.closer}"
        is_exact = use.is_required or tool.is_strict
        tags.append(_tag(begin, _json(tool.schema if is_exact else _ANY_OBJECT, tool.schema_param), end))
    return tags


def _answer_node(answer: Grammar) -> _Node:
    """A grammar as a part of a structural tag."""
    match answer.kind:
        case "json_object":
            return _json(_ANY_OBJECT, answer.param)
        case "json_schema":
            return _json(msgspec.json.decode(answer.text), answer.param)
        case "regex":
            return {"type": "regex", "pattern": answer.text, "param": answer.param}
        case "ebnf":
            return {"type": "grammar", "grammar": answer.text, "param": answer.param}
        case "structural_tag":
            node: _Node = msgspec.json.decode(answer.text)["format"]
            return node


def _json(schema: Mapping[str, Any], param: str) -> _Node:
    """`param`: the client's field; read by the decode worker when it refuses the schema, and ignored by xgrammar."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_JSON_WHITESPACE, "param": param}


def _sequence(*elements: _Node) -> _Node:
    return {"type": "sequence", "elements": list(elements)}


def _tag(begin: str, content: _Node, end: str) -> _Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
