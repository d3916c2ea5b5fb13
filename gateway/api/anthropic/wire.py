"""Writes a choice as an answer for Anthropic's clients, streamed or whole. Must not know HTTP."""

import secrets

import msgspec

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.answer.output_items import Begun, Grown, Item, ItemEvent, ItemReader
from gateway.api.anthropic.answers import MessageBody, MessageUsage, StopReason, TextBody, ThinkingBody, ToolUseBody
from gateway.api.http.errors import build_messages_error
from gateway.api.http.json_answer import encode
from gateway.api.http.sse import named_event
from gateway.errors import ApiError

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
