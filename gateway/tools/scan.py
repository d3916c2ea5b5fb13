"""A recursive descent over characters that arrive one by one: literals, whitespace and JSON. Pure."""

import json
import re
import string
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]  # takes one character at each step; tells a T

END = ""  # stands after the last character
SPACE = frozenset(" \t\r\n")
_SCALAR_CHARS = frozenset(string.ascii_letters + string.digits + "+-.")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARS = frozenset(string.ascii_letters + string.digits + "_-")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset(string.hexdigits)


class Scanner:
    """Generators that share a lookahead, `_char`, and append what they take to `_held`.

    `_json` is what is held with control characters in strings escaped. A reading that tells false, or nothing, has
    taken what was well-formed and stopped at what was not.
    """

    def __init__(self) -> None:
        self._char = END
        self._held: list[str] = []
        self._json: list[str] = []

    def _drop(self, end: int | None = None) -> None:
        """The text held, up to `end`, is layout, or was given out."""
        del self._held[:end], self._json[:end]

    def _take(self) -> Reading[None]:
        self._append(self._char)
        self._char = yield

    def _append(self, as_json: str) -> None:
        self._held.append(self._char)
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

    # JSON as of RFC 8259. Takes what is well-formed and stops at what is not.

    def _value(self) -> Reading[bool]:
        closers: list[str] = []  # of what is open
        while True:
            if self._char in "{[" and self._char != END:
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
            self._append(char if char >= " " else f"\\u{ord(char):04x}")
            self._char = yield
            if char == "\\" and not (yield from self._escape()):
                return False
        return (yield from self._literal('"'))

    def _escape(self) -> Reading[bool]:
        if self._char in _ESCAPES:
            yield from self._take()
            return True
        is_whole = yield from self._literal("u")
        for _ in range(4):
            if not is_whole or self._char not in _HEX:
                return False
            yield from self._take()
        return is_whole

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
