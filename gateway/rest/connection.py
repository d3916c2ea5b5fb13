"""One HTTP connection of a client, as uvicorn serves it, but not for ever.

Knows sockets and uvicorn's protocol class; must not know what is asked.
"""

import asyncio
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_ABORT = "baton.abort"  # in the scope's extensions
_SEND_BYTES = 32 << 10  # the kernel takes twice that; left to itself it takes megabytes: whole answers nobody reads


class ServerConfig(uvicorn.Config):
    """For a server whose clients have `client_timeout_s` to send a request's head."""

    def __init__(self, app: ASGIApp, client_timeout_s: float, stop_s: int) -> None:
        super().__init__(
            app, http=BoundedConnection, log_config=None, access_log=False, timeout_graceful_shutdown=stop_s
        )
        self.client_timeout_s = client_timeout_s


class BoundedConnection(H11Protocol):
    """Cuts clients off that connect and do not ask, ask without end, or do not take the end of an answer.

    h11 rather than "auto", which means httptools where that is installed: h11 also bounds a head's size.
    """

    config: ServerConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._served_app = self.app
        self.app = self._serve
        self._cut: asyncio.TimerHandle | None = None  # runs while a request's head is awaited
        self._num_untaken = 0  # bytes of the last answer that were still in our buffer when it began to run

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {_ABORT: self.transport.abort}
        await self._served_app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self._limit_wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._stop_limit()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_limit()
        if not self._is_answering:  # a request that was pipelined behind it
            self._limit_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_limit()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_wait(self) -> None:
        self._num_untaken = self.transport.get_write_buffer_size()
        self._cut = self.loop.call_later(self.config.client_timeout_s, self._cut_off)

    def _cut_off(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._num_untaken:
            self._limit_wait()  # a slow reader, but it reads
        else:
            self.transport.abort()

    def _stop_limit(self) -> None:
        if self._cut is not None:
            self._cut.cancel()


def abort_connection(scope: Scope) -> None:
    """Drop the client's connection with all that it did not take. No-op where the server cannot."""
    abort = scope.get("extensions", {}).get(_ABORT)
    if abort is not None:
        abort()
