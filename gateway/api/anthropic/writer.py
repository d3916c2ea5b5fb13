"""Writes a choice as an answer for Anthropic's clients, streamed or whole."""

import secrets
from typing import Literal

import msgspec

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.answer.output_items import Begun, Grown, Item, ItemEvent, ItemReader
from gateway.api.http.answer import encode, named_event
from gateway.api.http.errors import Tagged, build_messages_error
from gateway.errors import ApiError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBody(Tagged, tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBody(Tagged, tag="thinking"):
    """The reasoning part of the answer."""

    thinking: str
    signature: str = ""  # nothing is signed


class ToolUseBody(Tagged, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: msgspec.Raw  # a JSON object


class MessageUsage(msgspec.Struct):
    """Token counts. The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageBody(Tagged, tag="message"):
    """The whole answer, or its fields known at the start."""

    id: str
    model: str
    content: list[TextBody | ThinkingBody | ToolUseBody]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class CountAnswer(msgspec.Struct):
    """The answer of count_tokens."""

    input_tokens: int


_NO_INPUT = msgspec.Raw(b"{}")
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Writes the answer to one request, which has one choice."""

    done = b""
    ping = named_event("ping")

    def __init__(self, totals: Totals) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._totals = totals
        self._reader = ItemReader()
        self._last = OutputDelta("")

    def begin(self) -> list[bytes]:
        return [named_event("message_start", message=self._message())]

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        events = [_block_event(event) for event in self._reader.read(piece)]
        if piece.finish_reason is not None:
            stop = {"stop_reason": self._stop_reason(piece), "stop_sequence": _stop_sequence(piece)}
            events += [named_event("message_delta", delta=stop, usage=self._usage()), named_event("message_stop")]
        return events

    def add(self, index: int, piece: OutputDelta) -> None:
        self._reader.read(piece)
        self._last = piece

    async def whole(self) -> bytes:
        message = self._message()
        message.stop_reason, message.stop_sequence = self._stop_reason(self._last), _stop_sequence(self._last)
        return encode(message)

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=build_messages_error(error).error)

    def _message(self) -> MessageBody:
        """The answer so far."""
        content = [_block(item, item.content) for item in self._reader.items]
        return MessageBody(self.id, self._totals.job.model, content, self._usage())

    def _usage(self) -> MessageUsage:
        totals = self._totals
        return MessageUsage(totals.num_prompt - totals.num_cached, totals.num_completion, totals.num_cached)

    def _stop_reason(self, last: OutputDelta) -> StopReason:
        if last.finish_reason == "length":
            return "max_tokens"
        if _stop_sequence(last) is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.has_calls else "end_turn"


def _stop_sequence(last: OutputDelta) -> str | None:
    return last.stop if isinstance(last.stop, str) else None


def _block_event(event: ItemEvent) -> bytes:
    item = event.item
    if isinstance(event, Begun):
        return named_event("content_block_start", index=item.index, content_block=_block(item, ""))
    if isinstance(event, Grown):
        kind, field = _DELTAS[item.kind]
        return named_event("content_block_delta", index=item.index, delta={"type": kind, field: event.text})
    return named_event("content_block_stop", index=item.index)


def _block(item: Item, content: str) -> TextBody | ThinkingBody | ToolUseBody:
    if item.call is not None:
        return ToolUseBody(item.call.id, item.call.name, _input(content))
    return TextBody(content) if item.kind == "text" else ThinkingBody(content)


def _input(arguments: str) -> msgspec.Raw:
    """Arguments as JSON; {} if they were cut off."""
    try:
        msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return _NO_INPUT
    return msgspec.Raw(arguments.encode())
