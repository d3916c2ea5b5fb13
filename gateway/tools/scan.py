"""A recursive-descent scanner of characters that arrive one by one: literals, whitespace and JSON. Pure."""

import re
import string
from collections.abc import Callable, Generator
from typing import TypeVar

from runtime.peer_input import MAX_JSON_DEPTH

T = TypeVar("T")
Reading = Generator[None, str, T]  # takes one character at each step; returns a T

END = ""  # follows the last character
_SPACE = " \t\r\n"
WORD_CHARS = string.ascii_letters + string.digits + "_-"  # of names and ids
_SCALAR_CHARS = string.ascii_letters + string.digits + "+-."
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # an escape or its beginning


class Scanner:
    """Generators that share a lookahead, `_char`, and append what they take to `_held`.

    A reading that returns False or "" has taken the well-formed part and stopped after it. JSON is that of
    RFC 8259, nested up to MAX_JSON_DEPTH; its strings may hold control characters.
    """

    def __init__(self) -> None:
        self._char = END
        self._held: list[str] = []

    def _take(self) -> Reading[None]:
        self._held.append(self._char)
        self._char = yield

    def _take_while(self, is_part: Callable[[str], object]) -> Reading[str]:
        """Takes and returns the longest text whose beginnings are all parts."""
        taken = ""
        while self._char != END and is_part(taken + self._char):
            taken += self._char
            yield from self._take()
        return taken

    def _run(self, chars: str) -> Reading[str]:
        """Takes and returns all next characters that are among these."""
        taken = ""
        while self._char != END and self._char in chars:
            taken += self._char
            yield from self._take()
        return taken

    def _space(self) -> Reading[str]:
        return self._run(_SPACE)

    def _one_of(self, *texts: str) -> Reading[str]:
        """Takes and returns one of the texts, of which none begins another; else takes the matching part."""
        taken = yield from self._take_while(lambda part: any(text.startswith(part) for text in texts))
        return taken if taken in texts else ""

    def _listed(self, opener: str, closer: str, read_item: Callable[[], Reading[bool]]) -> Reading[bool]:
        """Any number of items between brackets, with commas between them."""
        if not (yield from self._one_of(opener)):
            return False
        yield from self._space()
        if (yield from self._one_of(closer)):
            return True
        while (yield from read_item()):
            yield from self._space()
            if (yield from self._one_of(closer)):
                return True
            if not (yield from self._one_of(",")):
                break
            yield from self._space()
        return False

    def _value(self, depth: int = 0) -> Reading[bool]:
        """`depth`: number of objects and arrays around it."""
        if self._char == '"':
            return bool((yield from self._string()))
        if self._char not in ("{", "["):
            return bool(_SCALAR.fullmatch((yield from self._run(_SCALAR_CHARS))))
        if depth == MAX_JSON_DEPTH:
            return False
        if self._char == "[":
            return (yield from self._listed("[", "]", lambda: self._value(depth + 1)))
        return (yield from self._listed("{", "}", lambda: self._member(depth + 1)))

    def _member(self, depth: int) -> Reading[bool]:
        return bool((yield from self._key())) and (yield from self._value(depth))

    def _key(self) -> Reading[str]:
        """A key and its colon; returns the key as written."""
        key = yield from self._string()
        if not key:
            return ""
        yield from self._space()
        is_whole = yield from self._one_of(":")
        yield from self._space()
        return key if is_whole else ""

    def _string(self) -> Reading[str]:
        """Returns it as written, with its quotes."""
        written = yield from self._one_of('"')
        while written and self._char not in (END, '"'):
            if self._char == "\\":
                escape = yield from self._take_while(_ESCAPE_PART.fullmatch)
                if not _ESCAPE.fullmatch(escape):
                    return ""
                written += escape
            else:
                written += self._char
                self._held.append(self._char)  # as _take, which costs more
                self._char = yield
        return written + '"' if written and (yield from self._one_of('"')) else ""
