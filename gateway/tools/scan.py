"""A recursive-descent scanner of characters that arrive one by one: literals, whitespace and JSON. Pure."""

import json
import re
import string
from collections.abc import Generator
from typing import TypeVar

from gateway.tools.json_object import HIGH_HALF, LONE_HALF, LOW_HALF
from runtime.peer_input import MAX_JSON_DEPTH

T = TypeVar("T")
Reading = Generator[None, str, T]  # takes one character at each step; returns a T

END = ""  # follows the last character
SPACE = frozenset(" \t\r\n")
_SCALAR_CHARS = frozenset(string.ascii_letters + string.digits + "+-.")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARS = frozenset(string.ascii_letters + string.digits + "_-")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # an escape or its beginning


class Scanner:
    """Generators that share a lookahead, `_char`, and append what they take to `_held`.

    `_json` is `_held` as valid JSON, entry by entry: control characters in strings are escaped, lone halves of
    surrogate pairs replaced. A reading that returns False, or "", has taken the well-formed part and stopped after it.
    """

    def __init__(self) -> None:
        self._char = END
        self._held: list[str] = []
        self._json: list[str] = []

    def _drop(self, end: int | None = None) -> None:
        """Removes the held text up to `end`: it is layout or was emitted."""
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
        """Takes and returns one of the texts; else takes the matching part and returns "". No text begins another."""
        taken = ""
        while self._char != END and any(text.startswith(taken + self._char) for text in texts):
            taken += self._char
            yield from self._take()
            if taken in texts:
                return taken
        return ""

    def _literal(self, text: str) -> Reading[bool]:
        return bool((yield from self._one_of(text)))

    # JSON as of RFC 8259, nested up to MAX_JSON_DEPTH. Takes the well-formed part and stops after it.

    def _value(self) -> Reading[bool]:
        closers: list[str] = []  # of the open containers
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
        """A key and its colon; returns the key."""
        start = len(self._held)
        if not (yield from self._member()):
            return ""
        return str(json.loads("".join(self._json[start:]).rstrip(" \t\r\n:")))

    def _text(self) -> Reading[str]:
        """A string; returns its value."""
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
        """An escape; after the first half of a surrogate pair also the next ones, up to one that is not such a half."""
        high = ""  # not held yet: the next escape decides whether it is lone
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
        """One escape, or its well-formed part, which is not held yet."""
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
        """The characters of a name or an id."""
        word = ""
        while self._char in _WORD_CHARS:
            word += self._char
            yield from self._take()
        return word
