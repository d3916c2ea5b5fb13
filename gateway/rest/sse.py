"""Server-sent events: a stream of JSON messages as one HTTP response.

Knows how a stream starts, fails and ends on the wire; must not know what the messages say.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.patience import waking_timeout
from gateway.rest.connection import abort_connection
from gateway.rest.disconnect import until_disconnect
from gateway.rest.http_errors import error_response
from gateway.rest.openai_answers import build_error, encode

_log = structlog.get_logger()

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each batch of messages as it comes.

    A failure before the first batch is an ordinary error response; after it, an error message and the end of the stream
    without `[DONE]`. The messages' iterator is closed in every case: also when the client leaves or stops reading.
    """

    media_type = "text/event-stream"

    def __init__(self, batches: AsyncGenerator[list[bytes], None], stalled_client_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._batches = batches
        self._stalled_client_s = stalled_client_s

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
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, b"".join(map(_event, first)))
            await self._send(send, await self._send_rest(send), is_last=True)

    async def _send_rest(self, send: Send) -> bytes:
        """Returns what ends the stream."""
        try:
            async for batch in self._batches:
                await self._send(send, b"".join(map(_event, batch)))
        except ApiError as error:
            return _event(encode(build_error(error)))
        except (TimeoutError, OSError):
            raise
        except Exception:
            _log.exception("answer failed")
            bug = ApiError(500, "the answer failed inside the service; its log says why", None, "internal_error")
            return _event(encode(build_error(bug)))
        return _DONE

    async def _send(self, send: Send, body: bytes, is_last: bool = False) -> None:
        """Waits for the client, but not for ever. Raises TimeoutError."""
        async with waking_timeout(self._stalled_client_s):
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _event(message: bytes) -> bytes:
    return b"data: " + message + b"\n\n"
