"""Separates reasoning from content in text that arrives in pieces; how it is split does not matter. Pure.

Drops only markers and newlines next to them. Stop strings and calls are searched later, in content only.
"""

from typing import Literal, NamedTuple

from gateway.tools.reasoning import ReasoningFormat

_Place = Literal["start", "reasoning", "layout", "content"]


class Parts(NamedTuple):
    """Text that became certain: reasoning, then content. Either may be empty."""

    reasoning: str
    content: str


class ReasoningReader:
    """Reads one answer.

        start -- begin marker --> reasoning -- end marker --> layout -- not a newline --> content
          |--- other text, inside ----^                                                     ^
          `--- other text, not inside ------------------------------------------------------'

    Space before the begin marker is dropped. Newlines are dropped after it and around the end marker. An answer that
    begins inside may repeat the begin marker, as some models do. Without an end marker, all the rest is reasoning.
    A marker anywhere else is text.
    """

    def __init__(self, format: ReasoningFormat, *, is_inside: bool) -> None:
        """`is_inside`: `reasoning_start` of the prompt is "inside"."""
        self._format = format
        self._is_inside = is_inside
        self._place: _Place = "start"
        self._held = ""  # may be part of a marker, or layout
        self._has_reasoned = False  # reasoning was returned; newlines before it are layout
        self.num_taken = 0  # characters pushed that are neither content nor held: reasoning, markers and layout

    @property
    def is_reasoning(self) -> bool:
        """Whether the text pushed last is reasoning or its end marker. False while that is unknown."""
        return self._place in ("reasoning", "layout")

    def push(self, text: str) -> Parts:
        """Returns the text that is now certain."""
        if self._place == "content":
            return Parts("", text)
        num_unread = len(self._held) + len(text)
        self._held += text
        if self._place == "start":
            self._leave_start()
        reasoning = self._take_reasoning() if self._place == "reasoning" else ""
        if self._place == "layout":
            self._held = self._held.lstrip("\n")
            self._place = "content" if self._held else "layout"
        content = self._take_held() if self._place == "content" else ""
        self.num_taken += num_unread - len(self._held) - len(content)
        return Parts(reasoning, content)

    def flush(self) -> Parts:
        """Returns the text held back. Call it at the end of the text."""
        is_reasoning = self._place == "reasoning" or self._is_inside
        if not is_reasoning:
            return Parts("", self._take_held())
        self.num_taken += len(self._held)
        held = self._take_held()
        return Parts(held if self._has_reasoned else held.lstrip("\n"), "")

    def _leave_start(self) -> None:
        begin, text = self._format.begin, self._held.lstrip()
        if text.startswith(begin):
            self._held = text[len(begin) :]
            self._place = "reasoning"
        elif not begin.startswith(text):
            self._place = "reasoning" if self._is_inside else "content"

    def _take_reasoning(self) -> str:
        if not self._has_reasoned:
            self._held = self._held.lstrip("\n")
        before, end, after = self._held.partition(self._format.end)
        if end:
            self._place, self._held = "layout", after
            return before.rstrip("\n")
        certain = self._held[: len(self._held) - _num_begun(self._held, end=self._format.end)].rstrip("\n")
        self._held = self._held[len(certain) :]
        self._has_reasoned = self._has_reasoned or bool(certain)
        return certain

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, end: str) -> int:
    """Length of the longest suffix of `text` that begins the marker `end`."""
    lengths = range(min(len(text), len(end) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(end[:length])), 0)
