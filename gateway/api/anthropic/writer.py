"""Writes a choice as an answer for Anthropic's clients, streamed or whole."""

import secrets

import msgspec

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.answer.output_items import Begun, Grown, Item, ItemEvent, ItemReader
from gateway.api.http.answer import encode, named_event
from gateway.api.http.errors import build_messages_error
from gateway.errors import ApiError

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
            delta = named_event("message_delta", delta=self._stop(piece), usage=self._usage())
            events += [delta, named_event("message_stop")]
        return events

    def add(self, index: int, piece: OutputDelta) -> None:
        self._reader.read(piece)
        self._last = piece

    async def whole(self) -> bytes:
        return encode(self._message(self._last))

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=build_messages_error(error))

    def _message(self, last: OutputDelta | None = None) -> dict[str, object]:
        """The answer so far."""
        return {
            "type": "message",
            "id": self.id,
            "model": self._totals.job.model,
            "content": [_block(item, item.content) for item in self._reader.items],
            "usage": self._usage(),
            **(self._stop(last) if last else {"stop_reason": None, "stop_sequence": None}),
            "role": "assistant",
        }

    def _usage(self) -> dict[str, int]:
        """The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""
        totals = self._totals
        return {
            "input_tokens": totals.num_prompt - totals.num_cached,
            "output_tokens": totals.num_completion,
            "cache_read_input_tokens": totals.num_cached,
            "cache_creation_input_tokens": 0,
        }

    def _stop(self, last: OutputDelta) -> dict[str, str | None]:
        sequence = last.stop if isinstance(last.stop, str) else None
        reason = "tool_use" if self._reader.has_calls else "end_turn"
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _block_event(event: ItemEvent) -> bytes:
    item = event.item
    if isinstance(event, Begun):
        return named_event("content_block_start", index=item.index, content_block=_block(item, ""))
    if isinstance(event, Grown):
        kind, field = _DELTAS[item.kind]
        return named_event("content_block_delta", index=item.index, delta={"type": kind, field: event.text})
    return named_event("content_block_stop", index=item.index)


def _block(item: Item, content: str) -> dict[str, object]:
    if item.call is not None:
        return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": _input(content)}
    if item.kind == "text":
        return {"type": "text", "text": content}
    return {"type": "thinking", "thinking": content, "signature": ""}  # nothing is signed


def _input(arguments: str) -> msgspec.Raw:
    """Arguments as JSON; {} if they were cut off."""
    try:
        msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())
