"""How long the server waits for clients that take whole answers slowly, or not at all. Real sockets."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn
import uvloop
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.rest.connection import ServerConfig

CLIENT_S = 3.0
NUM_BYTES = 6 << 20  # far more than the kernel holds
BYTES_PER_S = NUM_BYTES / (4 * CLIENT_S)
PATIENCE_S = 20.0  # on a loaded machine


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    """Answers everything with NUM_BYTES."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * NUM_BYTES)(scope, receive, send)

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


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(server: uvicorn.Server) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    client.settimeout(PATIENCE_S)
    client.connect(server.servers[0].sockets[0].getsockname())
    client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return client


def test_a_slow_but_steady_reader_gets_the_whole_answer(server: uvicorn.Server) -> None:
    with ask(server) as client:
        begun, count = time.monotonic(), 0
        while piece := client.recv(64 << 10):
            count += len(piece)
            time.sleep(max(begun + count / BYTES_PER_S - time.monotonic(), 0))
    assert count > NUM_BYTES
    assert time.monotonic() - begun > 3 * CLIENT_S


@pytest.mark.parametrize("num_read", [0, 1 << 20])
def test_a_reader_that_stops_is_cut_off_in_time(server: uvicorn.Server, num_read: int) -> None:
    with ask(server) as client:
        count = 0
        while count < num_read:
            count += len(client.recv(64 << 10))
        begun = time.monotonic()
        wait_until(lambda: server.server_state.connections)
        wait_until(lambda: not server.server_state.connections)
        assert time.monotonic() - begun > CLIENT_S / 2
