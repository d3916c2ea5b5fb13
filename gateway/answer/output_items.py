"""Splits an answer into items (reasoning, text, calls) for Messages and Responses. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.tools.parse import Arguments, CallBegin, CallEvent

ItemKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Item:
    """A run of reasoning or text, or a call. Grows with the answer."""

    index: int
    kind: ItemKind
    call: CallBegin | None = None  # if the kind is call
    parts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)  # shown tokens, if the kind is text

    @property
    def content(self) -> str:
        """The reasoning, the text, or the call's arguments so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Begun:
    """An item begins, empty."""

    item: Item


@dataclass(frozen=True, slots=True)
class Grown:
    """More of the open item; not empty."""

    item: Item
    text: str
    tokens: Sequence[ShownToken] = ()  # of text


@dataclass(frozen=True, slots=True)
class Ended:
    """An item ends."""

    item: Item


ItemEvent = Begun | Grown | Ended


class ItemReader:
    """Reads one choice. At most one item is open at a time."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None
        self._tokens: list[ShownToken] = []  # not assigned to an item yet

    @property
    def has_calls(self) -> bool:
        """Whether any function is called."""
        return any(item.call is not None for item in self.items)

    def read(self, piece: OutputDelta) -> list[ItemEvent]:
        """Returns the events of a piece. The last piece ends the open item."""
        events: list[ItemEvent] = []
        self._tokens += [token for token in piece.shown_tokens if not token.is_reasoning]
        self._read_run("reasoning", piece.reasoning, events)
        self._read_run("text", piece.text, events)
        for event in piece.calls:
            self._read_call(event, events)
        if piece.finish_reason is not None:
            self._end(events)
        return events

    def _read_run(self, kind: ItemKind, text: str, events: list[ItemEvent]) -> None:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._end(events)
            self._begin(kind, None, events)
        self._grow(text, events)

    def _read_call(self, event: CallEvent, events: list[ItemEvent]) -> None:
        self._tokens.clear()  # tokens of a call belong to no text
        if isinstance(event, CallBegin):
            self._end(events)
            self._begin("call", event, events)
        elif isinstance(event, Arguments):
            self._grow(event.text, events)
        else:
            self._end(events)

    def _begin(self, kind: ItemKind, call: CallBegin | None, events: list[ItemEvent]) -> None:
        self._open = Item(len(self.items), kind, call)
        self.items.append(self._open)
        events.append(Begun(self._open))

    def _grow(self, text: str, events: list[ItemEvent]) -> None:
        if self._open is None:
            raise AssertionError("a call's arguments come while it is open")
        tokens = self._take_tokens(self._open)
        self._open.parts.append(text)
        events.append(Grown(self._open, text, tokens))

    def _end(self, events: list[ItemEvent]) -> None:
        if self._open is not None:
            self._take_tokens(self._open)
            events.append(Ended(self._open))
            self._open = None

    def _take_tokens(self, item: Item) -> list[ShownToken]:
        if item.kind != "text":
            return []
        tokens, self._tokens = self._tokens, []
        item.tokens += tokens
        return tokens
