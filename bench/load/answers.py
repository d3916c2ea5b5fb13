"""A client's record of one streamed completion: times, counts and errors. Pure.

Takes bytes of the server's event stream and their arrival times. Knows no sockets and no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. Times are seconds of one monotonic clock."""

    sent: float
    chunks: tuple[float, ...]  # arrival of each chunk with text, or token ids
    ended: float  # arrival of the choice's last chunk
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    is_counted: bool = True  # the server reported the number of tokens; otherwise chunks were counted
    timing: Mapping[str, Any] = field(default_factory=dict)  # Baton's `include_timing`
    cached_tokens: int = 0  # of the prompt, as the server says
    text: str = ""
    token_ids: Sequence[int] = ()  # if they were asked for


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of a completion
    delta: _Delta = _Delta()  # of a chat
    finish_reason: str | None = None
    timing: dict[str, Any] | None = None
    token_ids: list[int] = []


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Recorder:
    """Reads one answer's event stream. `answer()` returns the state so far, at any time."""

    def __init__(self, sent: float) -> None:
        self.chunks: list[float] = []
        self.is_done = False  # the choice has a finish reason, or [DONE] came
        self.error = ""
        self._sent = sent
        self._ended = sent
        self._usage: _Usage | None = None
        self._timing: dict[str, Any] = {}
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._rest = b""  # an incomplete line
        self._decoder = msgspec.json.Decoder(_Chunk)

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes, which arrived at `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = self._decoder.decode(event)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"an event that cannot be read ({error}): {event[:200]!r}"
            return
        if chunk.error is not None:
            self.error = self.error or f"the server broke off: {chunk.error}"
        for choice in chunk.choices:
            self._ended = now
            self.is_done |= choice.finish_reason is not None
            self._timing = choice.timing or self._timing
            self._ids += choice.token_ids
            text = choice.text or choice.delta.content or ""
            if text or choice.token_ids:  # a token may have no text
                self.chunks.append(now)
                self._texts.append(text)
        self._usage = chunk.usage or self._usage

    def answer(self) -> Answer:
        """Everything known so far."""
        usage = self._usage
        details = usage.prompt_tokens_details if usage else None
        error = self.error
        if not error and not self.is_done:
            error = "the stream ended before its answer"
        elif not error and not self.chunks:
            error = "no text came"
        return Answer(
            self._sent,
            tuple(self.chunks),
            self._ended,
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else len(self.chunks),
            error,
            usage is not None,
            self._timing,
            (details.cached_tokens or 0) if details else 0,
            "".join(self._texts),
            self._ids,
        )
