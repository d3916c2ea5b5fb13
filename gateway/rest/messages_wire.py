"""How a choice becomes an answer for Anthropic's clients, streamed or whole. Must not know HTTP."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from gateway.answer import Totals
from gateway.errors import ApiError
from gateway.order import Job
from gateway.pieces import Piece
from gateway.rest.items import Begun, Grown, Item, ItemEvent, ItemReader
from gateway.rest.messages_answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    JsonDelta,
    MessageBody,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopDelta,
    StopReason,
    TextBody,
    TextDelta,
    ToolUseBody,
    encode_message,
    encode_messages_error,
)
from gateway.rest.respond import Pieces
from gateway.rest.sse import named_event
from gateway.rest.tagged import Tagged, name_of

_NO_INPUT = msgspec.Raw(b"{}")


class MessagesEnd:
    """How streams end: with message_stop, or an error event."""

    done = b""

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", encode_messages_error(error))


class MessageWriter:
    """Writes the answer to one request, which has one choice."""

    end = MessagesEnd()

    def __init__(self, model: str, job: Job) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._totals = Totals(job)
        self._reader = ItemReader()

    async def stream(self, pieces: Pieces) -> AsyncGenerator[list[bytes], None]:
        """Events, in batches to send together. Closing this iterator closes `pieces`."""
        events: list[Tagged] = [MessageStart(self._message(None))]
        async with aclosing(pieces):
            async for index, piece in pieces:
                self._totals.add(index, piece)
                events += map(_block_event, self._reader.read(piece))
                if piece.finish_reason is not None:
                    stop = StopDelta(self._stop_reason(piece), piece.stop_string)
                    events += [MessageDelta(stop, self._usage()), MessageStop()]
                if events:
                    yield [named_event(name_of(event), encode_message(event)) for event in events]
                events = []

    async def whole(self, pieces: Pieces) -> bytes:
        """The answer to a request that does not stream."""
        last = Piece("")
        async with aclosing(pieces):
            async for index, piece in pieces:
                self._totals.add(index, piece)
                self._reader.read(piece)
                last = piece
        return encode_message(self._message(last))

    def _message(self, last: Piece | None) -> MessageBody:
        """The answer whose last piece this is; None: at its start."""
        content = [_block(item) for item in self._reader.items]
        message = MessageBody(self._id, self._model, content, self._usage())
        if last is not None:
            message.stop_reason, message.stop_sequence = self._stop_reason(last), last.stop_string
        return message

    def _usage(self) -> MessageUsage:
        totals = self._totals
        return MessageUsage(totals.num_prompt - totals.num_cached, totals.num_completion, totals.num_cached)

    def _stop_reason(self, last: Piece) -> StopReason:
        if last.finish_reason == "length":
            return "max_tokens"
        if last.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.has_calls else "end_turn"


def _block_event(event: ItemEvent) -> Tagged:
    item = event.item
    if isinstance(event, Begun):
        empty = TextBody("") if item.call is None else ToolUseBody(item.call.id, item.call.name, _NO_INPUT)
        return BlockStart(item.index, empty)
    if isinstance(event, Grown):
        return BlockDelta(item.index, TextDelta(event.text) if item.call is None else JsonDelta(event.text))
    return BlockStop(item.index)


def _block(item: Item) -> TextBody | ToolUseBody:
    if item.call is None:
        return TextBody(item.content)
    return ToolUseBody(item.call.id, item.call.name, _input(item.content))


def _input(arguments: str) -> msgspec.Raw:
    """Arguments as JSON; an empty object for those that were cut off."""
    try:
        msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return _NO_INPUT
    return msgspec.Raw(arguments.encode())
