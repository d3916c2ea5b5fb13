"""Server-sent events: how a stream starts, fails and ends over HTTP. Must not know what the events mean."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
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


class StreamEnd(Protocol):
    """How an API ends its streams."""

    done: bytes  # after the last event of a complete stream

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream after an error."""


def data_event(message: bytes) -> bytes:
    """An event without a name. `message`: JSON in one line."""
    return b"data: " + message + b"\n\n"


def named_event(kind: str, **fields: object) -> bytes:
    """An event whose name is its `type`."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


class EventStream(Response):
    """Sends each batch of events as it arrives.

    An error before the first batch becomes an ordinary error response; `end` writes a later one. The iterator of
    batches is always closed, also when the client leaves or is cut off because it stopped reading (connection.py).
    """

    media_type = "text/event-stream"

    def __init__(self, batches: AsyncGenerator[list[bytes], None], end: StreamEnd) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._batches = batches
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._serve(scope, receive, send))
        except ClientDisconnect:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._batches):
            try:
                first = await anext(self._batches)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(b"".join(first)))
            await send(_body(await self._send_rest(send), is_last=True))

    async def _send_rest(self, send: Send) -> bytes:
        """Returns the bytes that end the stream."""
        try:
            async for batch in self._batches:
                await send(_body(b"".join(batch)))
        except ApiError as error:
            return self._end.failure(error)
        except OSError:
            raise
        except Exception:
            _log.exception("answer failed")
            bug = ApiError(500, "the answer failed inside the service; its log says why", None, "internal_error")
            return self._end.failure(bug)
        return self._end.done


def _body(data: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
