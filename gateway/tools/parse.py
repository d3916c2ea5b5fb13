"""Finds tool calls in text that arrives in pieces: text in, events out. Pure.

How the text is split does not matter. Text outside of calls is content, except markers and whitespace next to calls.
transformers' ResponseParser does not do: a malformed region raises an error and loses the text, arguments come only
when their region ends, a marker within a string ends it, and what was read stays in its buffer.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]

from gateway.tools.arguments import ANY_NUMBER, END, GAP, WHITESPACE, ArgumentReader, Reading, compiled, loose
from gateway.tools.json_text import JsonText
from gateway.tools.values import JSON_TYPES, argument_types
from wire.dialects import ARGUMENTS, NAME, NUMBER, Format

# A call is held back until its arguments are longer than this: if they are malformed by then, it is content. Longer
# arguments are streamed and remain a call.
HELD_ARGUMENTS_CHARS = 2048
_EXTRA_KEYS = ("id", "type", "tool_call_id")  # that models add; an object with other keys is content, not a call
_WORD = "[a-zA-Z0-9_-]"
_LIST = compiled(rf"{GAP}\[")
_NEVER, _BRACKET = "(?!)", r"\["


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


class _Marks(NamedTuple):
    """The texts around calls, as expressions."""

    first: Any  # what begins calls at the beginning of an answer
    opener: Any  # and later
    head: Any  # of a call, up to its arguments
    behind: Any  # a call: what ends all, or `more`, which begins another
    behind_in_list: Any
    closer: Any  # of a list
    keys: tuple[str, ...]  # of an object's name and arguments


@cache
def _marks(format: Format) -> _Marks:
    opener, closer, id_marker = loose(format.opener) or _NEVER, loose(format.closer) or _NEVER, format.id_marker
    lead, _, between = format.begin.partition(NAME)
    lead = (lead if format.before else lead.removeprefix(format.opener)).strip()
    if id_marker:
        between = between.rpartition(id_marker)[2].lstrip(NUMBER).removeprefix("json")
    an_id = f"(?:{regex.escape(id_marker)}{_WORD}*{GAP})?" if id_marker else ""
    follows = {"xml": f"(?={GAP}<)", "python": ""}.get(format.style, r"(?=\{)")  # the beginning of arguments
    end = format.end.lstrip("})").strip() if format.before and format.style != "xml" else ""
    more = r"\{" if format.is_object else loose(lead) or (_WORD if format.before else _NEVER)
    bare = rf"|(?={more if format.is_object else _BRACKET})" if format.bare_opener else ""
    return _Marks(
        compiled(opener + bare),
        compiled(opener),
        compiled(f"{GAP}{loose(lead)}{GAP}(?P<name>{_WORD}{{1,256}}+){GAP}{an_id}{loose(between)}{GAP}{follows}"),
        compiled(f"{GAP}(?:{loose(end)})?{GAP}(?:{closer}|[;,]?{GAP}(?=(?P<more>{more})|{END}))"),
        compiled(rf"{GAP}(?:\]|,(?P<more>))"),
        compiled(GAP + closer),
        tuple(regex.findall(rf'"(\w+)": (?="?(?:{NAME}|{ARGUMENTS}))', format.call)),
    )


@dataclass(slots=True)
class _Call:
    """A call that is being read."""

    name: str = ""
    arguments: list[str] | None = None  # parts of the JSON; None: none read yet
    begun: CallBegin | None = None  # once it is emitted, though it has not ended


class CallParser(ArgumentReader):
    """Reads one answer. `is_trusted`: a grammar makes calls well-formed, so none is held back.

    `begins`: an answer that does not begin with a call has none: its text has a form, in which markers are text.

    Text stays in `_held` until it is emitted as content, dropped as layout, or is part of arguments that were emitted.
    """

    def __init__(
        self,
        format: Format,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        is_trusted: bool = False,
        begins: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        """`schemas`: name |-> schema of the arguments, which types the values in XML; without one, all types may be."""
        super().__init__(format)
        self._marks = _marks(format)
        self._names = frozenset(names)
        self._schemas = schemas
        self._types_of: dict[tuple[str, str], Collection[str]] = {}  # by call and argument
        self._new_id = new_id
        self._begins = begins
        self._held_chars = 0 if is_trusted else HELD_ARGUMENTS_CHARS
        self._layout: list[str] = []  # whitespace before what is held
        self._events: list[Event] = []
        self._shown: list[str] = []  # the content after them
        self._has_shown = False
        self._call = _Call()  # whose arguments are read
        self._stream = JsonText()
        self.num_calls = 0
        self.are_whole = True  # the calls
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """Returns the events that are now certain."""
        if text:
            self._held += text
            next(self._reading)
        self._emit_arguments()
        self._emit()
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Returns the remaining events. Call it last, at the end of the text."""
        self._held += END
        self._is_last = True
        next(self._reading, None)
        self._emit()
        return self._events

    def _show(self, end: int) -> None:
        """Emits whitespace and text up to there as content."""
        self._shown += [*self._layout, self._held[:end]]
        self._has_shown = True
        self._drop(end)

    def _drop(self, end: int) -> None:
        self._layout.clear()
        self._held, self._at = self._held[end:], 0

    def _emit(self, *events: Event) -> None:
        """Emits what is shown, and then events."""
        if text := "".join(self._shown):
            self._events.append(Content(text))
        self._shown.clear()
        self._events += events

    def _begin(self, call: _Call) -> CallBegin:
        self._layout.clear()
        call.begun = CallBegin(self.num_calls, self._new_id(), call.name)
        self._emit(call.begun)
        self.num_calls += 1
        return call.begun

    def _overflow(self) -> None:
        self._begin(self._call)

    def _emit_arguments(self, *, is_last: bool = False) -> None:
        """Emits what was read, if its call is emitted: then the text that it was read from is no longer held."""
        call, json_parts = self._call, self._json
        if json_parts is None or (call.begun is None and not is_last):
            return
        text = self._stream.push("".join(json_parts), is_last=is_last)
        json_parts.clear()
        call.arguments = call.arguments or []
        call.arguments += [text] if text else []
        if call.begun is not None:
            self._held, self._at, self._used = self._held[self._used :], self._at - self._used, 0
            if text:
                self._emit(Arguments(call.begun.index, text))

    def _end(self, call: _Call, is_whole: bool) -> bool:
        """Emits a call that was held back, or ends one that was streamed. Returns `is_whole`."""
        begun, arguments = call.begun, "".join(call.arguments or ())
        if is_whole:
            self._drop(self._at)
            if begun is None:
                begun, arguments = self._begin(call), arguments or "{}"
                self._emit(Arguments(begun.index, arguments))
        if begun is not None:
            self._emit(CallEnd(begun.index, begun.id, begun.name, arguments, is_whole))
            self.are_whole &= is_whole
        return is_whole

    # Answers and calls.

    def _answer(self) -> Reading[None]:
        is_behind_call = False  # with whitespace between
        yield
        while True:
            is_start = not self._has_shown and self.num_calls == 0
            is_form = self._begins and self._has_shown and self.num_calls == 0
            pattern = self._marks.first if is_start else self._marks.opener
            found = None if is_form else pattern.search(self._held, partial=not self._is_last)
            end = found.start() if found else len(self._held) - self._is_last
            text = self._held[:end].rstrip(WHITESPACE)
            if text:
                self._show(len(text))
                is_behind_call = False
            self._layout.append(self._held[: end - len(text)])
            self._held = self._held[end - len(text) :]
            if found is None or found.partial:
                if self._is_last:
                    break
                yield
            elif is_start and text and (self._begins or not found[0]):  # what would begin a call stands within text
                continue
            else:
                self._at = len(found[0])
                is_behind_call = yield from self._section()
                if not is_behind_call:
                    self._show(self._at)
        if not is_behind_call:
            self._show(0)

    def _section(self) -> Reading[bool]:
        """Calls behind an opener, and what closes them. Whether there was one, and none was malformed."""
        is_list, is_object = self._format.is_list, self._format.is_object
        if is_list:
            is_list = (yield from self._take(_LIST)) is not None
            if not is_list and not is_object:
                return False
        read = self._object if is_object else self._named
        while (yield from read()):
            behind = yield from self._take(self._marks.behind_in_list if is_list else self._marks.behind)
            if behind is None or behind["more"] is None:
                if is_list and behind is not None:
                    yield from self._take(self._marks.closer)
                self._drop(self._at)
                return behind is not None or not is_list
        return False

    def _named(self) -> Reading[bool]:
        """A name and arguments."""
        head = yield from self._take(self._marks.head)
        if head is None or head["name"] not in self._names:
            return False
        call = _Call(head["name"])
        return self._end(call, (yield from self._arguments(call)))

    def _object(self) -> Reading[bool]:
        """Reads one call, an object with a name and arguments."""
        call = _Call()
        yield from self._space()
        is_whole = (yield from self._mark("{")) and (yield from self._listed("}", lambda: self._field(call)))
        return self._end(call, is_whole and bool(call.name))

    def _field(self, call: _Call) -> Reading[bool]:
        written = yield from self._key()
        key = json.loads(written, strict=False) if written else None
        name_key, arguments_key = self._marks.keys
        if key == name_key and not call.name:
            name = (yield from self._string('"')) if (yield from self._mark('"')) else ""
            call.name = json.loads(name, strict=False) if name else ""
            return call.name in self._names
        if key == arguments_key and call.arguments is None:
            return (yield from self._arguments(call))
        return key in _EXTRA_KEYS and (yield from self._value())

    def _arguments(self, call: _Call) -> Reading[bool]:
        """An object."""
        self._call, self._json, self._stream, self._used = call, [], JsonText(replaces_halves=True), self._at
        self._most = self._at + self._held_chars if call.name else ANY_NUMBER
        is_whole = yield from self._members(lambda key: self._types(call.name, key))
        self._emit_arguments(is_last=True)
        self._most, self._json = ANY_NUMBER, None
        return is_whole

    def _types(self, name: str, key: str) -> Collection[str]:
        """An argument's types."""
        if (name, key) not in self._types_of:
            found = argument_types(self._schemas[name], key) if name in self._schemas else JSON_TYPES
            self._types_of[name, key] = found
        return self._types_of[name, key]
