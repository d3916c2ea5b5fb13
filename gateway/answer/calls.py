"""Separates tool calls from the text of a choice's pieces, and joins their parts. Must not know REST or gRPC."""

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gateway.answer.choice_text import OutputDelta
from gateway.tools.formats import Format
from gateway.tools.parse import Arguments, CallBegin, CallEvent, CallParser, Content, Event
from gateway.tools.request import ToolUse

_ID_CHARS = string.ascii_letters + string.digits
_NUM_ID_CHARS = 24  # as many as OpenAI's


class CallReader:
    """Reads one choice. `is_trusted`: a grammar makes calls well-formed."""

    def __init__(self, use: ToolUse, *, is_trusted: bool) -> None:
        names = [tool.name for tool in use.callable_tools]
        self._parser = CallParser(use.format, names, lambda: _new_id(use.format), is_trusted=is_trusted)
        self._is_named = use.named is not None
        self._is_required = use.is_required

    def read(self, piece: OutputDelta) -> list[OutputDelta]:
        """Returns the piece with its calls separated from its text. Text that may be part of a call is held back.

        Returns several pieces if text follows a call: the first has the tokens, the last the finish reason.
        """
        events = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.flush()
        if self._is_required:  # the grammar allows only calls: content is a call that was cut off
            events = [event for event in events if not isinstance(event, Content)]
        # An answer with a named call ends with "stop", as in OpenAI's API.
        is_whole = piece.finish_reason == "stop" and not isinstance(piece.stop, str)
        is_calling = is_whole and bool(self._parser.num_calls) and not self._is_named
        *earlier, (text, calls) = _runs(events)
        parts: list[OutputDelta] = []
        for before, between in earlier:
            parts.append(replace(piece, text=before, calls=between, finish_reason=None, timing=None, stop=None))
            piece = replace(piece, reasoning="", token_ids=(), num_reasoning_tokens=0, logprobs=(), shown_tokens=())
        return [*parts, replace(piece, text=text, calls=calls, is_calling=is_calling)]


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Its arguments are complete unless the answer was cut off or they are malformed."""

    id: str
    name: str
    arguments: str  # JSON, an object


class CallCollector:
    """Collects the calls of one answer; each ends before the next begins."""

    def __init__(self) -> None:
        self._begun: CallBegin | None = None
        self._parts: list[str] = []

    def push(self, events: Iterable[CallEvent]) -> list[Call]:
        """Returns the calls that these events complete."""
        ended = []
        for event in events:
            if isinstance(event, CallBegin):
                self._begun, self._parts = event, []
            elif isinstance(event, Arguments):
                self._parts.append(event.text)
            elif self._begun is not None:
                ended.append(Call(self._begun.id, self._begun.name, "".join(self._parts)))
                self._begun = None
        return ended


def _runs(events: Sequence[Event]) -> list[tuple[str, tuple[CallEvent, ...]]]:
    """Groups events, in order, into pairs of a text and the calls after it; at least one pair."""
    runs: list[tuple[list[str], list[CallEvent]]] = [([], [])]
    for event in events:
        texts, calls = runs[-1]
        if not isinstance(event, Content):
            calls.append(event)
        elif calls:
            runs.append(([event.text], []))
        else:
            texts.append(event.text)
    return [("".join(texts), tuple(calls)) for texts, calls in runs]


def _new_id(format: Format) -> str:
    size = format.num_id_chars
    text = "".join(secrets.choice(_ID_CHARS) for _ in range(size or _NUM_ID_CHARS))
    return text if size else f"call_{text}"
