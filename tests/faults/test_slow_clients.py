"""Clients that read or send nothing, or a byte now and then. Row 15 of the fault list."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.faults.load import Load
from tests.faults.soak import look_at
from tests.support.fault_answers import Truth
from tests.support.fleet import HOST, ProcessFleet, run_fleet
from tests.support.live import HTTP, wait_until

pytestmark = pytest.mark.timeout(600)

CLIENT_S = 3.0  # --client-timeout-s; the default is 60 s
SLACK_S = 120.0  # for a loaded machine
NUM_IDLE = 3000
GROWTH_BYTES = NUM_IDLE * (16 << 10)  # maximum memory of idle connections
SLACK_FILES = 16
LONG = 3900  # of an answer still being generated when its client is dropped
REQUEST = "\r\n".join(("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json", ""))


@pytest.fixture(scope="module")
def fleet() -> Iterator[ProcessFleet]:
    with run_fleet(flags={"gateway": [f"--client-timeout-s={CLIENT_S:g}"]}) as running:
        yield running


def connect(fleet: ProcessFleet, receive_bytes: int = 0) -> socket.socket:
    """`receive_bytes`: how much the kernel buffers for a client that does not read."""
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(SLACK_S)
    client.connect((HOST, fleet.gateway.port))
    return client


def ask_for_a_stream(fleet: ProcessFleet) -> socket.socket:
    """Start a long answer and wait for its beginning."""
    model = HTTP.get(f"{fleet.url}/v1/models", timeout=30).json()["data"][0]["id"]
    many_bytes = {"logprobs": 20}  # so that part of the answer fills the buffers on the way, at least 4 MiB
    fields = {"model": model, "prompt": [7, 8, 9], "max_tokens": LONG, "stream": True, "ignore_eos": True}
    body = json.dumps(fields | many_bytes)
    client = connect(fleet, receive_bytes=4096)
    client.sendall(f"{REQUEST}content-length: {len(body)}\r\n\r\n{body}".encode())
    assert client.recv(1)
    return client


def is_cut(client: socket.socket) -> bool:
    """Whether the other end is closed, once all it sent is read."""
    client.settimeout(SLACK_S)
    with suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
    return True  # a connection that is not cut runs into the socket's timeout


def num_files(fleet: ProcessFleet) -> int:
    return look_at(fleet.gateway).num_files


def wait_until_closed(fleet: ProcessFleet, num_before: int) -> None:
    """The gateway has no more open files than it had before."""
    wait_until(lambda: num_files(fleet) <= num_before + SLACK_FILES, SLACK_S, lambda: num_files(fleet))


@pytest.mark.parametrize("bytes_per_s", [0, 1])
def test_row_15_stream_that_is_not_read_is_cancelled_in_time(
    fleet: ProcessFleet, truth: Truth, bytes_per_s: int
) -> None:
    """Its pages are freed and its connection is cut; other requests are answered."""
    decode, before = fleet["decode-0"], fleet["decode-0"].metric("cancelled_total")
    given_up = fleet.gateway.metric("cancelled_total", {"phase": "decode"})
    clients = num_files(fleet)
    with ExitStack() as stack:
        load = stack.enter_context(Load(fleet, num_clients=3))
        stalled = [stack.enter_context(ask_for_a_stream(fleet)) for _ in range(2)]
        is_over = threading.Event()
        stack.callback(is_over.set)
        if bytes_per_s:
            threading.Thread(target=read_slowly, args=(stalled, bytes_per_s, is_over), daemon=True).start()
        wait_until(lambda: fleet.gateway.metric("cancelled_total", {"phase": "decode"}) >= given_up + 2, SLACK_S)
        wait_until(lambda: decode.metric("cancelled_total") >= before + 2, SLACK_S)
        assert fleet.gateway.read_log().count("client stopped reading") >= 2
        is_over.set()
        assert all(is_cut(client) for client in stalled)
        load.wait_for(3, SLACK_S)
    load.check(truth)
    fleet.wait_until_unused()
    wait_until_closed(fleet, clients)


def read_slowly(clients: list[socket.socket], bytes_per_s: int, is_over: threading.Event) -> None:
    while not is_over.wait(1.0):
        for client in clients:
            with suppress(OSError):
                client.recv(bytes_per_s)


def test_row_15_heads_and_bodies_that_never_end_are_cut_off(fleet: ProcessFleet, truth: Truth) -> None:
    before = num_files(fleet)
    with ExitStack() as stack:
        head, body, second = (stack.enter_context(connect(fleet)) for _ in range(3))
        head.sendall(b"GET /live HT")
        body.sendall(f"{REQUEST}content-length: 1000\r\n\r\n{{".encode())
        second.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\nGET /live HT")  # its first request is answered
        is_over = threading.Event()
        stack.callback(is_over.set)
        threading.Thread(target=send_slowly, args=([head, body, second], is_over), daemon=True).start()
        truth.check_canary(fleet)
        assert b" 408 " in body.recv(1 << 16)
        assert b" 200 " in second.recv(1 << 16)
        assert is_cut(head) and is_cut(second)
    wait_until_closed(fleet, before)


def send_slowly(clients: list[socket.socket], is_over: threading.Event) -> None:
    while not is_over.wait(0.5):
        for client in clients:
            with suppress(OSError):
                client.send(b"x")


def test_row_15_thousands_of_idle_sockets(fleet: ProcessFleet, truth: Truth) -> None:
    """They cost little memory, disturb no other client, and are closed in time."""
    files, memory = num_files(fleet), look_at(fleet.gateway).private_bytes
    with ExitStack() as stack:
        begun = time.monotonic()
        idle = [stack.enter_context(connect(fleet)) for _ in range(NUM_IDLE)]
        truth.check_canary(fleet)
        wait_until(lambda: HTTP.get(f"{fleet.url}/ready", timeout=SLACK_S).status_code == 200, SLACK_S)
        growth = look_at(fleet.gateway).private_bytes - memory
        assert growth < GROWTH_BYTES, f"{growth} bytes more"
        assert all(is_cut(client) for client in idle)
        seconds = time.monotonic() - begun
        wait_until_closed(fleet, files)
    truth.check_canary(fleet)
    print(f"row 15: {NUM_IDLE} idle sockets cost {growth / 2**20:.1f} MiB and were closed after {seconds:.1f} s")
