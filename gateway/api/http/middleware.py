"""Wraps every HTTP request: its id, and a 500 for bugs. Plain ASGI: it does not buffer streams."""

import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.keys import ANYBODY, KEY_OF_REQUEST, Key
from gateway.api.access import REQUEST_ID_HEADER, pick_request_id
from gateway.api.http.errors import error_response
from gateway.errors import ApiError, bad_request

_log = structlog.get_logger()
_TWO_LENGTHS = bad_request("Content-Length and Transfer-Encoding are both given; send one of them", None, "two_lengths")


def _has_two_lengths(scope: Scope) -> bool:
    """Whether a proxy in front may see another end of the body than we do, and another next request."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}


class RequestScope:
    """Gives each request an id (in logs, answer and state) and an arrival time; turns bugs into a 500.

    Answers say what their key has left.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = pick_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {}).update(request_id=request_id, arrived_s=time.perf_counter())
        if scope["method"] == "HEAD":  # as GET; the server, which has the scope that we were given, leaves the body out
            scope = {**scope, "method": "GET"}
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                key: Key = scope["state"].get(KEY_OF_REQUEST, ANYBODY)
                headers.update(key.allowance.headers(time.perf_counter()))
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            if _has_two_lengths(scope):
                close = {"connection": "close"}
                await error_response(_TWO_LENGTHS, scope["path"], close)(scope, receive, send_with_id)
                return
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                _log.exception("request failed", path=scope["path"])
                if is_started:
                    raise  # the server closes the connection, so the client does not take this for a whole answer
                error = ApiError(500, f"request {request_id} failed inside the service; its log says why", None, "bug")
                await error_response(error, scope["path"])(scope, receive, send_with_id)
