"""Splits an answer into items (reasoning, text, calls) for Messages and Responses. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.tools.parse import Arguments, CallBegin
from gateway.tools.reasoning import Phase

ItemKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Item:
    """A run of reasoning or text, or a call. Grows with the answer."""

    index: int
    kind: ItemKind
    call: CallBegin | None = None  # if the kind is call
    phase: Phase | None = None  # of a text, where the model says so
    parts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)  # shown tokens, if the kind is text
    is_whole: bool = True  # false for a call until it ends, and if it is malformed

    @property
    def content(self) -> str:
        """The reasoning, the text, or the call's arguments so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class ItemEvent:
    """An item begins, empty; grows by a text, which is not empty; or ends."""

    kind: Literal["begun", "grown", "ended"]
    item: Item
    text: str = ""
    tokens: Sequence[ShownToken] = ()  # of the text


class ItemReader:
    """Reads one choice. At most one item is open at a time."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None
        self._phase: Phase | None = None  # of the text that is read
        self._tokens: list[ShownToken] = []  # not assigned to an item yet
        self._events: list[ItemEvent] = []

    @property
    def has_calls(self) -> bool:
        """Whether functions are called, each with whole arguments."""
        calls = [item for item in self.items if item.call is not None]
        return bool(calls) and all(item.is_whole for item in calls)

    def read(self, piece: OutputDelta) -> list[ItemEvent]:
        """Returns the events of a piece. The last piece ends the open item."""
        self._events = []
        self._tokens += [token for token in piece.shown_tokens if not token.is_reasoning]
        if piece.reasoning:
            self._grow("reasoning", piece.reasoning)
        begin = 0
        for end, phase in (*piece.phases, (len(piece.text), None)):
            if text := piece.text[begin:end]:
                self._grow("text", text)
            if end < len(piece.text):
                self._begin_message(phase)
            begin = end
        for event in piece.calls:
            self._tokens.clear()  # tokens of a call belong to no text
            if isinstance(event, CallBegin):
                self._begin("call", event)
            elif isinstance(event, Arguments):
                self._grow("call", event.text)
            else:
                if self._open is not None:
                    self._open.is_whole = event.is_whole
                self._end()
        if piece.finish_reason is not None:
            self._end()
        return self._events

    def _begin_message(self, phase: Phase | None) -> None:
        self._phase = phase
        if self._open is not None and self._open.kind == "text":
            self._end()

    def _begin(self, kind: ItemKind, call: CallBegin | None = None) -> Item:
        self._end()
        phase = self._phase if kind == "text" else None
        self._open = Item(len(self.items), kind, call, phase, is_whole=call is None)
        self.items.append(self._open)
        self._events.append(ItemEvent("begun", self._open))
        return self._open

    def _grow(self, kind: ItemKind, text: str) -> None:
        item = self._open
        if item is None or item.kind != kind:
            item = self._begin(kind)
        tokens = self._take_tokens(item)
        item.parts.append(text)
        self._events.append(ItemEvent("grown", item, text, tokens))

    def _end(self) -> None:
        if self._open is not None:
            self._take_tokens(self._open)
            self._events.append(ItemEvent("ended", self._open))
            self._open = None

    def _take_tokens(self, item: Item) -> list[ShownToken]:
        if item.kind != "text":
            return []
        tokens, self._tokens = self._tokens, []
        item.tokens += tokens
        return tokens
