"""The server waits only so long for slow clients, and notices when clients leave. Real sockets."""

import asyncio
import queue
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress

import pytest
import uvicorn
import uvloop
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.access import waking_timeout
from gateway.api.http.answer import EventStream, until_disconnect
from gateway.api.http.connection import BoundedConnection, ServerConfig
from gateway.errors import ApiError
from gateway.held import IDLE_S

CLIENT_S = 2.0
NUM_BYTES = 6 << 20  # far more than the kernel buffers
BYTES_PER_S = NUM_BYTES / (3 * CLIENT_S)
PATIENCE_S = 60.0  # on a loaded machine
EARLY_BYTES = 1 << 20  # more than the server keeps of requests before their turn
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing sends RST instead of FIN


class Endless:
    """Writes a stream that neither ends nor fails by itself."""

    done, ping = b"", b""

    def begin(self) -> list[bytes]:
        return []

    def failure(self, error: ApiError) -> bytes:
        raise error


class App:
    """/N answers N bytes, /work takes until `finish()`, /stream never ends.

    /stop stops the whole server for longer than the clients' timeout, /bug fails once its answer is no longer read.
    """

    def __init__(self) -> None:
        self.begun, self.given_up = queue.SimpleQueue[str](), queue.SimpleQueue[str]()  # paths of work and streams
        self._loop: asyncio.AbstractEventLoop
        self._is_finished: asyncio.Event
        self.is_stuck: Callable[[], bool] = lambda: False  # whether bytes wait in the server's own buffer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await EventStream(self._events(), Endless(), 0.1, lambda: True, tuple)(scope, receive, send)
        elif scope["path"] == "/work":
            with suppress(ClientDisconnect):
                body = await until_disconnect(receive, self._work())
                await Response(body)(scope, receive, send)
        elif scope["path"] == "/bug":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not self.is_stuck():
                await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
                await asyncio.sleep(0.01)
            raise RuntimeError("bug")
        elif scope["path"] == "/stop":
            self.begun.put("/stop")
            time.sleep(1.2 * CLIENT_S)  # noqa: ASYNC251, as SIGSTOP would
            await Response(b"")(scope, receive, send)
        else:
            await Response(b"x" * int(scope["path"][1:]))(scope, receive, send)

    def finish(self) -> None:
        """End the work that has begun."""
        self._loop.call_soon_threadsafe(self._is_finished.set)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self.begun.put("/stream")
        try:
            while True:
                yield bytes(10_000)
                await asyncio.sleep(0.01)
        finally:
            self.given_up.put("/stream")

    async def _work(self) -> bytes:
        self._loop, self._is_finished = asyncio.get_running_loop(), asyncio.Event()
        self.begun.put("/work")
        try:
            await self._is_finished.wait()
        except asyncio.CancelledError:
            self.given_up.put("/work")
            raise
        return b"worked"


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def server(app: App) -> Iterator[uvicorn.Server]:
    config = ServerConfig(app, CLIENT_S, 1)
    config.lifespan = "off"
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: uvloop.run(server.serve([listener])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield server
    server.should_exit = True
    thread.join(PATIENCE_S)


def test_an_upgrade_is_a_request_like_others(server: uvicorn.Server) -> None:
    lines = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA==")
    with ask(server, request("/5", *lines)) as client:
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_load_balancers_close_idle_connections_before_we_do() -> None:
    """They keep one for 60 s by default, and fail a request that they send on one that we close meanwhile."""
    assert ServerConfig(App(), 90.0, 1).timeout_keep_alive > 60


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_cut(server: uvicorn.Server, begun: float) -> float:
    """Seconds from `begun`, when there was no connection yet, until the server has none left."""
    wait_until(lambda: server.server_state.connections or time.monotonic() - begun > CLIENT_S)
    wait_until(lambda: not server.server_state.connections)
    return time.monotonic() - begun


def request(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "host: localhost", *lines, "", "")).encode()


def last(path: str) -> bytes:
    return request(path, "connection: close")


def ask(server: uvicorn.Server, *requests: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    client.settimeout(PATIENCE_S)
    client.connect(server.servers[0].sockets[0].getsockname())
    client.sendall(b"".join(requests))
    return client


def read_bodies(client: socket.socket) -> list[bytes]:
    """The bodies of all answers until the server closes."""
    answers = b"".join(iter(lambda: client.recv(64 << 10), b"")).split(b"HTTP/1.1 200 OK\r\n")
    return [answer.partition(b"\r\n\r\n")[2] for answer in answers[1:]]


def only_connection(server: uvicorn.Server) -> BoundedConnection:
    (connection,) = server.server_state.connections
    assert isinstance(connection, BoundedConnection)
    return connection


def num_early_bytes(server: uvicorn.Server) -> int:
    """How much the server keeps of requests behind the one it is answering."""
    return len(only_connection(server).conn.trailing_data[0])


def test_the_kernel_sends_as_much_at_a_time_as_the_way_takes(server: uvicorn.Server) -> None:
    """Its buffer grows while the client reads: 64 KiB of it would be 0.6 MB/s where a round trip takes 100 ms."""
    with ask(server, last(f"/{4 * NUM_BYTES}")) as client:
        count = 0
        while count < 2 * NUM_BYTES:
            count += len(client.recv(1 << 20))
        connection = only_connection(server).transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 1 << 18


def test_a_slow_but_steady_reader_gets_whole_answers(server: uvicorn.Server) -> None:
    half = f"/{NUM_BYTES // 2}"
    with ask(server, request(half), last(half)) as client:
        begun, count = time.monotonic(), 0
        while piece := client.recv(64 << 10):
            count += len(piece)
            time.sleep(max(begun + count / BYTES_PER_S - time.monotonic(), 0))
    assert count > NUM_BYTES
    assert time.monotonic() - begun > 2 * CLIENT_S


def test_a_reader_that_stops_is_cut_off_in_time(server: uvicorn.Server) -> None:
    begun, count = time.monotonic(), 0
    with ask(server, last(f"/{NUM_BYTES}")) as client:
        while count < 1 << 20:
            count += len(client.recv(64 << 10))
        assert wait_until_cut(server, begun) > CLIENT_S / 2


def test_the_oldest_idle_connection_gives_way(server: uvicorn.Server, app: App) -> None:
    config = server.config
    assert isinstance(config, ServerConfig)
    config.most_connections = 3
    with ask(server, request("/work")) as works, ask(server) as idle, ask(server, request("/1")) as used:
        assert used.recv(1)
        wait_until(lambda: len(config.connections) == 3)
        with ask(server, last("/5")) as new:
            assert read_bodies(new) == [b"xxxxx"]
            assert not idle.recv(1)
        app.finish()
        assert works.recv(1)
        used.sendall(last("/2"))
        assert used.recv(1)
    assert config.num_gave_way == 1


def test_answers_not_read_are_bounded_together(server: uvicorn.Server) -> None:
    config = server.config
    assert isinstance(config, ServerConfig)
    config.held.bytes.most = NUM_BYTES * 3 // 2
    with ask(server, last(f"/{NUM_BYTES}")) as first:
        wait_until(lambda: config.held.bytes.total > NUM_BYTES // 2)
        time.sleep(1.1 * IDLE_S)
        with ask(server, last(f"/{NUM_BYTES}")) as second:
            assert len(read_bodies(second)[0]) == NUM_BYTES
        with suppress(ConnectionResetError):
            assert len(read_bodies(first)[0]) < NUM_BYTES
    wait_until(lambda: not config.held.bytes.total)
    assert config.held.num_gave_way == 1


@pytest.mark.parametrize("path", ["/stream", "/work"])
def test_who_asks_again_without_having_read_is_given_up(server: uvicorn.Server, app: App, path: str) -> None:
    with ask(server, request(f"/{NUM_BYTES}")) as client:
        assert client.recv(1)
        client.sendall(request(path))
        assert app.begun.get(timeout=PATIENCE_S) == app.given_up.get(timeout=PATIENCE_S) == path
        wait_until(lambda: not server.server_state.connections)


def test_the_rest_of_an_answer_that_failed_does_not_wait_for_ever(server: uvicorn.Server, app: App) -> None:
    app.is_stuck = lambda: only_connection(server).transport.get_write_buffer_size() > 0
    begun = time.monotonic()
    with ask(server, request("/bug")):
        assert wait_until_cut(server, begun) > CLIENT_S / 2


def test_a_stop_of_the_server_is_not_a_clients_fault(server: uvicorn.Server, app: App) -> None:
    head = last("/5")
    with ask(server, head[:10]) as client, ask(server, last("/stop")):
        assert app.begun.get(timeout=PATIENCE_S) == "/stop"
        client.sendall(head[10:])
        assert read_bodies(client) == [b"x" * 5]


@pytest.mark.parametrize(
    ("early", "is_reset"), [(b"\r\n", False), (request("/5"), True), (request("/5") * 100 + b"GET /5 HT", False)]
)
def test_a_departure_is_seen_behind_early_bytes(server: uvicorn.Server, app: App, early: bytes, is_reset: bool) -> None:
    with ask(server, request("/work")) as client:
        assert app.begun.get(timeout=PATIENCE_S) == "/work"
        client.sendall(early)
        wait_until(lambda: num_early_bytes(server) == len(early))
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    assert app.given_up.get(timeout=PATIENCE_S) == "/work"


def test_no_more_than_a_few_early_bytes_are_kept_and_all_are_answered_in_their_turn(
    server: uvicorn.Server, app: App
) -> None:
    large = request("/5", f"content-length: {NUM_BYTES}") + bytes(NUM_BYTES)
    with ask(server, request("/work")) as client:
        assert app.begun.get(timeout=PATIENCE_S) == "/work"
        sender = threading.Thread(target=client.sendall, args=(large + last("/6"),))
        sender.start()
        wait_until(lambda: num_early_bytes(server) > 64 << 10)
        sender.join(0.4)  # enough for all to arrive, if the server read them
        assert num_early_bytes(server) < EARLY_BYTES
        app.finish()
        assert read_bodies(client) == [b"worked", b"x" * 5, b"x" * 6]
        sender.join()


# -- the timeout of bodies, and of messages over gRPC -----------------------------------------------------------------


def test_a_timeout_ends_what_takes_too_long_and_nothing_else() -> None:
    async def wait() -> int:
        with pytest.raises(TimeoutError):
            async with waking_timeout(0.05):
                await asyncio.Event().wait()
        async with waking_timeout(0.05):
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)  # past the limit, outside the block
        return len(asyncio.all_tasks())

    assert asyncio.run(wait()) == 1


def test_a_timeout_excuses_a_stop_of_this_process() -> None:
    """On waking both the awaited result and the deadline have arrived."""

    async def wait() -> None:
        is_there = asyncio.Event()
        async with waking_timeout(0.4):
            asyncio.get_running_loop().call_later(0.01, is_there.set)
            time.sleep(0.6)  # noqa: ASYNC251, as SIGSTOP would
            await is_there.wait()

    asyncio.run(wait())
