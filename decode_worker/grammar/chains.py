"""How long the chains of references are in what clients send: compilers follow them by recursion. Pure, linear time."""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Hashable)

# Chains of 1000 compile in 0.1 to 1 s. Longer ones of anyOf take 9 s and more; 15,000 levels of objects, or 25,000
# rules, overflow the compiler's stack of 8 MiB.
MAX_CHAIN = 1000
_EBNF = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*|([A-Za-z_][\w.-]*)(\s*::=)?')


def find_long_chain(kind: str, text: str) -> str | None:
    """What is wrong with a grammar whose chains are too long, in words for the client; None if nothing is."""
    if kind == "ebnf" and rule_depth(text) > MAX_CHAIN:
        return f"it has a chain of more than {MAX_CHAIN} rules; write some of them out"
    if kind == "json_schema" and schema_depth(parsed(text)) > MAX_CHAIN:
        return f"it nests deeper than {MAX_CHAIN} levels where its references are followed; simplify it"
    return None


def schema_depth(root: Any) -> int:
    """How many objects and arrays lie in each other when each `$ref` is taken for what it names; cycles count once."""
    parts: dict[int, Any] = {id(root): root}  # by id: all live as long as the root

    def inside(number: int) -> Iterator[int]:
        part = parts[number]
        for inner in _contents(part, root):
            if isinstance(inner, (dict, list)):
                parts[id(inner)] = inner
                yield id(inner)

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


def parsed(text: str) -> Any:
    """The JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:  # the compiler says what is wrong with it
        return None


def _contents(part: Any, root: Any) -> Iterator[Any]:
    if isinstance(part, list):
        yield from part
    elif isinstance(part, dict):
        yield from part.values()
        if isinstance(part.get("$ref"), str):
            yield find_target(root, part["$ref"])


def find_target(root: Any, pointer: str) -> Any:
    """What `#/a/b` names; None where nothing is. Without escapes, which xgrammar does not know."""
    found = root
    for key in pointer.split("/")[1:]:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _longest_chain(begins: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> int:
    """How many nodes follow each other at most; of a cycle, each counts once."""
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
