"""Server-sent events: how a stream starts, waits, fails and ends over HTTP. Must not know what the events mean."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.http.disconnect import until_disconnect
from gateway.api.http.errors import error_response
from gateway.api.http.json_answer import encode
from gateway.errors import ApiError

_log = structlog.get_logger()

PING_S = 10.0  # proxies and clients give up connections that are silent for 30 s or more
COMMENT_PING = b": ping\n\n"

Batches = AsyncGenerator[list[bytes], None]


class StreamFrame(Protocol):
    """How an API begins and ends its streams."""

    done: bytes  # after the last event of a complete stream
    ping: bytes  # says nothing; while the first batch is not there

    def begin(self) -> list[bytes]:
        """Events that need no answer yet."""

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream after an error."""


def data_event(message: bytes) -> bytes:
    """An event without a name. `message`: JSON in one line."""
    return b"data: " + message + b"\n\n"


def named_event(kind: str, **fields: object) -> bytes:
    """An event whose name is its `type`."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


class EventStream(Response):
    """Begins without waiting for the first batch of events, then sends each batch as it arrives.

    An error within `hold_s`, or while `can_serve` is false, becomes an ordinary error response; the frame writes a
    later one. The iterator of batches is always closed, also when the client leaves or is cut off because it stopped
    reading (connection.py).
    """

    media_type = "text/event-stream"

    def __init__(self, batches: Batches, frame: StreamFrame, hold_s: float, can_serve: Callable[[], bool]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._batches = batches
        self._frame = frame
        self._hold_s = hold_s
        self._can_serve = can_serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._serve(scope, receive, send))
        except ClientDisconnect:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = b"".join(self._frame.begin())  # before the first batch is written
        async with aclosing(self._batches), _first_of(self._batches) as first:
            if await self._is_there(first):
                try:
                    first.result()
                except ApiError as error:
                    await error_response(error, scope["path"])(scope, receive, send)
                    return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(begun))
            await send(_body(await self._send_rest(first, send), is_last=True))

    async def _is_there(self, first: asyncio.Task[list[bytes]]) -> bool:
        """Whether the first batch, or an error in its place, came while the status could wait for it."""
        await asyncio.wait({first}, timeout=self._hold_s)
        while not (first.done() or self._can_serve()):
            await asyncio.wait({first}, timeout=PING_S)
        return first.done()

    async def _send_rest(self, first: asyncio.Task[list[bytes]], send: Send) -> bytes:
        """Returns the bytes that end the stream."""
        try:
            while not (await asyncio.wait({first}, timeout=PING_S))[0]:
                await send(_body(self._frame.ping))
            await send(_body(b"".join(first.result())))
            async for batch in self._batches:
                await send(_body(b"".join(batch)))
        except ApiError as error:
            return self._frame.failure(error)
        except OSError:
            raise
        except Exception:
            _log.exception("answer failed")
            bug = ApiError(500, "the answer failed inside the service; its log says why", None, "internal_error")
            return self._frame.failure(bug)
        return self._frame.done


@asynccontextmanager
async def _first_of(batches: Batches) -> AsyncIterator[asyncio.Task[list[bytes]]]:
    """A task that gets the first batch; it is over when the block ends."""

    async def get() -> list[bytes]:
        return await anext(batches)

    task = asyncio.create_task(get())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        _ = task.cancelled() or task.exception()  # else asyncio logs an error that came as the client left


def _body(data: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
