"""Reasoning before an answer: its formats, which one a chat template uses, whether a prompt opens it. Pure.

`ReasoningReader` takes it out of answers, `grammar.py` allows it before a grammar.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

# inside: the prompt opens the block and the answer begins in it. possible: the answer may open it.
# off: the prompt closes the block, or the answer continues content.
ReasoningStart = Literal["inside", "possible", "off"]
MOST_WAITING = 1 << 17  # characters; they are read at once when it is known what they are: some 40 ms
_Place = Literal["start", "reasoning", "unopened", "layout", "content"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning occurs once, at the start of the answer, between `begin` and `end`.

    Newlines next to the markers are layout. Markers may be control tokens, which the detokenizer must then show.
    """

    name: str
    begin: str
    end: str


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    item.name: item
    for item in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen, DeepSeek, GLM, MiniMax M2, Nemotron, Kimi K2
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral from 2507 on, Ministral 3
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),  # Seed-OSS
        ReasoningFormat("minimax-m3", "<mm:think>", "</mm:think>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    )
}


def resolve_reasoning(setting: str, template: str, has_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format named by `setting`; None for "none"; for "auto" the chat template's, or None if it shows none.

    Some templates only remove reasoning up to the end marker. They count if both markers are tokens of the vocabulary:
    the model is then trained to write them.
    """
    if setting != "auto":
        return REASONING_FORMATS.get(setting)
    for item in REASONING_FORMATS.values():
        is_trained = has_token(item.begin) and has_token(item.end)
        if item.end in template and (item.begin in template or is_trained):
            return item
    return None


def reasoning_start(format: ReasoningFormat, prompt: str, opened: str = "") -> ReasoningStart:
    """Where an answer begins. Only the prompt's end counts, as users may write markers too.

    `opened`: the text of the open assistant's message that ends the prompt.
    """
    opened = opened.strip()
    last_begin, last_end = opened.rfind(format.begin), opened.rfind(format.end)
    if last_begin != last_end:
        return "inside" if last_begin > last_end else "off"
    head = prompt.rstrip().removesuffix(opened).rstrip()
    if head.endswith(format.begin):
        return "inside"
    return "off" if opened or head.endswith(format.end) else "possible"


class Parts(NamedTuple):
    """Text that became certain: reasoning, then content. Either may be empty."""

    reasoning: str
    content: str


class ReasoningReader:
    """Separates reasoning from content in one answer; how its text is split does not matter.

        start -- begin marker --> reasoning -- end marker ----------> layout -- not a newline --> content
          |--- other text, inside ----^                                 ^                           ^
          |--- other text, possible --> unopened -- line of end marker -'                           |
          `--- other text, off ---------------------------------------------------------------------'

    Space before the begin marker is dropped. Newlines are dropped after it and around the end marker. An answer that
    begins inside may repeat the begin marker, as some models do. Without an end marker, all the rest is reasoning.
    A marker anywhere else is text.
    Some models forget the begin marker: before a line that begins with the end marker, the text was reasoning.
    """

    def __init__(self, format: ReasoningFormat, start: ReasoningStart, *, waits: bool = False) -> None:
        """`start`: of the prompt. `waits`: unopened text is held until it is known; else it is content meanwhile."""
        self._format = format
        self._start = start
        self._waits = waits
        self._num_unsure = 0  # counted while unopened text was held
        self._place: _Place = "start"
        self._held = ""  # may be part of a marker, or layout
        self._earlier: list[str] = []  # held before it, without a marker
        self._num_earlier = 0  # characters
        self._has_reasoned = False  # reasoning was returned; newlines before it are layout
        self.num_taken = 0  # characters pushed that are neither content nor held: reasoning, markers and layout
        self.num_before = 0  # characters of content before them

    def count(self) -> int:
        """Call it after each push: how many of them are now known to be of reasoning or its end marker."""
        if self._place == "unopened":
            self._num_unsure += self._waits
            return 0
        num, self._num_unsure = self._num_unsure, 0
        return num + (self._place in ("reasoning", "layout"))

    def push(self, text: str) -> Parts:
        """Returns the text that is now certain."""
        if self._place == "content":
            return Parts("", text)
        num_unread = self._num_earlier + len(self._held) + len(text)
        self._held += text
        if self._place == "start":
            self._leave_start()
        reasoning = self._take_reasoning() if self._place == "reasoning" else ""
        content = ""
        if self._place == "unopened":
            reasoning, content = self._take_unopened()
            self.num_before += len(content)
        if self._place == "layout":
            self._held = self._held.lstrip("\n")
            self._place = "content" if self._held else "layout"
        if self._place == "content":
            content, self._held = content + self._held, ""
        self.num_taken += num_unread - self._num_earlier - len(self._held) - len(content)
        return Parts(reasoning, content)

    def flush(self) -> Parts:
        """Returns the text held back. Call it at the end of the text."""
        held, self._held = self._take_earlier() + self._held, ""
        if self._place != "reasoning" and self._start != "inside":
            return Parts("", held)
        self.num_taken += len(held)
        return Parts(held if self._has_reasoned else held.lstrip("\n"), "")

    def _leave_start(self) -> None:
        begin, end, text = self._format.begin, self._format.end, self._held.lstrip()
        others: dict[ReasoningStart, _Place] = {"inside": "reasoning", "possible": "unopened", "off": "content"}
        if text.startswith(begin):
            self._held = text[len(begin) :]
            self._place = "reasoning"
        elif self._start == "possible" and text.startswith(end):
            self._held = text[len(end) :]
            self._place = "layout"
        elif not (begin.startswith(text) or (self._start == "possible" and end.startswith(text))):
            self._place = others[self._start]

    def _take_unopened(self) -> Parts:
        begin, marker = self._format.begin, f"\n{self._format.end}"
        before, end, after = self._held.partition(marker)
        if not self._waits:
            if not end:
                return Parts("", self._take_certain())
            self._place, self._held = "layout", after
            return Parts("", before.rstrip("\n"))
        if begin in before or self._num_earlier > MOST_WAITING:
            self._held = self._take_earlier() + self._held
            self._place, self._num_unsure = "content", 0
        elif end:
            self._place, self._held = "layout", after
            return Parts((self._take_earlier() + before).strip("\n"), "")
        else:
            cut = max(len(self._held) - max(len(begin), len(marker)), 0)
            self._earlier.append(self._held[:cut])
            self._num_earlier += cut
            self._held = self._held[cut:]
        return Parts("", "")

    def _take_earlier(self) -> str:
        earlier = "".join(self._earlier)
        self._earlier.clear()
        self._num_earlier = 0
        return earlier

    def _take_reasoning(self) -> str:
        marker = self._format.end
        if not self._has_reasoned:
            self._held = self._held.lstrip("\n")
        before, end, after = self._held.partition(marker)
        if end:
            self._place, self._held = "layout", after
            return before.rstrip("\n")
        certain = self._take_certain()
        self._has_reasoned = self._has_reasoned or bool(certain)
        return certain

    def _take_certain(self) -> str:
        """What is held, without what may be the end marker and the newlines before it."""
        marker = self._format.end
        sizes = range(len(marker) - 1, 0, -1)
        num_begun = next((size for size in sizes if self._held.endswith(marker[:size])), 0)
        certain = self._held[: len(self._held) - num_begun].rstrip("\n")
        self._held = self._held[len(certain) :]
        return certain
