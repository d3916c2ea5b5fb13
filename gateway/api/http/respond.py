"""From a raw request to its HTTP answer, streamed or whole, for every API. Must not know their wire formats."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals, begin, stream_choices
from gateway.api.access import unique_id, warning_headers
from gateway.api.http.disconnect import until_disconnect
from gateway.api.http.json_answer import json_response
from gateway.api.http.sse import PING_S, Batches, EventStream, StreamFrame
from gateway.request.prepare import ServedModel
from gateway.request.types import GenerateRequest

Pieces = AsyncGenerator[tuple[int, OutputDelta], None]


HOLD_S = 0.1  # a request that is refused at once gets a status; all others see their stream begin


class Writer(StreamFrame, Protocol):
    """Writes the answer to one request, either as a stream or as a whole."""

    id: str  # of the answer

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        """Events for a piece of a choice."""

    def add(self, index: int, piece: OutputDelta) -> None:
        """Adds a piece of a choice to an answer that is not streamed."""

    async def whole(self) -> bytes:
        """The body of an answer that is not streamed, after its last piece."""


async def respond(
    served: ServedModel,
    request: Request,
    raw: GenerateRequest,
    new_writer: Callable[[Totals], Writer],
    *,
    is_streamed: bool,
) -> Response:
    """Returns the response. Raises ApiError, and ClientDisconnect if the client leaves before a whole answer."""
    state = request.state
    totals = await begin(served, raw, unique_id(state.request_id), state.arrived_s, request.headers.items)
    writer, pieces = new_writer(totals), stream_choices(served, totals)
    if totals.trace is not None:
        totals.trace.note({"gen_ai.response.id": writer.id})
    if is_streamed:
        has_grammar = any(generation.grammar for generation in totals.job.generations)
        hold_s = PING_S if has_grammar else HOLD_S  # the decode worker may refuse a grammar
        response: Response = EventStream(
            _stream(writer, pieces), writer, hold_s, lambda: served.ring.check_ready() is None
        )
    else:
        response = json_response(await until_disconnect(request.receive, _whole(writer, pieces)))
    response.headers.update(warning_headers(totals.job.warnings))
    return response


async def _stream(writer: Writer, pieces: Pieces) -> Batches:
    """Yields batches of events to send together. Closing this iterator closes `pieces`."""
    async with aclosing(pieces):
        async for index, piece in pieces:
            if batch := writer.events(index, piece):
                yield batch


async def _whole(writer: Writer, pieces: Pieces) -> bytes:
    async with aclosing(pieces):
        async for index, piece in pieces:
            writer.add(index, piece)
    return await writer.whole()
