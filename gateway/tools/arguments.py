"""Arguments of calls in each style, read from text that arrives in pieces and written as JSON. Pure.

`parse.py` finds the calls.
"""

import codecs
import json
import sys
from collections.abc import Callable, Collection, Generator
from functools import cache
from typing import Any, NamedTuple, TypeVar

import regex  # type: ignore[import-untyped]  # unlike re, it says where more text may match

from gateway.tools.values import CONSTANTS, JSON_TYPES, as_value, escaped
from runtime.peer_input import MAX_JSON_DEPTH
from wire.dialects import BREAK, SPACE, Format, Style, Writing

MOST_UNSURE_CHARS = 1 << 16  # of a value in XML that may be a text or other JSON: longer ones are texts
ANY_NUMBER = sys.maxsize
END = "\uffff"  # follows the last character; readings never take it
WHITESPACE = " \t\r\n"
GAP = r"[ \t\r\n]{0,16}+"  # around markers

T = TypeVar("T")
Reading = Generator[None, None, T]  # goes on when there is more text; returns a T


def compiled(pattern: str) -> Any:
    return regex.compile(pattern, regex.DOTALL)


def loose(text: str) -> str:
    """An expression of a marker, in which whitespace is optional."""
    return GAP.join(map(regex.escape, regex.split(rf"[{BREAK}{SPACE}{WHITESPACE}]+|(?<=```)", text)))


_SPACES = compiled(f"[{WHITESPACE}]*+")
_SCALAR = compiled(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_WORD = compiled(r"[a-zA-Z0-9+.-]{1,1024}+(?=[^a-zA-Z0-9+.-])")  # read at once
_BARE_KEY = compiled(r"""[^:=,{}\[\]()<>"'\s]{1,256}+(?=[:=,{}\[\]()<>"'\s])""")
_BRACKET = compiled(r"[\[{]")
_QUOTES: dict[Style, Any] = {
    "json": compiled('"'),
    "xml": compiled('"'),
    "python": compiled("[\"']"),
    "gemma": compiled(r'<\|"\|>'),
}
_ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_HEX = "[0-9a-fA-F]"
_PYTHON_ESCAPE = rf"\\(?:[\\'\"/abfnrtv0]|x{_HEX}{{2}}|u{_HEX}{{4}}|U00(?:0{_HEX}|10){_HEX}{{4}})"
_STRINGS = {  # style and quote |-> the next part of a string; Python keeps escapes that it does not know
    ("json", '"'): compiled(rf'(?P<end>")|(?P<text>[^"\\]+)|(?P<escape>{_ESCAPE})'),
    ("gemma", '<|"|>'): compiled(r'(?P<end><\|"\|>)|(?P<text>[^<]+|<(?=[^|])|<\|(?=[^"])|<\|"(?=[^|])|<\|"\|(?=[^>]))'),
    **{
        ("python", quote): compiled(
            rf"(?P<end>{quote})|(?P<text>[^{quote}\\]+)|(?P<escape>{_PYTHON_ESCAPE})|(?P<lone>\\)(?=[^xuU\n{END}])"
        )
        for quote in "\"'"
    },
}


class _Tags(NamedTuple):
    """The texts around arguments in XML, as expressions."""

    next: Any  # `begin` of an argument, or the end of all
    key: Any  # an argument's name, and `json` or `text` as its value is
    lead: Any  # before a value: `layout`, and the `next` character that is none
    end: Any  # of a value that is text, up to `next`
    json_end: Any


@cache
def _tags(own: Writing, last: str) -> _Tags:
    """`last`: ends all arguments."""
    follows = rf"(?:(?P<begin>{regex.escape(own.key.strip())})|{regex.escape(last)})"
    text, other = loose(own.key_end.strip()), loose(own.json_end) or "(?!)"
    layout = r"\n?" if own.key_end.endswith("\n") else ""
    closed = rf"{regex.escape(own.closer)}{GAP}{follows}"
    return _Tags(
        compiled(GAP + follows),
        compiled(rf"(?P<key>[^{regex.escape(own.key_end[0])}\n]{{1,256}})(?:(?P<text>{text})|(?P<json>{other}))"),
        compiled(rf"(?P<layout>{layout}){GAP}(?=(?P<next>.))"),
        compiled(layout + closed),
        compiled(GAP + closed),
    )


class ArgumentReader:
    """Reads arguments by recursive descent.

    Readings take text from `_held`, and write it as JSON. One that returns False, "" or None has taken the well-formed
    part and stopped after it. JSON is that of RFC 8259, nested up to MAX_JSON_DEPTH; its strings may hold control
    characters.
    """

    def __init__(self, format: Format) -> None:
        self._format = format
        self._held = ""
        self._at = 0  # up to here it is taken
        self._most = ANY_NUMBER  # where `_overflow` is called
        self._is_last = False  # END is held
        self._json: list[str] | None = None  # of the arguments that are read, not emitted yet
        self._used = 0  # held characters that are in it

    def _overflow(self) -> None:
        """The arguments are too long to be held back."""

    # What readings take.

    def _move(self, end: int) -> None:
        self._at = end
        if end > self._most:
            self._most = ANY_NUMBER
            self._overflow()

    def _take(self, pattern: Any) -> Reading[Any]:
        """Takes what matches here, once more text cannot make it match in another way; else None, taking nothing."""
        while True:
            found = pattern.match(self._held, self._at, partial=True)
            if found is not None and not found.partial and found.end() <= len(self._held) - self._is_last:
                self._move(found.end())
                return found
            if found is None or self._is_last:
                return None
            yield

    def _mark(self, char: str, written: str = "") -> Reading[bool]:
        """A character of JSON. `written`: what stands for it there."""
        while self._at == len(self._held):
            yield
        if self._held[self._at] != char:
            return False
        self._move(self._at + 1)
        self._write(written or char)
        return True

    def _space(self) -> Reading[None]:
        """Takes and writes all whitespace here."""
        while True:
            found = _SPACES.match(self._held, self._at)
            self._move(found.end())
            self._write(found[0])
            if self._at < len(self._held):
                return
            yield

    def _write(self, text: str) -> None:
        """Adds JSON to the arguments, if any are read; all text that is taken is in it."""
        if self._json is not None:
            self._json.append(text)
            self._used = self._at

    # Arguments.

    def _members(self, types_of: Callable[[str], Collection[str]]) -> Reading[bool]:
        """Reads a call's arguments, whose opening bracket is taken in Python. `types_of`: by the argument's name."""
        if self._format.style == "xml":
            return (yield from self._parameters(types_of))
        if self._format.style == "python":
            self._write("{")
            return (yield from self._listed(")", lambda: self._member(1, "="), "}"))
        return (yield from self._mark("{")) and (yield from self._listed("}", lambda: self._member(1)))

    def _parameters(self, types_of: Callable[[str], Collection[str]]) -> Reading[bool]:
        """Reads arguments written in XML."""
        own = self._format.writing
        assert own is not None
        tags = _tags(own, self._format.end.strip().partition("\n")[0])
        self._write("{")
        separator = ""
        mark = yield from self._take(tags.next)
        while mark and mark["begin"]:
            key = yield from self._take(tags.key)
            if key is None:
                return False
            types = types_of(key["key"])
            if own.json_end:
                types = JSON_TYPES - {"string"} if key["json"] else frozenset(("string",))
            self._write(f'{separator}"{escaped(key["key"])}": ')
            separator = ", "
            mark = yield from self._parameter_value(tags, types)
        if mark:
            self._write("}")
        return mark is not None

    def _parameter_value(self, tags: _Tags, types: Collection[str]) -> Reading[Any]:
        """Writes the value. Returns what follows its end, which counts only before the next one or the last end."""
        lead = yield from self._take(tags.lead)
        if lead is None:
            return None
        if "string" not in types and lead["next"] in ("{", "["):
            return (yield from self._take(tags.json_end)) if (yield from self._value()) else None
        self._at = lead.end("layout")
        unsure: list[str] | None = None if set(types) == {"string"} else []  # None: it is a text
        num_unsure = 0
        if unsure is None:
            self._write('"')
        while True:
            found = tags.end.search(self._held, self._at, partial=not self._is_last)
            text = self._held[self._at : found.start() if found else len(self._held) - self._is_last]
            is_over = found is not None and not found.partial
            self._move(found.end() if is_over else self._at + len(text))
            if unsure is not None:
                unsure.append(text)
                num_unsure += len(text)
            if unsure is None:
                self._write(escaped(text))
            elif num_unsure > MOST_UNSURE_CHARS:
                self._write('"' + escaped("".join(unsure)))
                unsure = None
            if is_over:
                self._write('"' if unsure is None else as_value("".join(unsure), types))
                return found
            if self._is_last:
                return None
            yield

    # JSON, and what stands for it.

    def _listed(self, closer: str, read_item: Callable[[], Reading[bool]], written: str = "") -> Reading[bool]:
        """Any number of items with commas between them, up to the closer."""
        yield from self._space()
        if (yield from self._mark(closer, written)):
            return True
        while (yield from read_item()):
            yield from self._space()
            if (yield from self._mark(closer, written)):
                return True
            if not (yield from self._mark(",")):
                break
            yield from self._space()
        return False

    def _value(self, depth: int = 0) -> Reading[bool]:
        """`depth`: number of objects and arrays around it."""
        if quote := (yield from self._take(_QUOTES[self._format.style])):
            return (yield from self._string(quote[0])) != ""
        if opened := (yield from self._take(_BRACKET)):
            self._write(opened[0])
            if depth == MAX_JSON_DEPTH:
                return False
            if opened[0] == "[":
                return (yield from self._listed("]", lambda: self._value(depth + 1)))
            return (yield from self._listed("}", lambda: self._member(depth + 1)))
        word = yield from self._take(_WORD)
        text = word[0] if word else ""
        if self._format.style != "json":
            text = CONSTANTS.get(text, text)
        self._write(text)
        return _SCALAR.fullmatch(text) is not None

    def _member(self, depth: int, colon: str = ":") -> Reading[bool]:
        return (yield from self._key(colon)) != "" and (yield from self._value(depth))

    def _key(self, colon: str = ":") -> Reading[str]:
        """A key and its colon; returns the key as JSON."""
        key = ""
        if quote := (yield from self._take(_QUOTES[self._format.style])):
            key = yield from self._string(quote[0])
        elif self._format.style == "gemma" or colon == "=":
            bare = yield from self._take(_BARE_KEY)
            key = f'"{escaped(bare[0])}"' if bare else ""
            self._write(key)
        if key:
            yield from self._space()
            key = key if (yield from self._mark(colon, ":")) else ""
            yield from self._space()
        return key

    def _string(self, quote: str) -> Reading[str]:
        """Reads a string behind its quote, up to the next one. Returns it as JSON; "" if it is malformed."""
        style = "json" if self._format.style == "xml" else self._format.style
        parts = ['"']
        self._write('"')
        while part := (yield from self._take(_STRINGS[style, quote])):
            match part.lastgroup:
                case "end":
                    written = '"'
                case "lone":
                    written = "\\\\"
                case "escape" if style == "json" or part[0][1] in 'u/"\\bfnrt':
                    written = part[0]
                case "escape":
                    written = json.dumps(codecs.decode(part[0], "unicode_escape"))[1:-1]
                case _:
                    written = part[0] if style == "json" else escaped(part[0])
            self._write(written)
            parts.append(written)
            if part.lastgroup == "end":
                return "".join(parts)
        return ""
