"""Finds tool calls in text that arrives in pieces: text in, events out. Pure.

How the text is split does not matter. Text outside of calls is content, except markers and whitespace next to calls.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.tools.formats import Format
from gateway.tools.scan import END, Reading, Scanner

# A call is held back until its arguments are longer than this: if they are malformed by then, it is content. Longer
# arguments are streamed and remain a call.
HELD_ARGUMENTS_CHARS = 2048
_EXTRA_KEYS = ("id", "type")  # that models add to name and arguments; an object with other keys is content, not a call


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

    As the model wrote it, except that control characters in strings are escaped: models do not escape them, and
    xgrammar allows that where a schema limits a string's length.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. Its arguments are complete unless the answer was cut off or they are malformed."""

    index: int


CallEvent = CallBegin | Arguments | CallEnd
Event = Content | CallEvent


class CallParser(Scanner):
    """Reads one answer. Text is held until it is emitted as content or arguments, or dropped as layout.

    `is_trusted`: a grammar makes calls well-formed, so they are not held back.
    """

    def __init__(
        self, format: Format, names: Collection[str], new_id: Callable[[], str], *, is_trusted: bool = False
    ) -> None:
        super().__init__()
        self._format = format
        self._names = frozenset(names)
        self._new_id = new_id
        self._held_chars = 0 if is_trusted else HELD_ARGUMENTS_CHARS
        self._events: list[Event] = []
        self._is_streaming = False  # the text taken is arguments of the last call
        self.num_calls = 0
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """Returns the events that are now certain."""
        for char in text:
            self._reading.send(char)
        if self._is_streaming:
            self._stream()
        return self._take_events()

    def flush(self) -> list[Event]:
        """Returns the remaining events. Call it last, at the end of the text."""
        try:
            self._reading.send(END)
        except StopIteration:
            return self._take_events()
        raise AssertionError("the reading ends with the text")

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Uses of the held text.

    def _show(self) -> None:
        """Emits the held text as content."""
        text, last = "".join(self._held), self._events[-1] if self._events else None
        self._drop()
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + text)
        elif text:
            self._events.append(Content(text))

    def _stream(self) -> None:
        """Emits the held text as arguments."""
        if self._json:
            self._events.append(Arguments(self.num_calls - 1, "".join(self._json)))
            self._drop()

    def _begin(self, name: str) -> None:
        self._events.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    # Answers and calls. A reading that returns False leaves content in `_held`.

    def _answer(self) -> Reading[None]:
        """Between its steps, `_held` is whitespace: content, unless it is next to a call."""
        self._char = yield
        yield from self._space()
        is_behind_call = False
        if self._format.is_bare and self._char == "{":
            is_behind_call = yield from self._shown_unless(self._objects())
        while self._char != END:
            if self._char == self._format.opener[0]:
                is_behind_call = yield from self._shown_unless(self._opened())
            else:
                self._append(self._char, self._char)
                self._show()
                self._char = yield
                is_behind_call = False
            yield from self._space()
        if not is_behind_call:
            self._show()

    def _shown_unless(self, calls: Reading[bool]) -> Reading[bool]:
        is_whole = yield from calls
        if not is_whole:
            self._show()
        return is_whole

    def _opened(self) -> Reading[bool]:
        """An opener and the calls after it."""
        if not (yield from self._literal(self._format.opener)):
            return False
        yield from self._space()
        if self._format.form == "array":
            return (yield from self._array())
        if self._format.form == "named":
            return (yield from self._named())
        return (yield from self._objects())

    def _objects(self) -> Reading[bool]:
        """Calls, each with its closer, or with ";" between them if the format has none."""
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
            elif closer or self._char != ";":
                return True
            else:
                yield from self._take()
                yield from self._space()
        return False

    def _array(self) -> Reading[bool]:
        if not (yield from self._literal("[")):
            return False
        while True:
            yield from self._space()
            if not (yield from self._object()):
                return False
            yield from self._space()
            if (yield from self._literal("]")):
                self._drop()
                return True
            if not (yield from self._literal(",")):
                return False

    def _named(self) -> Reading[bool]:
        id_marker, args_marker = self._format.id_marker, self._format.args_marker
        name = yield from self._word()
        marker = yield from self._one_of(id_marker, args_marker)
        if marker == id_marker:
            yield from self._word()
            marker = yield from self._one_of(args_marker)
        yield from self._space()
        before = self.num_calls
        if marker != args_marker or name not in self._names or self._char != "{":
            return False
        arguments = yield from self._arguments(name)
        return self._finish(name, arguments, arguments is not None, before)

    def _object(self) -> Reading[bool]:
        """One call as an object with a name and arguments."""
        name, before = "", self.num_calls
        arguments: str | None = None
        is_whole = yield from self._literal("{")
        while is_whole:
            yield from self._space()
            key = yield from self._key()
            if key == "name" and not name:
                name = yield from self._text()
                is_whole = name in self._names
            elif key == self._format.arguments_key and arguments is None and self._char == "{":
                arguments = yield from self._arguments(name)
                is_whole = arguments is not None
            else:
                is_whole = key in _EXTRA_KEYS and (yield from self._value())
            yield from self._space()
            if is_whole and (yield from self._literal("}")):
                break
            is_whole = is_whole and (yield from self._literal(","))
        return self._finish(name, arguments, is_whole and bool(name), before)

    def _finish(self, name: str, arguments: str | None, is_whole: bool, num_before: int) -> bool:
        """Emits a call that was held back, or ends one that was streamed. `num_before`: calls emitted before it."""
        is_out = self.num_calls > num_before
        if is_whole:
            self._drop()
        if is_whole and not is_out:
            self._begin(name)
            self._events.append(Arguments(self.num_calls - 1, arguments or "{}"))
        if is_whole or is_out:
            self._events.append(CallEnd(self.num_calls - 1))
        return is_whole

    def _arguments(self, name: str) -> Reading[str | None]:
        """An object. Begins the call once it is too long to be held back. Returns its held part; None: malformed."""
        start, length = len(self._held), 0
        reading = self._value()
        next(reading)
        while True:
            length += 1
            if name and length > self._held_chars and not self._is_streaming:
                self._begin(name)
                self._drop(start)
                self._is_streaming = True
            try:
                reading.send((yield))
            except StopIteration as stop:
                is_whole: bool = stop.value
                break
        if self._is_streaming:
            self._stream()
            self._is_streaming = False
            return "" if is_whole else None
        return "".join(self._json[start:]) if is_whole else None
