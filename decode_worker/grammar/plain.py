"""Rewrites clients' schemas, expressions and grammars for xgrammar, where it reads them in another way. Pure.

Schemas keep their parts: what xgrammar reads wrongly in one is written as it reads it rightly, and what it cannot
follow is left out; the gateway has named that to the client by then. Expressions of strings do not pass through
xgrammar's schemas, which take them for the text between the quotes: there is a mark in place of each.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from decode_worker.grammar.writings import EBNF_TOKEN, rewritten
from decode_worker.interfaces import GrammarRefusedError
from wire.dialects import FORMATS, Writing
from wire.json_schema import (
    TEXT_KEYS,
    WHOLE,
    Schema,
    deciding,
    find_target,
    has_odd_names,
    inner_schemas,
    names_pattern,
    own_types,
    text_pattern,
)
from wire.patterns import NotEnforcedError, PatternError, json_pattern, text_without, whole_pattern

_MAX_INTEGER = 2**63 - 1  # in xgrammar's bounds
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_ROUNDED = {"minimum": math.ceil, "maximum": math.floor, "exclusiveMinimum": math.floor, "exclusiveMaximum": math.ceil}
_OPEN = {  # type |-> keywords that say what it holds; the one that says what else
    "array": (("items", "prefixItems", "unevaluatedItems"), "items"),
    "object": (
        ("properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties"),
        "additionalProperties",
    ),
}
# Up to 128 repetitions are compiled to masks. Beyond that xgrammar checks all tokens while the answer is made, which
# takes 50 ms of 128k of them; but not those that a class of characters allows which is repeated as well.
_FAST = 128
_PLAIN_TEXT = '[^\\x00-\\x1f\\"\\\\]'
_LENGTHS = re.compile(r"\^\[\^\]\{(\d+),(\d*)\}\$")
_MARKED = re.compile(r'Regex\("@@(\d+)", json_string=true\)')
_ESCAPED_KEY = ' | ("\\\\" basic_escape basic_string_sub)'  # in the rules of names that are not in `properties`
_SAFE_KEY = ' | ("\\\\" [\\"\\\\bfnrt] basic_string_sub)'  # \\u0061 would spell a name that is'


class PlainSchema:
    """A schema as xgrammar should get it, and the expressions that its grammar gets afterwards."""

    def __init__(self, schema: dict[str, Any], writing: Writing | None = None) -> None:
        """`schema` is the caller's own: it is changed. Raises ValueError for what is not an expression.

        `writing`: how its objects are written, if not as JSON.
        """
        self._root = schema
        self._writing = writing
        self._nodes: list[str] = []  # in EBNF
        self._expressions: list[str] = []  # of which they are
        self._moved: dict[str, Any] = {}  # definitions that get a name
        self._keys: dict[str, str] = {}  # reference |-> that name
        left: list[tuple[Any, bool]] = [(schema, writing is not None)]  # whether the part is written in its own way
        seen = set[int]()
        while left:
            part, is_own = left.pop()
            if id(part) not in seen:
                seen.add(id(part))
                if is_own:
                    _close(part, is_sorted=writing is not None and writing.is_sorted)
                is_deep = writing is not None and writing.is_deep
                left += [(target, is_own) for target in self._refer(part)]
                self._simplify(part)
                left += [(inner, is_deep or (is_own and keys[0] in WHOLE)) for keys, inner in inner_schemas(part)]
        if self._moved:
            schema["$defs"] = {**schema.get("$defs", {}), **self._moved}
        self.text = json.dumps(schema)

    def finished(self, ebnf: str) -> str:
        """xgrammar's grammar of the schema, with the expressions in it."""
        lines = [line.replace(_ESCAPED_KEY, _SAFE_KEY) if "_addl_key" in line else line for line in ebnf.split("\n")]
        text = "\n".join(lines)
        if self._writing is not None:
            text = rewritten(text, self._writing, self._text_node)
        return _MARKED.sub(lambda mark: self._nodes[int(mark[1])], text)

    def _text_node(self, mark: str) -> str:
        """The node of a mark that stands in plain text."""
        assert self._writing is not None
        expression, char = self._expressions[int(mark.removeprefix("@@"))], self._writing.closer[0]
        try:
            return _with_long(regex_node(text_without(expression, char)), expression, f"[^{char}]")
        except NotEnforcedError as error:
            raise GrammarRefusedError(f"the expression {expression[:64]!r} needs {error}") from error

    def _refer(self, part: dict[str, Any]) -> list[Any]:
        """The target of a part's reference, which gets a name that xgrammar finds; empty without one."""
        ref = part.get("$ref")
        if not isinstance(ref, str) or not isinstance(target := find_target(self._root, ref), dict):
            return []
        found: Any = self._root  # as xgrammar reads references
        for key in ref.split("/")[1:]:
            found = found.get(key) if isinstance(found, dict) and key else None
        if found is not target:
            name = self._keys.setdefault(ref, f"ref{len(self._keys)}")
            while name in self._root.get("$defs", {}):
                name = self._keys[ref] = f"{name}_"
            self._moved[name], part["$ref"] = target, f"#/$defs/{name}"
        return [target]

    def _simplify(self, part: dict[str, Any]) -> None:
        if deciding(part) is None:
            for key in WHOLE:
                part.pop(key, None)
        types = own_types(part)
        if "type" not in part and types and deciding(part) is None:
            part["type"] = next(iter(types))
        for key in _COUNTS:
            if isinstance(number := part.get(key), float) and number.is_integer():
                part[key] = int(number)
        if isinstance(part.get("items"), list):  # draft 7's
            part["prefixItems"] = part.pop("items")
            part["items"] = part.pop("additionalItems", False)
        if isinstance(listed := part.get("prefixItems"), list):
            part["prefixItems"] = [{} if one is True else one for one in listed]
        for kind, (own, rest) in _OPEN.items():  # xgrammar takes none where nothing is said of them
            if kind in types and part.keys().isdisjoint(own):
                part[rest] = {}
        if "integer" in types and "number" not in types:
            _round(part)
        if "string" in types and text_pattern(part) is not None:
            expression = self._mark_text(part)
            for key in TEXT_KEYS:
                part.pop(key, None)
            part |= {} if expression is None else {"pattern": expression}
        rest = part.get("additionalProperties", part.get("unevaluatedProperties", {}))
        if (pattern := names_pattern(part)) is not None and rest is not False:
            part["patternProperties"], part["additionalProperties"] = {pattern: rest}, False
        elif "object" in types and "patternProperties" not in part and isinstance(listed := part.get("required"), list):
            named = part.get("properties", {})
            if more := {name: {} if rest is False else rest for name in listed if name not in named}:
                part["properties"] = {**named, **more}
        part.pop("propertyNames", None)
        if has_odd_names(part) and not isinstance(part.get("patternProperties"), dict):
            part["patternProperties"], part["additionalProperties"] = {"": rest}, False
        if isinstance(named := part.get("patternProperties"), dict):
            part["patternProperties"] = {self._mark_text({"pattern": key}) or ".*": one for key, one in named.items()}

    def _mark_text(self, schema: Schema) -> str | None:
        """A mark for the expression of a string; None if it has none that can be followed."""
        expression = text_pattern(schema)
        if expression is None:
            return None
        try:
            node = regex_node(json_pattern(expression))
        except NotEnforcedError:
            return self._mark_text({key: schema[key] for key in ("minLength", "maxLength") if key in schema})
        except PatternError as error:
            raise ValueError(f"{expression[:64]!r} is no regular expression: {error}") from error
        self._nodes.append(_with_long(node, expression, _PLAIN_TEXT))
        self._expressions.append(expression)
        return f"@@{len(self._nodes) - 1}"


def _with_long(node: str, expression: str, character: str) -> str:
    """The node of an expression; if that is only of lengths, long texts are of such characters."""
    bounds = _LENGTHS.fullmatch(expression)
    if bounds is None or max(int(bounds[1]), int(bounds[2] or 0)) <= _FAST:
        return node
    return f"({node} | {character}{{{max(int(bounds[1]), _FAST)},{bounds[2]}}})"


def _close(part: dict[str, Any], is_sorted: bool) -> None:
    """An object that names its properties gets no others: models' own words have no place for any name."""
    named = part.get("properties")
    if isinstance(named, dict) and named:
        for key in ("patternProperties", "propertyNames", "unevaluatedProperties"):
            part.pop(key, None)
        part["additionalProperties"] = False
        part["properties"] = dict(sorted(named.items())) if is_sorted else named


def _round(part: dict[str, Any]) -> None:
    """Bounds of integers become integers, and the largest that xgrammar takes where they are larger."""
    for key, round_to in _ROUNDED.items():
        if isinstance(bound := part.get(key), (int, float)) and not isinstance(bound, bool):
            whole = round_to(bound)
            part[key] = (
                max(whole, -_MAX_INTEGER) if key in ("minimum", "exclusiveMinimum") else min(whole, _MAX_INTEGER)
            )


def regex_node(pattern: str) -> str:
    """In EBNF. `pattern` is one that wire.patterns has made."""
    return f"Regex({json.dumps(pattern)})"


def regex_grammar(pattern: str) -> str:
    """The EBNF of a client's expression for a whole text. Raises ValueError."""
    try:
        return f"root ::= {regex_node(whole_pattern(pattern))}"
    except NotEnforcedError as error:
        raise ValueError(f"the expression has {error}, which cannot be enforced; say it in another way") from error
    except PatternError as error:
        raise ValueError(f"it is no regular expression: {error}") from error


def ebnf_grammar(text: str) -> str:
    """A client's EBNF with "" where an alternative is empty, as in `ws ::= | " "`, which xgrammar does not read."""
    written: list[str] = []
    spaces = last = ""  # what stood before the token
    for token in EBNF_TOKEN.finditer(text + "\0"):
        kind = token.lastgroup or token[0]
        if kind == "space":
            spaces = token[0]
            continue
        if (kind == "|" and last in ("rule", "(", "|")) or (last == "|" and kind in (")", "rule", "\0")):
            written.append('""')
        written += [spaces, token[0]]
        spaces, last = "", kind
    return "".join(written[:-1])


def plain_tag(text: str, schema_ebnf: Callable[[str, Writing | None], str]) -> str:
    """A structural tag in which each schema, expression and grammar is a grammar as it is meant."""

    def plain(node: Any) -> Any:
        match node:
            case list():
                return [plain(inner) for inner in node]
            case {"type": "json_schema", "json_schema": schema}:
                try:
                    dialect = FORMATS.get(node.get("writing", ""))
                    grammar = schema_ebnf(json.dumps(schema), dialect.writing if dialect else None)
                except GrammarRefusedError as error:
                    raise GrammarRefusedError(str(error), str(node.get("param", ""))) from error
            case {"type": "regex", "pattern": str(pattern)}:
                grammar = regex_grammar(pattern)
            case {"type": "grammar", "grammar": str(ebnf)}:
                grammar = ebnf_grammar(ebnf)
            case dict():
                return {key: plain(inner) for key, inner in node.items()}
            case _:
                return node
        return {"type": "grammar", "grammar": grammar}

    return json.dumps(plain(json.loads(text)))
