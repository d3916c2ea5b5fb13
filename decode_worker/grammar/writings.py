"""Arguments in models' own words: xgrammar's grammar of a schema, in which objects and strings are not written as JSON.

Pure. The gateway names the dialect in a tag's nodes (gateway/tools/grammar.py).
"""

import json
import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from decode_worker.interfaces import GrammarRefusedError
from wire.dialects import BREAK, Writing

EBNF_TOKEN = re.compile(
    r'(?P<space>(?:\s|#[^\n]*)+)|"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|(?P<rule>[\w.-]+\s*::=)|[\w.-]+|.',
    re.DOTALL,
)
JSON_SEPARATORS = (", ", ": ")  # as chat templates write JSON
_COMMA, _COLON = (f'"{text}"' for text in JSON_SEPARATORS)
_BRACKETS = ('"{"', '"["')  # of values that are JSON, unless the writing is deep


def rewritten(ebnf: str, writing: Writing, expression: Callable[[str], str]) -> str:
    """The grammar of an object, by xgrammar and with JSON_SEPARATORS, in this writing.

    `expression`: the node of a mark's expression for text as it is. Raises GrammarRefusedError.
    """
    return _Writer(ebnf, writing, expression).written()


class _Writer:
    """Rules stay as they are, for values that are JSON; those that are not get others of a name with a prefix:

    object_: of the arguments themselves, and of all that is in them where the writing is deep.
    text_: of values where a string is as it is, and objects and lists are JSON.
    """

    def __init__(self, ebnf: str, writing: Writing, expression: Callable[[str], str]) -> None:
        lines = (line.split(" ::= ", 1) for line in ebnf.split("\n") if " ::= " in line)
        self._rules = {name: [one[0] for one in EBNF_TOKEN.finditer(body) if not one["space"]] for name, body in lines}
        self._ebnf = ebnf
        for name, tokens in self._rules.items():  # xgrammar writes out a rule that is only a string
            for at in range(len(tokens) - 2, -1, -1):
                if name != "basic_string" and tokens[at : at + 2] == ['"\\""', "basic_string_sub"]:
                    tokens[at : at + 2] = ["basic_string"]
        self._writing = _in_ebnf(writing)
        self._expression = expression
        self._bodies: dict[str, str] = {}  # new rules
        self._left = [("object", "root")]  # rules that are to be written anew

    def written(self) -> str:
        while self._left:
            kind, name = self._left.pop()
            if (new := f"{kind}_{name}") in self._bodies:
                continue
            is_free = name == "basic_string" or (name == "basic_any" and kind == "text")
            if is_free and self._writing.closer:
                text = f"TagDispatch(loop_after_dispatch=false, excludes=({_literal(self._writing.closer)}))"
                self._bodies[f"{new}_0"] = text
                self._bodies[new] = _joined((self._writing.quotes, f"{new}_0", self._writing.quotes))
            elif kind == "text" and not self._writing.is_deep and self._rules[name][2] in _BRACKETS:
                self._bodies[new] = _renamed(name)
            else:
                self._bodies[new] = _joined(self._tokens(kind, self._rules[name]))
        old = re.sub(r"^root ::=", "json_root ::=", self._ebnf, flags=re.MULTILINE).split("\n")
        words = dict(self._writing.words)
        lines = ["".join([words.get(one[0], _renamed(one[0])) for one in EBNF_TOKEN.finditer(line)]) for line in old]
        return "\n".join(
            [*lines, *(f"{name} ::= {body}" for name, body in self._bodies.items()), "root ::= object_root"]
        )

    def _new(self, kind: str, name: str) -> str:
        """The name of a rule in another writing."""
        self._left.append((kind, name))
        return f"{kind}_{name}"

    def _tokens(self, kind: str, tokens: list[str]) -> Iterator[str]:
        writing, is_text = self._writing, kind == "text" or self._writing.is_deep
        if tokens[0] == "Regex" and is_text:
            yield self._expression(literal_eval(tokens[2]))
            return
        own = {'"{"': writing.begin, '"}"': writing.end, _COMMA: writing.separator, **dict(writing.words)}
        if is_text:
            own['"\\""'] = writing.quotes
        left = iter(range(len(tokens)))
        for index in left:
            token = tokens[index]
            if tokens[index + 1 : index + 2] == [_COLON]:
                yield from (writing.key, self._key(token), writing.key_end, self._value(tokens[index + 2]))
                yield writing.value_end
                next(left), next(left)
            elif token in own:
                yield own[token]
            elif token in self._rules:
                yield self._new(kind, token)
            else:
                constant = _constant(token)
                is_own = constant is not None and (kind == "object" or isinstance(constant, str))
                yield self._constant(constant) if is_own else token

    def _key(self, token: str) -> str:
        if token == "basic_string":
            return "[a-zA-Z_] [a-zA-Z0-9_]{0,63}"
        if (name := _constant(token)) is None:
            raise GrammarRefusedError("the model cannot write names of arguments that are not in 'properties'")
        return self._name(name)

    def _name(self, name: str) -> str:
        if not re.fullmatch(self._writing.names, name):
            raise GrammarRefusedError(
                f"the model cannot write the argument's name {name[:64]!r}; use letters, digits, '_'"
            )
        return _literal(name)

    def _value(self, token: str) -> str:
        if self._writing.is_deep:
            return self._new("object", token)
        return self._new("text", token) if self._writing.closer else _renamed(token)

    def _constant(self, value: Any) -> str:
        """The rule for a value that xgrammar writes as one text, from `const` or `enum`."""
        writing = self._writing
        match value:
            case dict():
                inner = [
                    f"{writing.key} {self._name(name)} {writing.key_end} {self._member(one)} {writing.value_end}"
                    for name, one in value.items()
                ]
                return _joined((writing.begin, f" {writing.separator} ".join(inner), writing.end))
            case list() if writing.is_deep:
                return _joined(('"["', f" {writing.separator} ".join(map(self._constant, value)), '"]"'))
            case str() if writing.closer:
                if writing.closer[0] in value:
                    raise GrammarRefusedError(f"the model cannot write the value {value[:64]!r}")
                return _joined((writing.quotes, _literal(value), writing.quotes))
        return _literal(json.dumps(value, ensure_ascii=False))

    def _member(self, value: Any) -> str:
        is_json = not self._writing.is_deep and not isinstance(value, str)
        return _literal(json.dumps(value, ensure_ascii=False)) if is_json else self._constant(value)


def _renamed(token: str) -> str:
    """A token's name in the rules that stay as they are: the old root becomes json_root."""
    return "json_root" if token == "root" else token


def _constant(token: str) -> Any:
    """The string, object or list that a literal is in JSON; None if it is none."""
    try:
        value = json.loads(literal_eval(token)) if token[0] == '"' else None
    except (ValueError, SyntaxError):
        return None
    return value if isinstance(value, (str, dict, list)) else None


def _in_ebnf(writing: Writing) -> Writing:
    """With texts as EBNF writes them."""
    names = ("key", "key_end", "value_end", "separator", "begin", "end", "quotes")
    changed: dict[str, Any] = {name: _optional_breaks(getattr(writing, name)) for name in names}
    words = [(_literal(json_word), _literal(word)) for json_word, word in writing.words]
    return replace(writing, words=tuple(words), **changed)


def _optional_breaks(text: str) -> str:
    """In EBNF."""
    parts = re.split(f"({BREAK})", text)
    return _joined(['"\\n"{0,1}' if part == BREAK else _literal(part) if part else "" for part in parts])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _joined(parts: Any) -> str:
    return " ".join([part for part in parts if part])
