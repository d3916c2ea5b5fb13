"""Writes a choice as an answer for Anthropic's clients, streamed or whole."""

import secrets
from typing import Literal

import msgspec

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.answer.output_items import Item, ItemReader
from gateway.api.anthropic.chat_types import KEPT_S
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


class CacheCreation(msgspec.Struct):
    """`cache_creation_input_tokens` by how long they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. The prompt is all three kinds of input; created are those that it marks and that were computed."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation | msgspec.UnsetType = msgspec.UNSET  # where something is marked


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
        events: list[bytes] = []
        for event in self._reader.read(piece):
            at, kind = event.item.index, event.item.kind
            if event.kind == "begun":
                events.append(named_event("content_block_start", index=at, content_block=_block(event.item, "")))
            elif event.kind == "grown":
                delta_kind, field = _DELTAS[kind]
                events.append(
                    named_event("content_block_delta", index=at, delta={"type": delta_kind, field: event.text})
                )
            else:
                events.append(named_event("content_block_stop", index=at))
        if piece.finish_reason is not None:
            reason, sequence = self._stop(piece)
            stop = {"stop_reason": reason, "stop_sequence": sequence}
            events += [named_event("message_delta", delta=stop, usage=self._usage()), named_event("message_stop")]
        return events

    def add(self, index: int, piece: OutputDelta) -> None:
        self._reader.read(piece)
        self._last = piece

    async def whole(self) -> bytes:
        message = self._message()
        message.stop_reason, message.stop_sequence = self._stop(self._last)
        return encode(message)

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=build_messages_error(error).error)

    def _message(self) -> MessageBody:
        """The answer so far."""
        content = [_block(item, item.content) for item in self._reader.items]
        return MessageBody(self.id, self._totals.job.model, content, self._usage())

    def _usage(self) -> MessageUsage:
        totals = self._totals
        (prompt,) = totals.job.prompts
        num_read = totals.num_cached
        kept = [(max(tokens - num_read, 0), seconds) for tokens, seconds in prompt.kept if totals.num_completion]
        num_created = max((tokens for tokens, _ in kept), default=0)
        usage = MessageUsage(totals.num_prompt - num_read - num_created, totals.num_completion, num_read, num_created)
        if kept:
            num_long = max((tokens for tokens, seconds in kept if seconds > KEPT_S["5m"]), default=0)
            usage.cache_creation = CacheCreation(num_created - num_long, num_long)
        return usage

    def _stop(self, last: OutputDelta) -> tuple[StopReason, str | None]:
        """(reason, the stop sequence that the answer ended with)."""
        sequence = last.stop if isinstance(last.stop, str) else None
        if last.finish_reason == "length":
            return "max_tokens", sequence
        if sequence is not None:
            return "stop_sequence", sequence
        return "tool_use" if self._reader.has_calls else "end_turn", None


def _block(item: Item, content: str) -> TextBody | ThinkingBody | ToolUseBody:
    if item.call is None:
        return TextBody(content) if item.kind == "text" else ThinkingBody(content)
    arguments = content if item.is_whole and content else "{}"
    return ToolUseBody(item.call.id, item.call.name, msgspec.Raw(arguments.encode()))
