"""Calls of functions found in text that arrives in pieces: text in, events out.

Pure. What comes out, once neighbouring texts are joined, does not depend on how the text was split. Nothing is lost:
what does not make a call is content, but for the layout around calls (markers, whitespace beside them).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.tools.formats import Format
from gateway.tools.scan import END, Reading, Scanner

# A call that may turn out malformed is held back while its arguments are no longer than this: then it is content after
# all. Beyond, they are streamed as they come and stay what they are.
HELD_ARGUMENTS_CHARS = 2048
_EXTRA_KEYS = ("id", "type")  # that models write beside name and arguments; JSON with others is an answer, not a call


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call's first news."""

    index: int  # among the calls of this answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments: JSON, an object; not empty.

    As the model wrote it, but for control characters in strings, which JSON wants escaped: models write them plainly,
    and xgrammar lets them through where a schema bounds a string's length.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over. Its arguments are whole, unless the answer was cut off or they broke off while streamed."""

    index: int


CallEvent = CallBegin | Arguments | CallEnd
Event = Content | CallEvent


class CallParser(Scanner):
    """Reads one answer. What it takes is held and at last given out as content or arguments, or dropped as layout.

    `is_trusted`: a grammar has made the text, so calls are well-formed and need not be held back.
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
        self._is_streaming = False  # what is taken are arguments of the call that began last
        self.num_calls = 0
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """What is certain now."""
        for char in text:
            self._reading.send(char)
        if self._is_streaming:
            self._stream()
        return self._take_events()

    def flush(self) -> list[Event]:
        """The rest, once it is known that nothing follows. The last call of all."""
        try:
            self._reading.send(END)
        except StopIteration:
            return self._take_events()
        raise AssertionError("the reading ends with the text")

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # What is done with the text held.

    def _show(self) -> None:
        """The text held is content."""
        text, last = "".join(self._held), self._events[-1] if self._events else None
        self._drop()
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + text)
        elif text:
            self._events.append(Content(text))

    def _stream(self) -> None:
        """The text held is arguments."""
        if self._json:
            self._events.append(Arguments(self.num_calls - 1, "".join(self._json)))
            self._drop()

    def _begin(self, name: str) -> None:
        self._events.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    # Answers and calls. Those that tell false leave in `_held` what is content after all.

    def _answer(self) -> Reading[None]:
        """Between its steps, `_held` is whitespace: content, unless it stands beside a call."""
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
        """An opener and the calls behind it."""
        if not (yield from self._literal(self._format.opener)):
            return False
        yield from self._space()
        if self._format.form == "array":
            return (yield from self._array())
        if self._format.form == "named":
            return (yield from self._named())
        return (yield from self._objects())

    def _objects(self) -> Reading[bool]:
        """Calls one after the other, each with its closer, or else with ";" between them."""
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
        """Gives out a call that was held back, or ends one that is out; `num_before`: calls that were out before it."""
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
        """An object; begins the call once it need no longer be held back. Tells what is held of it; None: malformed."""
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
