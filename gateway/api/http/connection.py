"""One HTTP connection: uvicorn's, with a limit on how long a client may stall."""

import asyncio
import resource
import socket
import ssl
from contextlib import suppress
from typing import Any

import h11
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import ApiError
from gateway.held import Held, Holder

_log = structlog.get_logger()

_LOOKS = 10  # checks per `client_timeout_s`; a stop of this process, however long, counts as one check at most
KEEP_ALIVE_S = 75  # longer than load balancers in front keep idle connections: they close first, not we
_EARLY_BYTES = 64 << 10  # plus one read of at most 256 KiB
MAX_CONNECTIONS = 10_000  # and at most three quarters of the files that the process may open
_UNSENT_BYTES = 32 << 10  # the most that the kernel takes beyond those on their way; its default: whole answers


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, and `client_timeout_s`: how long a client may stall. `held`: counts answers not read."""

    def __init__(
        self,
        app: ASGIApp,
        client_timeout_s: float,
        stop_s: int,
        tls: ssl.SSLContext | None = None,
        held: Held | None = None,
    ) -> None:
        """`tls`: of HTTPS; None: plain HTTP."""
        super().__init__(
            app,
            http=BoundedConnection,
            ws="none",  # no route is one: an upgrade is a request like others, with the same checks
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=stop_s,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_context_factory=(lambda *_: tls) if tls else None,
        )
        self.client_timeout_s = client_timeout_s
        self.held = held or Held()
        self.most_connections = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
        self.connections: dict[BoundedConnection, None] = {}  # the one that was answered or came longest ago first
        self.num_gave_way = 0

    def add_connection(self, added: "BoundedConnection") -> None:
        """When there are too many, the oldest one gives way of those that wait for a request."""
        self.connections[added] = None
        if len(self.connections) <= self.most_connections:
            return
        oldest = next((one for one in self.connections if not one.is_answering), added)
        if not self.num_gave_way & (self.num_gave_way - 1):  # the 1st, 2nd, 4th, 8th
            _log.warning("too many connections: the oldest idle gives way", most=self.most_connections)
        self.num_gave_way += 1
        del self.connections[oldest]
        oldest.transport.abort()


class _Flow(FlowControl):
    """Keeps reading while a request is answered: we notice a disconnect only while reading from the socket.

    The data belongs to later requests. Above _EARLY_BYTES of it reading stops; we then notice a disconnect only when
    the answer is sent or the request times out.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection) -> None:
        super().__init__(transport)
        self._conn = conn

    def pause_reading(self) -> None:
        """uvicorn calls this when data follows a whole request, and when much of a body is unread."""
        if self._conn.their_state is h11.SEND_BODY or self._is_full:
            super().pause_reading()

    def resume_reading(self) -> None:
        """uvicorn calls this when the app awaits `receive`, and after each answer."""
        if self.read_paused and not self._is_full:
            super().resume_reading()

    @property
    def _is_full(self) -> bool:
        return len(self._conn.trailing_data[0]) > _EARLY_BYTES


class BoundedConnection(H11Protocol):
    """Cuts a client off when it stalls for `client_timeout_s` during its turn. That cancels the running request.

    It is the client's turn while no request is answered: it must send a whole head. It is also its turn while our send
    buffer is full or the connection is closing: it must read some data. Reading restarts its time; we notice a read
    when the kernel takes more from us, once half of its _UNSENT_BYTES is on its way.

    Uses h11, not "auto" (httptools if that is installed): h11 also limits the size of a head.
    """

    config: ServerConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._next_look: asyncio.TimerHandle
        self._num_idle_looks = 0  # consecutive checks in which the client had its turn and did nothing
        self._num_untaken = 0  # bytes in our send buffer at the last check
        self._unread = Holder("", lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.conn)
        self._look_later()
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self.config.add_connection(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_idle_looks = 0
        if self.config.connections.pop(self, True) is None:
            self.config.connections[self] = None  # its time begins anew

    def pause_writing(self) -> None:
        super().pause_writing()
        self._hold(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_idle_looks = 0
        self.config.held.end(self._unread)

    def _hold(self, num_bytes: int) -> None:
        with suppress(ApiError):  # it is there already: bodies are refused until there is room
            self.config.held.hold(self._unread, num_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        self.config.connections.pop(self, None)
        self.config.held.end(self._unread)
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look_later(self) -> None:
        self._next_look = self.loop.call_later(self.config.client_timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        num_untaken = self.transport.get_write_buffer_size()
        is_clients_turn = not self.is_answering or self.flow.write_paused or self.transport.is_closing()
        is_idle = is_clients_turn and num_untaken >= self._num_untaken
        self._num_idle_looks = self._num_idle_looks + 1 if is_idle else 0
        if num_untaken < self._num_untaken and self.flow.write_paused:
            self._hold(num_untaken)
        self._num_untaken = num_untaken
        if self._num_idle_looks <= _LOOKS:
            self._look_later()
            return
        if self.is_answering:
            seconds, request_id = self.config.client_timeout_s, self.scope["state"].get("request_id")
            _log.warning("client stopped reading; request cancelled", after_s=seconds, request_id=request_id)
        self.transport.abort()  # close() would wait until the client reads the rest
