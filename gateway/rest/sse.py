"""Server-sent events: a stream of events as one HTTP response.

Knows how a stream starts, fails and ends on the wire; must not know what the events say.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.rest.connection import abort_connection
from gateway.rest.disconnect import until_disconnect
from gateway.rest.http_errors import error_response
from gateway.rest.openai_answers import build_error, encode
from gateway.waking_timeout import waking_timeout

_log = structlog.get_logger()


class StreamEnd(Protocol):
    """How an API ends its streams."""

    @property
    def done(self) -> bytes:
        """After the last event of a stream that went well."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Events instead of those that a stream still lacks."""
        ...


class DataEnd:
    """How chat and plain completions end theirs."""

    done = b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        return data_event(encode(build_error(error)))


def data_event(message: bytes) -> bytes:
    """An event without a name. `message`: JSON in one line."""
    return b"data: " + message + b"\n\n"


def named_event(name: str, message: bytes) -> bytes:
    """An event with a name. `message`: JSON in one line."""
    return b"event: " + name.encode() + b"\ndata: " + message + b"\n\n"


class EventStream(Response):
    """Sends each batch of events as it comes.

    A failure before the first batch is an ordinary error response; after it, `end` tells it. The events' iterator is
    closed in every case: also when the client leaves or stops reading.
    """

    media_type = "text/event-stream"

    def __init__(
        self, batches: AsyncGenerator[list[bytes], None], stalled_client_s: float, end: StreamEnd | None = None
    ) -> None:
        """`end`: by default that of OpenAI's completions."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._batches = batches
        self._stalled_client_s = stalled_client_s
        self._end = end or DataEnd()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the response."""
        try:
            await until_disconnect(receive, self._serve(scope, receive, send))
        except ClientDisconnect:
            return
        except TimeoutError:
            _log.warning("client stopped reading; request cancelled", after_s=self._stalled_client_s)
            abort_connection(scope)  # closing it would wait until the client takes what is left

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._batches):
            try:
                first = await anext(self._batches)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, b"".join(first))
            await self._send(send, await self._send_rest(send), is_last=True)

    async def _send_rest(self, send: Send) -> bytes:
        """Returns what ends the stream."""
        try:
            async for batch in self._batches:
                await self._send(send, b"".join(batch))
        except ApiError as error:
            return self._end.failure(error)
        except (TimeoutError, OSError):
            raise
        except Exception:
            _log.exception("answer failed")
            bug = ApiError(500, "the answer failed inside the service; its log says why", None, "internal_error")
            return self._end.failure(bug)
        return self._end.done

    async def _send(self, send: Send, body: bytes, is_last: bool = False) -> None:
        """Waits for the client, but not for ever. Raises TimeoutError."""
        async with waking_timeout(self._stalled_client_s):
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
