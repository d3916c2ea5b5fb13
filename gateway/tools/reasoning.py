"""Reasoning before an answer: its formats, which one a chat template uses, whether a prompt opens it. Pure.

`ReasoningReader` and `ChannelReader` take it out of answers, `grammar.py` allows it before a grammar.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

# inside: the prompt opens the block and the answer begins in it. possible: the answer may open it.
# off: the prompt closes the block, or the answer continues content.
ReasoningStart = Literal["inside", "possible", "off"]
Phase = Literal["commentary", "final_answer"]  # of a message: before calls, or the answer
MOST_WAITING = 1 << 17  # characters; they are read at once when it is known what they are: some 40 ms
MOST_HEADER = 256  # characters of a message's header in harmony
_Place = Literal["start", "reasoning", "unopened", "layout", "content"]
_Kind = Literal["analysis", "content", ""]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning occurs once, at the start of the answer, between `begin` and `end`.

    Newlines next to the markers are layout. Markers may be control tokens, which the detokenizer must then show.
    """

    name: str
    begin: str
    end: str
    has_channels: bool = False  # answers are messages of harmony, some of which are reasoning
    hidden: tuple[str, ...] = ()  # tokens around the answer

    @property
    def markers(self) -> frozenset[str]:
        """Texts that may hold control tokens, which the detokenizer must show."""
        channels = ("<|start|>", "<|channel|>", "<|message|>", *_MESSAGE_ENDS, "<|constrain|>")
        return frozenset({self.begin, self.end, *(channels if self.has_channels else ())})


_MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    item.name: item
    for item in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen, DeepSeek, GLM, MiniMax M2, Nemotron, Kimi K2
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral from 2507 on, Ministral 3
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),  # Seed-OSS
        ReasoningFormat("minimax-m3", "<mm:think>", "</mm:think>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat(  # Command R7B, Command A Reasoning
            "cohere", "<|START_THINKING|>", "<|END_THINKING|>", hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
        ),
        ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", has_channels=True),  # gpt-oss
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


class Reader(Protocol):
    """Separates reasoning from content in one answer; how its text is split does not matter."""

    num_taken: int  # characters pushed that are neither content nor held: reasoning, markers and layout
    phase: Phase | None  # of the message whose content was returned last; None where the model does not say

    def push(self, text: str) -> Parts:
        """Returns the text that is now certain."""

    def flush(self) -> Parts:
        """Returns the text held back. Call it at the end of the text."""

    def count(self) -> int:
        """Call it after each push: how many of them are now known to be of reasoning or its end marker."""

    def has_taken(self, offset: int) -> bool:
        """Whether the character at this place of the answer is among those taken."""


def new_reader(format: ReasoningFormat, start: ReasoningStart, *, waits: bool = False) -> Reader:
    """`start`: of the prompt. `waits`: as in ReasoningReader."""
    return ChannelReader(start) if format.has_channels else ReasoningReader(format, start, waits=waits)


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
        self.num_taken = 0
        self.phase: Phase | None = None
        self.num_before = 0  # characters of content before them

    def has_taken(self, offset: int) -> bool:
        return self.num_before <= offset < self.num_before + self.num_taken

    def count(self) -> int:
        if self._place == "unopened":
            self._num_unsure += self._waits
            return 0
        num, self._num_unsure = self._num_unsure, 0
        return num + (self._place in ("reasoning", "layout"))

    def push(self, text: str) -> Parts:
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
        """Takes what is held, but not what may be the end marker and the newlines before it."""
        marker = self._format.end
        sizes = range(len(marker) - 1, 0, -1)
        num_begun = next((size for size in sizes if self._held.endswith(marker[:size])), 0)
        certain = self._held[: len(self._held) - num_begun].rstrip("\n")
        self._held = self._held[len(certain) :]
        return certain


class ChannelReader:
    """Separates the messages of harmony: analysis is reasoning, commentary and final are content.

        header -- <|message|> --> body -- <|end|>, <|return|> or <|call|> --> header
                                    `---- <|start|> or <|channel|> ---------> header, which they begin

    A message to a function is content that `parse.py` reads: with its markers, and a header as it wants it. What stands
    where a header is due and is none is content.
    """

    def __init__(self, start: ReasoningStart) -> None:
        """`start`: of the prompt."""
        kinds: Mapping[ReasoningStart, _Kind] = {"inside": "analysis", "possible": "", "off": "content"}
        self._kind = kinds[start]  # of the message that is read; "": a header is due
        self._is_after_analysis = False
        self._held = ""
        self._num_read = 0  # characters, of which those in `_taken` are not content
        self._taken: list[range] = []
        self.num_taken = 0
        self.phase: Phase | None = None

    def has_taken(self, offset: int) -> bool:
        return any(offset in taken for taken in reversed(self._taken))

    def count(self) -> int:
        return int(self._kind == "analysis" or self._is_after_analysis)

    def push(self, text: str) -> Parts:
        return self._read(text, is_last=False)

    def flush(self) -> Parts:
        return self._read("", is_last=True)

    def _read(self, text: str, *, is_last: bool) -> Parts:
        self._held += text
        self._is_after_analysis = False
        reasoning, content, is_going = list[str](), list[str](), True
        while is_going:
            if not self._kind:
                is_going, found = self._read_header(is_last)
                content.append(found)
                continue
            (reasoning if self._kind == "analysis" else content).append(self._read_body(is_last))
            is_going = not self._kind and self._held != ""
        return Parts("".join(reasoning), "".join(content))

    def _read_body(self, is_last: bool) -> str:
        """Returns the message's text that is now certain. At its end a header is due."""
        found = _BODY_END.search(self._held)
        end = found.start() if found else len(self._held) - (0 if is_last else _num_begun(self._held))
        text = self._take(end, is_content=self._kind != "analysis")
        if found is not None:
            if found[0] in _MESSAGE_ENDS:
                self._take(len(found[0]))
            self._is_after_analysis = self._kind == "analysis" and not self._held
            self._kind = ""
        return text

    def _read_header(self, is_last: bool) -> tuple[bool, str]:
        """Returns (whether it was read, what of it is content)."""
        head, message, rest = self._held.partition("<|message|>")
        given = head.lstrip()
        is_begun = any(begin.startswith(given) and not message for begin in _HEADER_BEGINS)
        if len(head) > MOST_HEADER or not (is_begun or given.startswith(_HEADER_BEGINS)):
            self._kind = "content"
            return True, self._take(1, is_content=True)
        if not message:
            if is_last and given.startswith(_BODY_MARKS):  # a header that is cut off
                self._take(len(head))
            return False, self._take(len(self._held), is_content=True) if is_last else ""
        function = _RECIPIENT.search(head)
        channel = _CHANNEL.search(head)
        self.phase = _PHASES.get(channel[1]) if channel and not function else None
        self._kind = "analysis" if not function and channel and channel[1] == "analysis" else "content"
        shown = f"<|channel|>commentary to=functions.{function[1]}{message}" if function else ""
        self._take(max(len(head) + len(message) - len(shown), 0))
        self._take(len(self._held) - len(rest), is_content=True)
        return True, shown

    def _take(self, num: int, *, is_content: bool = False) -> str:
        """Removes and returns as many characters of what is held."""
        begin, self._num_read = self._num_read, self._num_read + num
        if not is_content:
            self.num_taken += num
            if self._taken and self._taken[-1].stop == begin:
                begin = self._taken.pop().start
            self._taken.append(range(begin, self._num_read))
        text, self._held = self._held[:num], self._held[num:]
        return text


_HEADER_BEGINS = ("<|start|>", "<|channel|>", "to=", *_MESSAGE_ENDS)
_BODY_MARKS = ("<|start|>", "<|channel|>", *_MESSAGE_ENDS)
_BODY_END = re.compile("|".join(map(re.escape, _BODY_MARKS)))
_PHASES: Mapping[str, Phase] = {"commentary": "commentary", "final": "final_answer"}  # by channel
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _num_begun(text: str) -> int:
    """How many characters at the end may be the beginning of a marker."""
    begin = text.rfind("<", max(len(text) - max(map(len, _BODY_MARKS)), 0))
    return len(text) - begin if begin >= 0 and any(mark.startswith(text[begin:]) for mark in _BODY_MARKS) else 0
