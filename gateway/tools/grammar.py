"""Grammars of answers that call functions, in the model's own dialect, and of answers behind reasoning.

Pure. Writes xgrammar's structural tags (0.2.8). Those that xgrammar builds itself differ from models' chat templates or
are missing for most dialects, and do not say which field of the client's a schema is.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.router.engine_client import Grammar
from gateway.tools.reasoning import ReasoningFormat, ReasoningStart
from gateway.tools.request import Tool, ToolUse
from runtime.peer_input import MAX_JSON_WHITESPACE
from wire.dialects import FORMATS, NAME, NUMBER, PLAIN, SPACE, Format

_Node = dict[str, Any]
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
# Models are trained to write up to two newlines after the end marker; without a limit they may never stop writing them.
_LAYOUT: _Node = {"type": "regex", "pattern": r"\n{0,2}"}
_PLACES: Mapping[str, _Node] = {
    SPACE: {"type": "optional", "content": {"type": "const_string", "value": " "}},
    NUMBER: {"type": "regex", "pattern": "[0-9]{1,3}"},
}
_MAX_BUDGET = 2**31 - 1  # of xgrammar


def call_grammar(
    use: ToolUse, answer: Grammar | None = None, budgeted: ReasoningFormat | None = None
) -> Grammar | None:
    """The grammar of a whole answer; None if it is free. `answer`: its grammar unless it calls.

    Arguments fit a tool's schema when a call is required, or the tool is strict; otherwise they are any object.
    `budgeted`: reasoning is bounded, so text never holds its markers, and has a grammar, too.
    """
    row = use.format
    if not row.is_enforced:
        return answer
    tags = [_call(row, tool, use.is_required or tool.is_strict) for tool in use.callable_tools]
    calls: _Node = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": row.between,
        "at_least_one": True,
        "stop_after_first": row.is_single or not use.is_parallel,
    }
    if row.before:
        begin, *before = _nodes(row.before)
        calls = _tag(begin["value"], _sequence(*before, calls), row.after)
        tags = [calls]
    if use.is_required:
        return _grammar(calls)
    if answer is not None:
        return _grammar(_or(calls, _content(row, _answer_node(answer))), answer.param)
    if not budgeted and use.is_parallel and use.allowed is None and not any(tool.is_strict for tool in use.tools):
        return None
    text = _text(row, budgeted)
    if row.preamble_begin:
        preamble = _sequence(
            _tag(row.preamble_begin, _text(row, budgeted, "<|end|>"), "<|end|>"), _const(row.after_thought)
        )
        return _grammar(_or(_content(row, text), _sequence(_optional(preamble), calls)))
    if row.bare_opener:  # any text; without an opener the first character must show that it is a call
        text["excludes"] += [row.opener]
        return _grammar(_or(calls, _optional(_sequence({"type": "regex", "pattern": r"[^{<\s]"}, text))))
    in_text = {
        "type": "triggered_tags",
        "triggers": [row.opener],
        "tags": tags,
        "stop_after_first": bool(row.before) or not use.is_parallel,
        "excludes": text["excludes"],
    }
    return _grammar(in_text)


def after_reasoning(
    grammar: Grammar | None,
    format: ReasoningFormat,
    start: ReasoningStart,
    dialect: str = "",
    budget: int | None = None,
    controls: Collection[str] = (),
) -> Grammar | None:
    """The grammar of a whole answer: reasoning of at most `budget` tokens up to the end marker, then `grammar`.

    Reasoning is required if `start` is inside, optional if it is possible. The grammar's text has the markers, so masks
    allow them even if they are control tokens. `dialect`: the name of the calls' format. `grammar`: None for any text,
    which may hold the control tokens `controls`.
    """
    if start == "off" or (grammar is None and budget is None):
        return grammar
    row = FORMATS.get(dialect, PLAIN)
    begin = "" if start == "inside" else format.begin
    thought: _Node = {"type": "any_text", "excludes": [one for one in row.controls if one not in format.end]}
    if budget is not None:
        thought["max_tokens"] = min(budget, _MAX_BUDGET)
    behind = _const(row.after_thought.removeprefix(format.end)) if row.after_thought else _LAYOUT
    before = _sequence(_tag(begin, thought, format.end), behind)
    if start == "possible":
        before = _optional(before)
    if grammar is None:
        rest = _content(row, {**_text(row, format), "param": " ".join(sorted(controls))})
    else:
        rest = _answer_node(grammar)
    return _grammar(_sequence(before, rest), "max_reasoning_tokens" if grammar is None else grammar.param)


def in_dialect(answer: Grammar, dialect: str) -> Grammar:
    """The grammar of an answer that calls nothing, as its model writes answers."""
    row = FORMATS.get(dialect, PLAIN)
    return _grammar(_content(row, _answer_node(answer)), answer.param) if row.answer_begin else answer


def hidden_tokens(dialect: str) -> frozenset[str]:
    """Control tokens around answers that grammars name, and that answers do not show."""
    row = FORMATS.get(dialect, PLAIN)
    return frozenset((row.answer_begin, row.answer_end)) if row.answer_end else frozenset()


def _grammar(node: _Node, param: str = "tools") -> Grammar:
    text = msgspec.json.encode({"type": "structural_tag", "format": node}).decode()
    return Grammar("structural_tag", text, param)


def _call(row: Format, tool: Tool, is_exact: bool) -> _Node:
    """One call of a tool."""
    begin, *more = _nodes(row.begin.replace(NAME, tool.name))
    arguments = _json(tool.schema if is_exact else _ANY_OBJECT, tool.schema_param)
    if row.writing:
        arguments["writing"] = row.name
    return _tag(begin["value"], _sequence(*more, arguments) if more else arguments, row.end)


def _nodes(text: str) -> list[_Node]:
    """The nodes of a text with places; a place is neither first nor last."""
    return [_PLACES.get(part) or _const(part) for part in re.split(f"([{SPACE}{NUMBER}])", text)]


def _content(row: Format, node: _Node) -> _Node:
    """The node of an answer that is not a call, with the model's tokens around it."""
    if row.answer_end:  # the prompt may have written the one, and the answer may end without the other
        return _sequence(_optional(_const(row.answer_begin)), node, _optional(_const(row.answer_end)))
    return _sequence(_const(row.answer_begin), node) if row.answer_begin else node


def _text(row: Format, budgeted: ReasoningFormat | None, end: str = "") -> _Node:
    """Any text. `end`: what follows it."""
    markers = [budgeted.begin, budgeted.end] if budgeted else []
    return {"type": "any_text", "excludes": sorted({*markers, *row.controls} - {end})}


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


def _const(text: str) -> _Node:
    return {"type": "const_string", "value": text}


def _sequence(*elements: _Node) -> _Node:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: _Node) -> _Node:
    return {"type": "or", "elements": list(elements)}


def _optional(content: _Node) -> _Node:
    return {"type": "optional", "content": content}


def _tag(begin: str, content: _Node, end: str) -> _Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
