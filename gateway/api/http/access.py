"""Who may call a route. Each route says what it needs and checks it itself, before a body is read.

So no spelling of a path leads around a check. A route that says nothing needs an API key.
"""

import re
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gateway.access.keys import KEY_OF_REQUEST, Keys
from gateway.api.access import log_key
from gateway.errors import ApiError, bad_request
from runtime.addresses import find_ip, matches_host, split_host

_READING = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Need(Enum):
    """The key that a route asks of its callers."""

    NOTHING = 0
    API_KEY = 1
    ADMIN_KEY = 2


def open_to_all(handler: Handler) -> Handler:
    """The route of this handler needs no key: it is for probes, or shows no secret."""
    return _needing(handler, Need.NOTHING)


def admin_only(handler: Handler) -> Handler:
    """The route of this handler needs the admin key."""
    return _needing(handler, Need.ADMIN_KEY)


def _needing(handler: Handler, need: Need) -> Handler:
    handler.__dict__["need"] = need
    return handler


class CheckedRoute(APIRoute):
    """A route that checks its callers. All routes of the service are of this class."""

    @property
    def need(self) -> Need:
        """The key that the route's handler asks for; an API key unless it says otherwise."""
        need: Need = getattr(self.endpoint, "need", Need.API_KEY)
        return need

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        access: Access = scope["app"].state.access
        access.check(scope, self.need)
        await super().handle(scope, receive, send)


class Access:
    """Checks callers: their key, the host that they call, and the page that they come from.

    Browsers send no preflight for a body of plain text. Our own page's origin equals the Host header, also behind a
    proxy that forwards this header. A stranger's host name may lead here (DNS rebinding), so that its pages pass for
    our own: where no key is asked for, only names that are ours are served.
    """

    def __init__(self, keys: Keys, cors_origins: Collection[str], hosts: Collection[str]) -> None:
        """`hosts`: names by which the service is called, besides localhost and addresses; "*": any."""
        self._keys = keys
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._hosts = tuple(hosts)

    def check(self, scope: Scope, need: Need = Need.API_KEY) -> None:
        """Raises ApiError 400, 401 or 403. Notes the key in the request's state, unless it is known already."""
        state = scope["state"]
        if need is Need.ADMIN_KEY:
            state[KEY_OF_REQUEST] = self._keys.check_admin(scope["headers"])
        elif need is Need.API_KEY and KEY_OF_REQUEST not in state:
            state[KEY_OF_REQUEST] = self._keys.check(scope["headers"])
        if KEY_OF_REQUEST in state:
            log_key(state[KEY_OF_REQUEST])
        if _CONTROL.search(scope["path"]):
            raise bad_request(
                "the path has control characters; call one that is in /openapi.json", None, "invalid_path"
            )
        headers = dict(reversed(scope["headers"]))  # the first of equal names counts
        host = headers.get(b"host", b"").lower()
        if self._keys.is_open:
            self._check_host(host.decode("latin-1"))
        if scope["method"] not in _READING and (origin := headers.get(b"origin")) is not None:
            self._check_origin(origin, host)

    async def refuse_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 404 where nothing is served, once the caller is checked."""
        if scope["type"] == "http":
            self.check(scope)
        raise HTTPException(404)

    def _check_host(self, given: str) -> None:
        host = split_host(given)
        if host == "localhost" or find_ip(host) or "*" in self._hosts or matches_host(self._hosts, host):
            return
        advice = f"start it with --allowed-host={host[:200]}" if host else "send its name or address as Host"
        message = f"this service asks for no key and is not called {given[:200]!r}; {advice}"
        raise ApiError(403, message, None, "host_not_allowed")

    def _check_origin(self, origin: bytes, host: bytes) -> None:
        if b"*" in self._origins or origin in self._origins:
            return
        scheme, _, own = origin.lower().partition(b"://")  # may differ from ours: a proxy may end TLS
        if not own or own != host.removesuffix(_DEFAULT_PORTS.get(scheme, b"")):
            shown = origin.decode("latin-1")[:200]
            message = f"pages of {shown} may not call: start the gateway with --cors-origins={shown} if they should"
            raise ApiError(403, message, None, "origin_not_allowed")
