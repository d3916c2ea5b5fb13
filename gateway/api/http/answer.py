"""Turns a raw request into its HTTP answer, whole or as server-sent events, for every API's writer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import HOLD_CHOICES, Totals, begin, stream_choices
from gateway.api.access import unique_id, warning_headers
from gateway.api.http.errors import error_response
from gateway.errors import ApiError, bad_request
from gateway.request.prepare import ServedModel
from gateway.request.rules import LAST_PRIORITY
from gateway.request.types import GenerateRequest, PreparedRequest

_log = structlog.get_logger()

HOLD_S = 0.1  # a request that is refused at once gets a status; all others see their stream begin
PING_S = 10.0  # proxies and clients give up connections that are silent for 30 s or more
COMMENT_PING = b": ping\n\n"
_CLEANUP_S = 10.0  # for cancelled work to clean up; after that we do not wait for it

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, OutputDelta], None]  # (index of its choice, piece)
Events = AsyncGenerator[bytes, None]  # one or more at a time
encode = msgspec.json.Encoder().encode  # any value of an answer |-> bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer as its store knows it before it is computed, perhaps once more."""

    id: str
    created_s: int  # Unix time
    is_background: bool = False
    find_result: Callable[[], bytes | None] = lambda: None  # the whole answer, JSON, if it has ended before


class Frame(Protocol):
    """The parts of a stream around the events of its pieces."""

    ping: bytes  # a line without content, sent while there are no events

    @property
    def done(self) -> bytes:
        """Bytes after the last event of a complete stream."""

    def begin(self) -> list[bytes]:
        """Events that need no piece yet."""

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream after an error."""


class Writer(Frame, Protocol):
    """Writes the answer to one request, either as a stream or as a whole."""

    id: str  # of the answer

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        """Events for a piece of a choice."""

    def add(self, index: int, piece: OutputDelta) -> None:
        """Adds a piece of a choice to an answer that is not streamed."""

    async def whole(self) -> bytes:
        """The body of an answer that is not streamed, after its last piece."""


def json_response(value: object) -> Response:
    """A whole answer. Bytes must be JSON; other values are encoded."""
    return Response(value if isinstance(value, bytes) else encode(value), media_type="application/json")


def data_event(message: bytes) -> bytes:
    """An event without a name. `message`: JSON in one line."""
    return b"data: " + message + b"\n\n"


def named_event(kind: str, **fields: object) -> bytes:
    """An event whose name is its `type`."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


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
    hold = getattr(state, HOLD_CHOICES, None)
    if hold is not None:
        if is_streamed:
            raise bad_request("the answer to a line of a batch is not streamed; set stream to false", "stream")
        raw = replace(raw, priority=LAST_PRIORITY, deadline_ms=None)
    await state.turn.last_step()
    beginning = begin(served, raw, unique_id(state.request_id), state.arrived_s, state.key, request.headers.items)
    totals = await while_connected(request, raw, beginning)
    writer, pieces = new_writer(totals), stream_choices(served, totals, hold, is_whole=not is_streamed)
    totals.may_restart = served.options.restarts and not is_streamed
    if totals.trace is not None:
        totals.trace.note({"gen_ai.response.id": writer.id})
    if is_streamed:
        hold_s = find_hold_s(raw, totals.job)
        ring, adapter = served.ring, totals.job.generations[0].adapter
        events = write_events(writer, pieces)
        response: Response = EventStream(events, writer, hold_s, lambda: ring.can_serve(adapter), totals.warnings)
    else:

        async def whole() -> bytes:
            try:
                return await write_whole(writer, pieces)
            except ApiError as error:
                if not totals.restarts_after(error):
                    raise
            totals.restart()
            return await write_whole(new_writer(totals), stream_choices(served, totals, hold, is_whole=True))

        response = json_response(await until_disconnect(request.receive, whole()))
        response.headers.update(warning_headers(totals.warnings()))
    return response


def find_hold_s(raw: GenerateRequest, job: PreparedRequest) -> float:
    """How long a stream waits for a refusal before it begins."""
    has_grammar = any(generation.grammar for generation in job.generations)
    hold_s = PING_S if has_grammar else HOLD_S  # the decode worker may refuse a grammar
    return hold_s if raw.deadline_ms is None else max(hold_s, min(raw.deadline_ms / 1e3 + HOLD_S, PING_S))


async def write_whole(writer: Writer, pieces: Pieces) -> bytes:
    """The body, after the last piece."""
    async with aclosing(pieces):
        async for index, piece in pieces:
            writer.add(index, piece)
    return await writer.whole()


async def write_events(writer: Writer, pieces: Pieces) -> Events:
    """Yields the events of each piece that has some."""
    async with aclosing(pieces):
        async for index, piece in pieces:
            if events := writer.events(index, piece):
                yield b"".join(events)


class _UnsentError(Exception):
    """The client gets no more; the cause says why."""


class EventStream(Response):
    """Begins without waiting for the first events, then sends all as they arrive, and pings between.

    An error within `hold_s`, or while `can_serve` is false, becomes an ordinary error response; the frame writes a
    later one. `events` is always closed, also when the client leaves or is cut off because it stopped reading
    (connection.py). `find_warnings`: those known when the stream begins. `is_known`: the frame's beginning waits for
    it, or for the first events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        frame: Frame,
        hold_s: float,
        can_serve: Callable[[], bool],
        find_warnings: Callable[[], Sequence[str]],
        is_known: asyncio.Event | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._frame = frame
        self._hold_s = hold_s
        self._can_serve = can_serve
        self._find_warnings = find_warnings
        self._is_known = is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._serve(scope, receive, send))
        except ClientDisconnect:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = b"".join(self._frame.begin())  # before the first piece is counted
        async with aclosing(self._events):
            first = asyncio.create_task(self._next_events())
            try:
                await asyncio.wait({first}, timeout=self._hold_s)
                while not (first.done() or self._can_serve()):
                    await asyncio.wait({first}, timeout=PING_S)
                if first.done():
                    first.result()
                self.headers.update(warning_headers(self._find_warnings()))
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                pinging = asyncio.create_task(self._ping(send))
                try:
                    await self._wait_known(first)
                    await send(_body(begun))
                    end = await self._send_rest(first, send, scope["state"]["request_id"])
                finally:
                    pinging.cancel()
                    await asyncio.gather(pinging, return_exceptions=True)
                await send(_body(end, is_last=True))
            except ApiError as error:  # in the first events' place
                await error_response(error, scope["path"])(scope, receive, send)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)  # it reads `_events`, which are closed next

    async def _wait_known(self, first: asyncio.Task[bytes]) -> None:
        """Returns when the beginning may be sent."""
        if self._is_known is not None and not (self._is_known.is_set() or first.done()):
            known = asyncio.create_task(self._is_known.wait())
            await asyncio.wait({first, known}, return_when=asyncio.FIRST_COMPLETED)
            known.cancel()

    async def _next_events(self) -> bytes:
        """The next events; empty at the end."""
        return await anext(self._events, b"")

    async def _ping(self, send: Send) -> None:
        """Whenever nothing was sent for PING_S, also between tokens: a call may be held back until it is whole."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(self._sent_at + PING_S - loop.time())
            if loop.time() >= self._sent_at + PING_S:
                self._sent_at = loop.time()
                await send(_body(self._frame.ping))

    async def _send_rest(self, first: asyncio.Task[bytes], send: Send, request_id: str) -> bytes:
        """Returns the bytes that end the stream. Raises OSError if they cannot be sent."""
        try:
            events = await first
            while events:
                self._sent_at = asyncio.get_running_loop().time()
                try:
                    await send(_body(events))
                except OSError as error:
                    raise _UnsentError from error
                events = await self._next_events()
        except ApiError as error:
            return self._frame.failure(error)
        except _UnsentError as error:
            raise error.__cause__ or error from None
        except Exception:
            _log.exception("answer failed")
            message = f"request {request_id} failed inside the service; its log says why"
            return self._frame.failure(ApiError(500, message, None, "internal_error"))
        return self._frame.done


async def while_connected(request: Request, raw: GenerateRequest, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which prepares `raw`. As `until_disconnect` if that waits for images."""
    return await (until_disconnect(request.receive, work) if raw.has_images else work)


def _body(data: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects, cancels `work` and raises ClientDisconnect.

    The body must have been read. `work` is cancelled once, so its cleanup may await (unlike in anyio's cancel scopes).
    """

    async def wait_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(wait_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone}, timeout=_CLEANUP_S)
