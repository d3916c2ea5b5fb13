"""Wraps every HTTP request: its id, API key and origin, and a 500 for bugs. Plain ASGI: it does not buffer streams."""

import time
from collections.abc import Collection, Sequence

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.access import REQUEST_ID_HEADER, check_admin, check_key, pick_request_id
from gateway.api.http.errors import error_response
from gateway.errors import ApiError

_log = structlog.get_logger()

OPEN_PATHS = frozenset({"/live", "/health"})  # of the API; probes have no key
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


class RequestScope:
    """Gives each request an id (in logs, answer and state) and an arrival time; turns bugs into a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = pick_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {}).update(request_id=request_id, arrived_s=time.perf_counter())
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                _log.exception("request failed", path=scope["path"])
                if is_started:
                    raise  # the server closes the connection, so the client does not take this for a whole answer
                error = ApiError(500, f"request {request_id} failed inside the service; its log says why", None, "bug")
                await error_response(error, scope["path"])(scope, receive, send_with_id)


class AccessCheck:
    """Refuses requests without a valid API key, except to the open paths, and POSTs from pages of other origins.

    Those to ADMIN_PATHS need the admin key.

    Browsers send no preflight for a body of plain text. Our own page's origin equals the Host header, also behind a
    proxy that forwards this header.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        admin_key: str,
        open_paths: Collection[str],
        cors_origins: Sequence[str],
    ) -> None:
        self._app = app
        self._admin_key = admin_key
        self._api_keys = tuple(api_keys)
        self._open_paths = frozenset(open_paths)
        self._origins = frozenset(origin.encode() for origin in cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(reversed(scope["headers"]))  # the first of equal names counts
        if scope["path"] in ADMIN_PATHS:
            check_admin(headers.get(b"authorization", b""), self._admin_key)
        elif scope["path"] not in self._open_paths:
            check_key(headers.get(b"authorization", b""), self._api_keys, headers.get(b"x-api-key"))
        origin = headers.get(b"origin")
        if scope["method"] != "POST" or origin is None or b"*" in self._origins or origin in self._origins:
            return
        scheme, _, own = origin.lower().partition(b"://")  # may differ from ours: a proxy may end TLS
        if not own or own != headers.get(b"host", b"").lower().removesuffix(_DEFAULT_PORTS.get(scheme, b"")):
            shown = origin.decode("latin-1")[:200]
            message = f"pages of {shown} may not call: start the gateway with --cors-origins={shown} if they should"
            raise ApiError(403, message, None, "origin_not_allowed")
