"""Finds what xgrammar does not say: which part of a text cannot be compiled, and whether its references form chains
that are too long to be followed by recursion. Pure."""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from wire.json_schema import Schema, find_target, inner_schemas, written

Node = TypeVar("Node", bound=Hashable)
FindProblem = Callable[[str, str], str | None]  # what is wrong with a text of a kind; None: nothing, or time is over

# Chains of 1000 compile in 0.1 to 1 s. Longer ones of anyOf take 9 s and more; 15,000 levels of objects, or 25,000
# rules, overflow the compiler's stack of 8 MiB.
MAX_CHAIN = 1000
_EBNF = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*|([A-Za-z_][\w.-]*)(\s*::=)?')
_TEXT_OF = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}  # type of a tag's node |-> its key
_PROBE = "part"  # name of a definition that is added


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A grammar within a structural tag."""

    kind: str
    text: str
    param: str  # the client's field; empty where the tag does not say


def tag_parts(tag: str) -> Iterator[GrammarPart]:
    """In their order. gateway/tools/grammar.py writes tags, and names each node's field as its `param`."""
    left: list[Any] = [_parsed(tag)]
    while left:
        node = left.pop()
        if isinstance(node, dict) and (key := _TEXT_OF.get(str(node.get("type")))) in node:
            kind = "ebnf" if key == "grammar" else str(node["type"])
            text = node[key] if isinstance(node[key], str) else json.dumps(node[key])
            yield GrammarPart(kind, text, str(node.get("param", "")))
        elif isinstance(node, (dict, list)):
            left += reversed(list(node.values()) if isinstance(node, dict) else node)


def find_culprit(kind: str, text: str, problem: str, find_problem: FindProblem) -> tuple[str, str]:
    """The client's field, or nothing where the text does not say; and the problem, with its place in a schema.

    Parts are compiled alone to find the one at fault.
    """
    param = ""
    if kind == "structural_tag":
        found = ((part, find_problem(part.kind, part.text)) for part in tag_parts(text))
        culprit, problem = next(((part, why) for part, why in found if why), (None, problem))
        if culprit is None:
            return param, problem
        kind, text, param = culprit.kind, culprit.text, culprit.param
    if kind == "json_schema" and find_long_chain(kind, text) is None:
        problem = _locate(_parsed(text), problem, find_problem)
    return param, problem


def _locate(root: Any, problem: str, find_problem: FindProblem) -> str:
    """The problem, of the innermost part that has one, and where it is."""
    place: tuple[str, ...] = ()
    part, seen = root, set[int]()
    while isinstance(part, dict) and id(part) not in seen:
        seen.add(id(part))
        if isinstance(part.get("$ref"), str):
            if (target := find_target(root, part["$ref"])) is not None and target is not root:
                part, place = target, tuple(part["$ref"].split("/")[1:])
            continue
        for keys, inner in inner_schemas(part):
            why = None if keys[0] in ("$defs", "definitions") else find_problem("json_schema", _alone(inner, root))
            if why is not None:
                part, place, problem = inner, place + keys, why
                break
    return f"{problem} at {written(place)}"


def _alone(part: Schema, root: Schema) -> str:
    """A schema of nothing but this part, in which references still find what they name."""
    definitions = root.get("$defs")
    named = {**(definitions if isinstance(definitions, dict) else {}), _PROBE: part}
    return json.dumps({**root, "$defs": named, "$ref": f"#/$defs/{_PROBE}"})


def find_long_chain(kind: str, text: str) -> str | None:
    """Why a grammar's chains are too long, in words for the client; None if they are not."""
    if kind == "ebnf" and rule_depth(text) > MAX_CHAIN:
        return f"it has a chain of more than {MAX_CHAIN} rules; write some of them out"
    if kind == "json_schema" and schema_depth(_parsed(text)) > MAX_CHAIN:
        return f"it nests deeper than {MAX_CHAIN} levels where its references are followed; simplify it"
    return None


def schema_depth(root: Any) -> int:
    """How many objects and arrays lie in each other when each `$ref` is taken for what it names; cycles count once."""
    parts: dict[int, Any] = {id(root): root}  # by id: all live as long as the root

    def inside(number: int) -> Iterator[int]:
        part = parts[number]
        inner = list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else []
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            inner.append(find_target(root, part["$ref"]))
        for one in inner:
            if isinstance(one, (dict, list)):
                parts[id(one)] = one
                yield id(one)

    return _longest_chain([id(root)], inside)


def rule_depth(ebnf: str) -> int:
    """How many rules refer to each other in a row; cycles count once."""
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    for name, begins_rule in (match.groups() for match in _EBNF.finditer(ebnf)):
        if begins_rule:
            body = rules.setdefault(name, [])
        elif name:
            body.append(name)
    return _longest_chain(rules, lambda name: rules.get(name, ()))


def _longest_chain(begins: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> int:
    """How many nodes follow each other at most; of a cycle, each counts once. Linear time."""
    heights: dict[Node, int] = {}  # 0 while nodes behind it are looked at, so a cycle ends at a node of its own
    left: list[tuple[Node, tuple[Node, ...] | None]] = [(begin, None) for begin in begins]  # None: not looked at yet
    while left:
        node, behind = left.pop()
        if behind is not None:
            heights[node] = 1 + max((heights[one] for one in behind), default=0)
        elif node not in heights:
            heights[node] = 0
            behind = tuple(following(node))
            left.append((node, behind))  # below those behind it
            left += [(one, None) for one in behind]
    return max(heights.values(), default=0)


def _parsed(text: str) -> Any:
    """The JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:  # the compiler says what is wrong with it
        return None
