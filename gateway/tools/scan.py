"""A recursive descent over characters that arrive one by one: literals, whitespace and JSON. Pure."""

import json
import re
import string
from collections.abc import Generator
from typing import TypeVar

from gateway.tools.json_object import HIGH_HALF, LONE_HALF, LOW_HALF
from runtime.peer_input import MAX_JSON_DEPTH

T = TypeVar("T")
Reading = Generator[None, str, T]  # takes one character at each step; tells a T

END = ""  # stands after the last character
SPACE = frozenset(" \t\r\n")
_SCALAR_CHARS = frozenset(string.ascii_letters + string.digits + "+-.")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARS = frozenset(string.ascii_letters + string.digits + "_-")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # one, or what may become one


class Scanner:
    """Generators that share a lookahead, `_char`, and append what they take to `_held`.

    `_json` is what is held as JSON wants it, entry by entry: control characters in strings escaped, lone halves of
    surrogate pairs replaced. A reading that tells false, or nothing, has taken what was well-formed and stopped at what
    was not.
    """

    def __init__(self) -> None:
        self._char = END
        self._held: list[str] = []
        self._json: list[str] = []

    def _drop(self, end: int | None = None) -> None:
        """The text held, up to `end`, is layout, or was given out."""
        del self._held[:end], self._json[:end]

    def _take(self) -> Reading[None]:
        self._append(self._char, self._char)
        self._char = yield

    def _append(self, text: str, as_json: str) -> None:
        self._held.append(text)
        self._json.append(as_json)

    def _space(self) -> Reading[None]:
        while self._char in SPACE:
            yield from self._take()

    def _one_of(self, *texts: str) -> Reading[str]:
        """Takes one of the texts, none of which begins another, and tells which; else what is common, and tells ""."""
        taken = ""
        while self._char != END and any(text.startswith(taken + self._char) for text in texts):
            taken += self._char
            yield from self._take()
            if taken in texts:
                return taken
        return ""

    def _literal(self, text: str) -> Reading[bool]:
        return bool((yield from self._one_of(text)))

    # JSON as of RFC 8259, nested up to MAX_JSON_DEPTH. Takes what is well-formed and stops at what is not.

    def _value(self) -> Reading[bool]:
        closers: list[str] = []  # of what is open
        while True:
            if self._char in "{[" and self._char != END:
                if len(closers) == MAX_JSON_DEPTH:
                    return False
                closers.append("}" if self._char == "{" else "]")
                yield from self._take()
                yield from self._space()
                if self._char != closers[-1]:
                    if closers[-1] == "}" and not (yield from self._member()):
                        return False
                    continue
            elif not (yield from (self._string() if self._char == '"' else self._scalar())):
                return False
            while closers:
                yield from self._space()
                if self._char == closers[-1]:
                    yield from self._take()
                    closers.pop()
                    continue
                if not (yield from self._literal(",")):
                    return False
                yield from self._space()
                if closers[-1] == "}" and not (yield from self._member()):
                    return False
                break
            else:
                return True

    def _member(self) -> Reading[bool]:
        """A key and its colon."""
        if not (yield from self._string()):
            return False
        yield from self._space()
        is_whole = yield from self._literal(":")
        yield from self._space()
        return is_whole

    def _key(self) -> Reading[str]:
        """The same; tells the key."""
        start = len(self._held)
        if not (yield from self._member()):
            return ""
        return str(json.loads("".join(self._json[start:]).rstrip(" \t\r\n:")))

    def _text(self) -> Reading[str]:
        """A string; tells what it says."""
        start = len(self._held)
        return str(json.loads("".join(self._json[start:]))) if (yield from self._string()) else ""

    def _string(self) -> Reading[bool]:
        if not (yield from self._literal('"')):
            return False
        while self._char not in (END, '"'):
            char = self._char
            if char == "\\":
                if not (yield from self._escapes()):
                    return False
            else:
                self._append(char, char if char >= " " else f"\\u{ord(char):04x}")
                self._char = yield
        return (yield from self._literal('"'))

    def _escapes(self) -> Reading[bool]:
        """An escape and, behind the first half of a surrogate pair, others up to one that is no such half."""
        high = ""  # not held yet: what follows tells whether it is lone
        while self._char == "\\":
            escape = yield from self._escape()
            if high and LOW_HALF.fullmatch(escape):
                self._append(high + escape, high + escape)
                return True
            if high:
                self._append(high, LONE_HALF)
            if not HIGH_HALF.fullmatch(escape):
                self._append(escape, LONE_HALF if LOW_HALF.fullmatch(escape) else escape)
                return bool(_ESCAPE.fullmatch(escape))
            high = escape
        self._append(high, LONE_HALF)
        return True

    def _escape(self) -> Reading[str]:
        """One escape, which is not held yet; or what is well-formed of it."""
        escape = ""
        while self._char != END and _ESCAPE_PART.fullmatch(escape + self._char):
            escape += self._char
            self._char = yield
        return escape

    def _scalar(self) -> Reading[bool]:
        """A number, true, false or null."""
        scalar = ""
        while self._char in _SCALAR_CHARS:
            scalar += self._char
            yield from self._take()
        return bool(_SCALAR.fullmatch(scalar))

    def _word(self) -> Reading[str]:
        """Letters that names and ids are made of."""
        word = ""
        while self._char in _WORD_CHARS:
            word += self._char
            yield from self._take()
        return word
