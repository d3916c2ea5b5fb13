"""Health and metrics of a process by plain HTTP, for orchestrators and scrapers: /live, /ready and /metrics, no key.

Runs on a thread of its own, and so answers while the process loads and when its event loop hangs.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from runtime.addresses import bracketed, find_ip, is_loopback, split_host
from runtime.rpc import listen_tcp

PATHS = ("/live", "/ready", "/metrics")
ANSWER_S = 3.0  # for the process's event loop
REQUEST_S = 10.0  # for a whole request, however slow its client
MAX_HEAD_BYTES = 8 << 10
MAX_CONNECTIONS = 64
# Of all processes' histograms, from 1 ms; each bucket about twice the previous one.
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

Answer = tuple[HTTPStatus, bytes]  # the status and the body without its last newline


def _unavailable(why: str) -> Answer:
    return HTTPStatus.SERVICE_UNAVAILABLE, why.encode()


def _is_own(header: str) -> bool:
    """Whether the header is not Host, or its value means this machine."""
    name, _, value = header.partition(":")
    host = split_host(value.strip())
    return name.strip().lower() != "host" or host == "localhost" or find_ip(host) is not None


@dataclass(frozen=True, slots=True)
class Probes:
    """Answers whether a process is alive and ready, and its metrics. Called on its asyncio thread."""

    find_stall: Callable[[], str | None]  # why only a restart helps; None: it lives
    find_obstacle: Callable[[], str | None]  # why it takes no requests now; None: it is ready
    registry: CollectorRegistry

    async def answer(self, path: str) -> Answer:
        """The answer to one of PATHS."""
        if path == "/metrics":
            return HTTPStatus.OK, generate_latest(self.registry).removesuffix(b"\n")
        trouble = self.find_stall() or (self.find_obstacle() if path == "/ready" else None)
        return (HTTPStatus.OK, path[1:].encode()) if trouble is None else _unavailable(trouble)


class OpsServer:
    """Listens from its construction to the end of the `with` block. Until `follow` the process counts as loading."""

    def __init__(self, host: str, port: int) -> None:
        """Begins to listen; with `port` 0 the system picks one. Raises OSError."""
        listener = listen_tcp(host, port, "--ops-port")
        self.address = f"{bracketed(host)}:{listener.getsockname()[1]}"
        self._is_local = is_loopback(host)
        self._followed: tuple[asyncio.AbstractEventLoop, Probes] | None = None
        self._connections: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(listener),), name="ops", daemon=True)
        self._thread.start()

    def __enter__(self) -> "OpsServer":
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set_result(None)
        self._thread.join(ANSWER_S)

    def follow(self, probes: Probes) -> None:
        """Loading is over: from now on `probes` answer, on the event loop that runs now."""
        self._followed = asyncio.get_running_loop(), probes

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._on_connection, sock=listener, limit=MAX_HEAD_BYTES):
            await asyncio.wrap_future(self._ended)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))  # not a probe: a probe takes milliseconds
            del self._connections[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                writer.write(await self._respond(head))
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # OSError includes TimeoutError
            pass
        except asyncio.CancelledError:  # the process ends; asyncio's streams would log a cancelled task as an error
            pass
        finally:
            writer.transport.abort()
            self._connections.pop(writer, None)

    async def _respond(self, head: str) -> bytes:
        """The response to a request with this head."""
        line, *headers = head.split("\r\n")
        method, _, rest = line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD are possible here"
        elif self._is_local and not all(map(_is_own, headers)):  # DNS rebinding: a stranger's page in a browser here
            status, text = HTTPStatus.FORBIDDEN, b"call this port as localhost or by an IP address"
        elif path not in PATHS:
            status, text = HTTPStatus.NOT_FOUND, f"only {', '.join(PATHS)} are here".encode()
        else:
            status, text = await self._ask(path)
        kind = CONTENT_TYPE_LATEST if path == "/metrics" and status is HTTPStatus.OK else "text/plain; charset=utf-8"
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nallow: GET, HEAD\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(text) + 1}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else text + b"\n")

    async def _ask(self, path: str) -> Answer:
        """The process's answer, or why it gives none."""
        if self._followed is None:
            return (HTTPStatus.OK, b"live") if path == "/live" else _unavailable("this process is loading")
        loop, probes = self._followed
        question = probes.answer(path)
        try:
            asked = asyncio.run_coroutine_threadsafe(question, loop)
        except RuntimeError:  # the loop is closed
            question.close()
            return _unavailable("this process is ending")
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), ANSWER_S)
        except TimeoutError:
            return _unavailable(f"the event loop has not answered for {ANSWER_S:g} s")
