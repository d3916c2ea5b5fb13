"""Finds tool calls in text that arrives in pieces: text in, events out. Pure.

How the text is split does not matter. Text outside of calls is content, except markers and whitespace next to calls.
"""

import json
import re
import string
import sys
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeVar

from gateway.tools.formats import Format
from gateway.tools.json_text import JsonText
from runtime.peer_input import MAX_JSON_DEPTH

# A call is held back until its arguments are longer than this: if they are malformed by then, it is content. Longer
# arguments are streamed and remain a call.
HELD_ARGUMENTS_CHARS = 2048
_ANY_NUMBER = sys.maxsize
_EXTRA_KEYS = ("id", "type")  # that models add to name and arguments; an object with other keys is content, not a call
_END = ""  # follows the last character
_SPACE = " \t\r\n"
_WORD_CHARS = string.ascii_letters + string.digits + "_-"  # of names and ids
_SCALAR_CHARS = string.ascii_letters + string.digits + "+-."
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # an escape or its beginning

T = TypeVar("T")
_Reading = Generator[None, str, T]  # takes one character at each step; returns a T


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of a call."""

    index: int  # among the calls of this answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, a JSON object; not empty.

    As the model wrote it, except that control characters in strings are escaped, which free models do not do.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call, and all of it."""

    index: int
    id: str
    name: str
    arguments: str
    is_whole: bool = True  # not cut off or malformed


CallEvent = CallBegin | Arguments | CallEnd
Event = Content | CallEvent


@dataclass(slots=True)
class _Call:
    """A call that is being read."""

    name: str = ""
    arguments: str | None = None  # JSON; None: none read yet
    begun: CallBegin | None = None  # once it is emitted, though it has not ended


class CallParser:
    """Reads one answer by recursive descent. `is_trusted`: a grammar makes calls well-formed, so none is held back.

    Readings share a lookahead, `_char`, and append what they take to `_held`, until it is emitted as content or
    arguments, or dropped as layout. A reading that returns False or "" has taken the well-formed part and stopped after
    it. JSON is that of RFC 8259, nested up to MAX_JSON_DEPTH; its strings may hold control characters.
    """

    def __init__(
        self, format: Format, names: Collection[str], new_id: Callable[[], str], *, is_trusted: bool = False
    ) -> None:
        self._format = format
        self._names = frozenset(names)
        self._new_id = new_id
        self._held_chars = 0 if is_trusted else HELD_ARGUMENTS_CHARS
        self._char = _END
        self._held: list[str] = []
        self._events: list[Event] = []
        self._call = _Call()  # whose arguments are read
        self._max_held = _ANY_NUMBER  # characters, before that call is emitted
        self._stream: JsonText | None = None  # the held text is arguments of the last call emitted
        self.num_calls = 0
        self.are_whole = True  # the calls
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """Returns the events that are now certain."""
        for char in text:
            self._reading.send(char)
            if len(self._held) > self._max_held:  # the arguments are too long to be held back
                self._begin(self._call)
                self._call.arguments, self._stream = "", JsonText(replaces_halves=True)
                del self._held[: self._max_held - self._held_chars]
                self._max_held = _ANY_NUMBER
        self._emit_arguments()
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Returns the remaining events. Call it last, at the end of the text."""
        try:
            self._reading.send(_END)
        except StopIteration:
            return self._events
        raise AssertionError("the reading ends with the text")

    def _drop(self) -> str:
        """Removes and returns the held text."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def _show(self) -> None:
        """Emits the held text as content."""
        text, last = self._drop(), self._events[-1] if self._events else None
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + text)
        elif text:
            self._events.append(Content(text))

    def _begin(self, call: _Call) -> CallBegin:
        call.begun = CallBegin(self.num_calls, self._new_id(), call.name)
        self._events.append(call.begun)
        self.num_calls += 1
        return call.begun

    def _emit_arguments(self, *, is_last: bool = False) -> None:
        if self._stream is not None and (text := self._stream.push(self._drop(), is_last=is_last)):
            self._call.arguments = f"{self._call.arguments}{text}"
            self._events.append(Arguments(self.num_calls - 1, text))

    def _end(self, call: _Call, is_whole: bool) -> bool:
        """Emits a call that was held back, or ends one that was streamed. Returns `is_whole`."""
        begun = call.begun
        if is_whole:
            self._drop()
            if begun is None:
                begun, call.arguments = self._begin(call), call.arguments or "{}"
                self._events.append(Arguments(begun.index, call.arguments))
        if begun is not None:
            self._events.append(CallEnd(begun.index, begun.id, begun.name, call.arguments or "", is_whole))
            self.are_whole &= is_whole
        return is_whole

    # Answers and calls.

    def _answer(self) -> _Reading[None]:
        """Between its steps, `_held` is whitespace: content, unless it is next to a call."""
        self._char = yield
        yield from self._space()
        is_behind_call = False
        if self._format.is_bare and self._char == "{":
            is_behind_call = yield from self._shown_unless(self._objects())
        while self._char != _END:
            if self._char == self._format.opener[0]:
                is_behind_call = yield from self._shown_unless(self._opened())
            else:
                self._held.append(self._char)
                self._show()
                self._char = yield
                is_behind_call = False
            if self._char in _SPACE:
                yield from self._space()
        if not is_behind_call:
            self._show()

    def _shown_unless(self, calls: _Reading[bool]) -> _Reading[bool]:
        is_whole = yield from calls
        if not is_whole:
            self._show()
        return is_whole

    def _opened(self) -> _Reading[bool]:
        """An opener and the calls after it."""
        if not (yield from self._mark(self._format.opener)):
            return False
        match self._format.form:
            case "array":
                num_before = self.num_calls
                is_whole = (yield from self._listed("[", "]", self._object)) and self.num_calls > num_before
                if is_whole:
                    self._drop()
                return is_whole
            case "named":
                return (yield from self._named())
            case "object":
                return (yield from self._objects())

    def _objects(self) -> _Reading[bool]:
        """Calls and their closer. Between them models write ";", ",", a line break, or nothing."""
        closer, opener = self._format.closer, self._format.opener
        while (yield from self._object()):
            yield from self._space()
            if closer and self._char == closer[0]:
                behind = yield from self._one_of(closer, opener)  # some models forget the closer
                if behind == closer:
                    self._drop()
                if behind != opener:
                    return bool(behind)
                yield from self._space()
            elif self._char != "{":
                is_over = not ((yield from self._mark(";")) or (yield from self._mark(",")))
                if self._char == _END:
                    self._drop()
                if is_over or self._char == _END:
                    return True
        return False

    def _named(self) -> _Reading[bool]:
        id_marker, args_marker = self._format.id_marker, self._format.args_marker
        name = yield from self._run(_WORD_CHARS)
        marker = yield from self._one_of(id_marker, args_marker)
        if marker == id_marker:
            yield from self._run(_WORD_CHARS)
            marker = yield from self._one_of(args_marker)
        yield from self._space()
        if marker != args_marker or name not in self._names or self._char != "{":
            return False
        call = _Call(name)
        return self._end(call, (yield from self._arguments(call)))

    def _object(self) -> _Reading[bool]:
        """One call as an object with a name and arguments."""
        call = _Call()
        is_whole = yield from self._listed("{", "}", lambda: self._field(call))
        return self._end(call, is_whole and bool(call.name))

    def _field(self, call: _Call) -> _Reading[bool]:
        written = yield from self._key()
        key = json.loads(written, strict=False) if written else None
        if key == "name" and not call.name:
            name = yield from self._string()
            call.name = json.loads(name, strict=False) if name else ""
            return call.name in self._names
        if key == self._format.arguments_key and call.arguments is None and self._char == "{":
            return (yield from self._arguments(call))
        return key in _EXTRA_KEYS and bool((yield from self._value()))

    def _arguments(self, call: _Call) -> _Reading[bool]:
        """An object."""
        self._call, start = call, len(self._held)
        if call.name:
            self._max_held = start + self._held_chars
        is_whole = bool((yield from self._value()))
        self._emit_arguments(is_last=True)
        self._max_held, self._stream = _ANY_NUMBER, None
        if call.begun is None:
            call.arguments = JsonText(replaces_halves=True).push("".join(self._held[start:]), is_last=True)
        return is_whole

    # JSON and literals.

    def _take_while(self, is_part: Callable[[str], object]) -> _Reading[str]:
        """Takes and returns the longest text whose beginnings are all parts."""
        taken = ""
        while self._char != _END and is_part(taken + self._char):
            taken += self._char
            self._held.append(self._char)
            self._char = yield
        return taken

    def _run(self, chars: str) -> _Reading[str]:
        """Takes and returns all next characters that are among these."""
        return self._take_while(lambda part: part[-1] in chars)

    def _space(self) -> _Reading[str]:
        return self._run(_SPACE)

    def _one_of(self, *texts: str) -> _Reading[str]:
        """Takes and returns one of the texts, of which none begins another; else takes the matching part."""
        taken = yield from self._take_while(lambda part: any(text.startswith(part) for text in texts))
        return taken if taken in texts else ""

    def _mark(self, text: str) -> _Reading[str]:
        """The text, and space after it."""
        taken = yield from self._one_of(text)
        if taken:
            yield from self._space()
        return taken

    def _listed(self, opener: str, closer: str, read_item: Callable[[], _Reading[object]]) -> _Reading[bool]:
        """Any number of items between brackets, with commas between them."""
        if not (yield from self._mark(opener)):
            return False
        if (yield from self._one_of(closer)):
            return True
        while (yield from read_item()):
            yield from self._space()
            if (yield from self._one_of(closer)):
                return True
            if not (yield from self._mark(",")):
                break
        return False

    def _value(self, depth: int = 0) -> _Reading[object]:
        """`depth`: number of objects and arrays around it."""
        if self._char == '"':
            return (yield from self._string())
        if self._char not in ("{", "["):
            return _SCALAR.fullmatch((yield from self._run(_SCALAR_CHARS)))
        if depth == MAX_JSON_DEPTH:
            return False
        if self._char == "[":
            return (yield from self._listed("[", "]", lambda: self._value(depth + 1)))
        return (yield from self._listed("{", "}", lambda: self._member(depth + 1)))

    def _member(self, depth: int) -> _Reading[object]:
        return (yield from self._key()) and (yield from self._value(depth))

    def _key(self) -> _Reading[str]:
        """A key and its colon; returns the key as written."""
        key = yield from self._string()
        if key:
            yield from self._space()
        return key if key and (yield from self._mark(":")) else ""

    def _string(self) -> _Reading[str]:
        """Returns it as written, with its quotes."""
        written = yield from self._one_of('"')
        while written and self._char not in (_END, '"'):
            if self._char == "\\":
                part = yield from self._take_while(_ESCAPE_PART.fullmatch)
                if not _ESCAPE.fullmatch(part):
                    return ""
            else:
                part = self._char
                self._held.append(self._char)
                self._char = yield
            written += part
        return written + '"' if written and (yield from self._one_of('"')) else ""
