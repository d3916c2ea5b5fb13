"""Finds tool calls in text that arrives in pieces: text in, events out. Pure.

How the text is split does not matter. Text outside of calls is content, except markers and whitespace next to calls.
transformers' ResponseParser does not do: a malformed region raises an error and loses the text, arguments come only
when their region ends, a marker within a string ends it, and what was read stays in its buffer.
"""

import codecs
import json
import re
import string
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.tools.formats import Format, Parameters
from gateway.tools.json_text import JsonText
from gateway.tools.values import CONSTANTS, JSON_TYPES, argument_types, as_value, escaped
from runtime.peer_input import MAX_JSON_DEPTH

# A call is held back until its arguments are longer than this: if they are malformed by then, it is content. Longer
# arguments are streamed and remain a call.
HELD_ARGUMENTS_CHARS = 2048
MOST_UNSURE_CHARS = 1 << 16  # of a value in XML that may be a text or other JSON: longer ones are texts
MOST_KEY_CHARS = 256  # of names that no JSON string holds
MOST_LAYOUT_CHARS = 16  # whitespace between a value's end and what must follow it
_ANY_NUMBER = sys.maxsize
_EXTRA_KEYS = ("id", "type", "tool_call_id")  # that models add; an object with other keys is content, not a call
_END = ""  # follows the last character
_SPACE = " \t\r\n"
_WORD_CHARS = string.ascii_letters + string.digits + "_-"  # of names and ids
_SCALAR_CHARS = string.ascii_letters + string.digits + "+-."
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # an escape or its beginning
_HEX = "[0-9a-fA-F]"
_PYTHON_ESCAPE = re.compile(rf"\\(?:[\\'\"/abfnrtv0]|x{_HEX}{{2}}|u{_HEX}{{4}}|U00(?:0{_HEX}|10){_HEX}{{4}})")
_PYTHON_ESCAPE_PART = re.compile(rf"\\(?:[\\'\"/abfnrtv0]|x{_HEX}{{0,2}}|u{_HEX}{{0,4}}|U{_HEX}{{0,8}})?")

_NO_KEY_CHARS = frozenset(":=,{}[]()<>\"'" + _SPACE)
_QUOTES = {"json": ('"',), "xml": ('"',), "python": ("'", '"'), "gemma": ('<|"|>',)}
_STRUCTURE = {"python": {"(": "{", ")": "}", "=": ":"}}  # what a style writes |-> JSON's

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

    JSON is as the model wrote it, except that control characters in strings are escaped, which free models do not do.
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
    arguments: list[str] | None = None  # parts of the JSON; None: none read yet
    begun: CallBegin | None = None  # once it is emitted, though it has not ended


@dataclass(slots=True)
class _Written:
    """Arguments as JSON while they are read."""

    parts: list[str] = field(default_factory=list)  # not emitted yet
    stream: JsonText = field(default_factory=lambda: JsonText(replaces_halves=True))
    copies: bool = True  # characters that are read are JSON as they are
    num_used: int = 0  # held characters that are in it


class CallParser:
    """Reads one answer by recursive descent. `is_trusted`: a grammar makes calls well-formed, so none is held back.

    Readings share a lookahead, `_char`, and append what they take to `_held`, until it is emitted as content, dropped
    as layout, or is part of arguments that were emitted. A reading that returns False or "" has taken the well-formed
    part and stopped after it. JSON is that of RFC 8259, nested up to MAX_JSON_DEPTH; its strings may hold control
    characters.
    """

    def __init__(
        self,
        format: Format,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        is_trusted: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        """`schemas`: name |-> schema of the arguments, which types the values in XML; without one, all types may be."""
        self._format = format
        self._names = frozenset(names)
        self._schemas = schemas
        self._types_of: dict[tuple[str, str], Collection[str]] = {}  # by call and argument
        self._new_id = new_id
        self._held_chars = 0 if is_trusted else HELD_ARGUMENTS_CHARS
        self._quotes = _QUOTES[format.style]
        self._structure = _STRUCTURE.get(format.style, {})
        self._char = _END
        self._held: list[str] = []
        self._events: list[Event] = []
        self._shown: list[str] = []  # the content after them
        self._call = _Call()  # whose arguments are read
        self._max_held = _ANY_NUMBER  # characters, before that call is emitted
        self._written: _Written | None = None  # those arguments
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
                self._max_held = _ANY_NUMBER
        self._emit_arguments()
        self._emit()
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Returns the remaining events. Call it last, at the end of the text."""
        try:
            self._reading.send(_END)
        except StopIteration:
            self._emit()
            return self._events
        raise AssertionError("the reading ends with the text")

    def _drop(self) -> str:
        """Removes and returns the held text."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def _show(self) -> None:
        """Emits the held text as content."""
        self._shown += self._held
        self._held.clear()

    def _emit(self, *events: Event) -> None:
        """Emits what is shown, and then events."""
        if self._shown:
            self._events.append(Content("".join(self._shown)))
            self._shown.clear()
        self._events += events

    def _begin(self, call: _Call) -> CallBegin:
        call.begun = CallBegin(self.num_calls, self._new_id(), call.name)
        self._emit(call.begun)
        self.num_calls += 1
        return call.begun

    def _emit_arguments(self, *, is_last: bool = False) -> None:
        """Emits what was written, if its call is emitted: then the text that it was read from is no longer held."""
        written, call = self._written, self._call
        if written is None or call.begun is None:
            return
        text = written.stream.push("".join(written.parts), is_last=is_last)
        written.parts.clear()
        del self._held[: len(self._held) if written.copies else written.num_used]
        written.num_used = 0
        if text:
            call.arguments = call.arguments or []
            call.arguments.append(text)
            self._emit(Arguments(call.begun.index, text))

    def _end(self, call: _Call, is_whole: bool) -> bool:
        """Emits a call that was held back, or ends one that was streamed. Returns `is_whole`."""
        begun, arguments = call.begun, "".join(call.arguments or ())
        if is_whole:
            self._drop()
            if begun is None:
                begun, arguments = self._begin(call), arguments or "{}"
                self._emit(Arguments(begun.index, arguments))
        if begun is not None:
            self._emit(CallEnd(begun.index, begun.id, begun.name, arguments, is_whole))
            self.are_whole &= is_whole
        return is_whole

    # Answers and calls.

    def _answer(self) -> _Reading[None]:
        """Between its steps, `_held` is whitespace: content, unless it is next to a call."""
        self._char = yield
        yield from self._space()
        is_behind_call = False
        if self._format.is_bare and self._char == self._format.bare_begin:
            is_behind_call = yield from self._shown_unless(self._calls())
        while self._char != _END:
            if self._format.opener and self._char == self._format.opener[0]:
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
        return (yield from self._mark(self._format.opener)) != "" and (yield from self._calls())

    def _calls(self) -> _Reading[bool]:
        form, closer = self._format.form, self._format.closer
        read = self._object if form in ("object", "array") else self._named
        if form in ("object", "named") or (form == "array" and self._char == "{"):
            return (yield from self._run_of_calls(read))
        num_before = self.num_calls
        if not (yield from self._listed("[", "]", read)) or self.num_calls == num_before:
            return False
        self._drop()
        yield from self._space()
        return (yield from self._closed(closer))

    def _closed(self, closer: str) -> _Reading[bool]:
        """A marker that some models forget."""
        if closer and self._char == closer[0]:
            if not (yield from self._words(closer)):
                return False
            self._drop()
        return True

    def _run_of_calls(self, read: Callable[..., _Reading[bool]]) -> _Reading[bool]:
        """Calls and their closer. Between them models write ";", ",", a line break, or nothing."""
        form, call = self._format, self._format.call
        marks = [mark for mark in (form.closer, form.opener, call) if mark]
        has_opened = False
        while (yield from read(has_opened)):
            if form.form == "named" and not form.closer:
                return True
            yield from self._space()
            has_opened = False
            if form.closer and self._char in [mark[0] for mark in marks]:
                behind = yield from self._one_of(*marks)
                if behind == form.closer:
                    self._drop()
                if behind in ("", form.closer):
                    return bool(behind)
                yield from self._space()
                has_opened = behind == call
            elif self._char == _END or not (self._char in _WORD_CHARS if form.form == "named" else self._char == "{"):
                is_over = not ((yield from self._mark(";")) or (yield from self._mark(",")))
                if self._char == _END:
                    self._drop()
                if is_over or self._char == _END:
                    return True
        return False

    def _named(self, has_opened: bool = False) -> _Reading[bool]:
        """A name and arguments. `has_opened`: the text before the name is taken."""
        form = self._format
        if form.call and not has_opened and not (yield from self._words(form.call)):
            return False
        name = yield from self._run(_WORD_CHARS)
        yield from self._space()
        if form.args_marker:
            marker = yield from self._one_of(*[mark for mark in (form.id_marker, form.args_marker) if mark])
            if marker == form.id_marker:
                yield from self._run(_WORD_CHARS)
                marker = yield from self._one_of(form.args_marker)
            yield from self._space()
            if marker != form.args_marker:
                return False
        opens = {"python": "(", "xml": self._char}.get(form.style, "{")
        if name not in self._names or self._char != opens:
            return False
        call = _Call(name)
        if not self._end(call, (yield from self._arguments(call))):
            return False
        if form.call_end:
            yield from self._space()
        return (yield from self._closed(form.call_end))

    def _object(self, _has_opened: bool = False) -> _Reading[bool]:
        """One call as an object with a name and arguments."""
        call = _Call()
        is_whole = yield from self._listed("{", "}", lambda: self._field(call))
        return self._end(call, is_whole and bool(call.name))

    def _field(self, call: _Call) -> _Reading[bool]:
        written = yield from self._key()
        key = json.loads(written, strict=False) if written else None
        if key == self._format.name_key and not call.name:
            name = yield from self._string()
            call.name = json.loads(name, strict=False) if name else ""
            return call.name in self._names
        if key == self._format.arguments_key and call.arguments is None and self._char == "{":
            return (yield from self._arguments(call))
        return key in _EXTRA_KEYS and bool((yield from self._value()))

    def _arguments(self, call: _Call) -> _Reading[bool]:
        """An object."""
        self._call, self._written = call, _Written()
        if call.name:
            self._max_held = len(self._held) + self._held_chars
        parameters = self._format.parameters
        if parameters is not None:
            is_whole = yield from self._parameters(parameters, call.name)
        else:
            is_whole = bool((yield from self._value()))
        self._emit_arguments(is_last=True)
        if call.begun is None:
            call.arguments = [self._written.stream.push("".join(self._written.parts), is_last=True)]
        self._max_held, self._written = _ANY_NUMBER, None
        return is_whole

    # XML.

    def _types(self, name: str, key: str) -> Collection[str]:
        """An argument's types."""
        if (name, key) not in self._types_of:
            self._types_of[name, key] = (
                argument_types(self._schemas[name], key) if name in self._schemas else JSON_TYPES
            )
        return self._types_of[name, key]

    def _parameters(self, form: Parameters, name: str) -> _Reading[bool]:
        self._copy(False)
        self._write("{")
        separator = ""
        mark = yield from self._one_of(form.begin, form.after)
        while mark == form.begin:
            key = yield from self._short_without((form.between[0][0], "\n"))
            if len(form.between) == 1:
                between = yield from self._words(form.between[0])
            else:
                between = yield from self._one_of(*form.between)
            if not key or not between:
                return False
            kinds = self._types(name, key)
            if len(form.between) > 1:
                kinds = ("string",) if between == form.between[0] else JSON_TYPES - {"string"}
            self._write(f'{separator}"{escaped(key)}": ')
            separator = ", "
            mark = yield from self._parameter_value(form, kinds)
        if mark == form.after:
            self._write("}")
        return mark == form.after

    def _parameter_value(self, form: Parameters, types: Collection[str]) -> _Reading[str]:
        """Writes the value. Returns the mark behind its end: of the next argument, or of the end of all."""
        lead = yield from self._space(MOST_LAYOUT_CHARS)
        if "string" in types or self._char not in ("{", "["):
            return (yield from self._text_value(form, lead, types))
        self._copy(True)
        is_whole = yield from self._value()
        self._copy(False)
        yield from self._space()
        if not is_whole or not (yield from self._mark(form.end)):
            return ""
        return (yield from self._one_of(form.begin, form.after))

    def _text_value(self, form: Parameters, tail: str, types: Collection[str]) -> _Reading[str]:
        """A value as text. Its end counts only where the next argument or the end of all follows.

        `tail`: its beginning; then what may belong to its end.
        """
        follows = (form.begin, form.after)
        most = len(form.end) + MOST_LAYOUT_CHARS + max(map(len, follows))
        is_end = re.compile(rf"{re.escape(form.end)}\s{{0,{MOST_LAYOUT_CHARS}}}({'|'.join(map(re.escape, follows))})\Z")
        layout = self._format.layout
        tail = tail.removeprefix(layout) if layout else tail
        unsure: list[str] | None = None if set(types) == {"string"} else []  # None: it is a text
        num_unsure = 0
        if unsure is None:
            self._write('"')
        while self._char != _END:
            self._keep()
            tail += self._char
            is_candidate = self._char in (follows[0][-1], follows[1][-1])
            self._char = yield
            found = is_end.search(tail) if is_candidate else None
            if found:
                text = tail[: found.start()]
                text = text.removesuffix(layout) if layout else text
                if unsure is None:
                    self._write(escaped(text) + '"')
                else:
                    self._write(as_value("".join(unsure) + text, types))
                return found[1]
            begin = tail.find(form.end[0])
            cut = max(len(tail) if begin < 0 else begin, len(tail) - most)
            cut -= tail[:cut].endswith("\n")
            if cut <= 0:
                continue
            text, tail = tail[:cut], tail[cut:]
            if unsure is None:
                self._write(escaped(text), len(tail))
                continue
            unsure.append(text)
            num_unsure += cut
            if num_unsure > MOST_UNSURE_CHARS:
                self._write('"' + escaped("".join(unsure)), len(tail))
                unsure = None
        return ""

    # JSON and literals.

    def _keep(self) -> None:
        """Takes the character; the next one is to follow."""
        self._held.append(self._char)
        if self._written is not None and self._written.copies:
            self._written.parts.append(self._structure.get(self._char, self._char))

    def _copy(self, copies: bool) -> bool:
        """Whether characters are JSON as they are. Returns what was before."""
        written = self._written
        if written is None:
            return copies
        before, written.copies = written.copies, copies
        written.num_used = len(self._held)
        return before

    def _write(self, text: str, num_left: int = 0) -> None:
        """Adds JSON to the arguments; all that is held but the last `num_left` characters is in it."""
        if self._written is not None:
            self._written.parts.append(text)
            self._written.num_used = len(self._held) - num_left

    def _take_while(self, is_part: Callable[[str], object]) -> _Reading[str]:
        """Takes and returns the longest text whose beginnings are all parts. For short ones."""
        taken = ""
        while self._char != _END and is_part(taken + self._char):
            taken += self._char
            self._keep()
            self._char = yield
        return taken

    def _run(self, chars: str, most: int = _ANY_NUMBER) -> _Reading[str]:
        """Takes and returns all next characters that are among these, at most so many."""
        taken: list[str] = []
        while self._char != _END and self._char in chars and len(taken) < most:
            taken.append(self._char)
            self._keep()
            self._char = yield
        return "".join(taken)

    def _space(self, most: int = _ANY_NUMBER) -> _Reading[str]:
        return self._run(_SPACE, most)

    def _one_of(self, *texts: str) -> _Reading[str]:
        """Takes and returns one of the texts, of which none begins another; else takes the matching part."""
        taken = yield from self._take_while(lambda part: any(text.startswith(part) for text in texts))
        return taken if taken in texts else ""

    def _words(self, text: str) -> _Reading[str]:
        """The text, with any whitespace for its line breaks."""
        for rank, word in enumerate(text.split("\n")):
            if rank:
                yield from self._space()
            if not (yield from self._one_of(word)):
                return ""
        return text

    def _mark(self, text: str) -> _Reading[str]:
        """The text, and space after it."""
        taken = yield from self._words(text)
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
        if self._char in [quote[0] for quote in self._quotes]:
            return (yield from self._string())
        if depth == 0 and self._format.style == "python":
            return (yield from self._listed("(", ")", lambda: self._member(1, "=")))
        if self._char not in ("{", "["):
            return (yield from self._scalar())
        if depth == MAX_JSON_DEPTH:
            return False
        if self._char == "[":
            return (yield from self._listed("[", "]", lambda: self._value(depth + 1)))
        return (yield from self._listed("{", "}", lambda: self._member(depth + 1)))

    def _scalar(self) -> _Reading[object]:
        if self._format.style == "json":
            return _SCALAR.fullmatch((yield from self._run(_SCALAR_CHARS)))
        copies = self._copy(False)
        text = yield from self._run(_SCALAR_CHARS, MOST_KEY_CHARS)
        text = CONSTANTS.get(text, text)
        if is_whole := _SCALAR.fullmatch(text):
            self._write(text)
            self._copy(copies)
        return is_whole

    def _member(self, depth: int, colon: str = ":") -> _Reading[object]:
        return (yield from self._key(colon)) and (yield from self._value(depth))

    def _key(self, colon: str = ":") -> _Reading[str]:
        """A key and its colon; returns the key as written."""
        if self._char in [quote[0] for quote in self._quotes]:
            key = yield from self._string()
        else:
            key = yield from self._bare_key(colon)
        if key:
            yield from self._space()
        return key if key and (yield from self._mark(colon)) else ""

    def _bare_key(self, colon: str) -> _Reading[str]:
        if not (self._format.style == "gemma" or colon == "="):
            return ""
        copies = self._copy(False)
        key = yield from self._short_without(_NO_KEY_CHARS)
        if key:
            self._write(f'"{escaped(key)}"')
            self._copy(copies)
        return key

    def _short_without(self, chars: Collection[str]) -> _Reading[str]:
        return self._take_while(lambda part: part[-1] not in chars and len(part) <= MOST_KEY_CHARS)

    def _string(self) -> _Reading[str]:
        """Returns it as written, with its quotes; of other styles than JSON only whether it is whole."""
        if self._quotes != ('"',):
            return (yield from self._quoted())
        written = [(yield from self._one_of('"'))]
        while written[0] and self._char not in (_END, '"'):
            if self._char == "\\":
                written.append((yield from self._take_while(_ESCAPE_PART.fullmatch)))
                if not _ESCAPE.fullmatch(written[-1]):
                    return ""
            else:
                written.append(self._char)
                self._keep()
                self._char = yield
        return "".join(written) + '"' if written[0] and (yield from self._one_of('"')) else ""

    def _quoted(self) -> _Reading[str]:
        """A string of another style, written as JSON's."""
        copies = self._copy(False)
        quote = yield from self._one_of(*self._quotes)
        if not quote:
            return ""
        self._write('"')
        while self._char != _END:
            if self._char == quote[0]:
                part = yield from self._take_while(quote.startswith)
                if part == quote:
                    self._write('"')
                    self._copy(copies)
                    return quote
                self._write(escaped(part))
            elif self._char == "\\" and self._format.style == "python":
                part = yield from self._take_while(_PYTHON_ESCAPE_PART.fullmatch)
                if part == "\\" and self._char not in (_END, "x", "u", "U", "\n"):  # Python keeps unknown escapes
                    self._write("\\\\")
                    continue
                if not _PYTHON_ESCAPE.fullmatch(part):
                    return ""
                is_json = part[1] in 'u/"\\bfnrt'
                self._write(part if is_json else json.dumps(codecs.decode(part, "unicode_escape"))[1:-1])
            else:
                char = self._char
                self._keep()
                self._write(escaped(char))
                self._char = yield
        return ""
