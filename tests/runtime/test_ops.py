"""The ops port: what it answers while its process loads, serves, hangs and ends, and to clients of all manners."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from runtime import ops
from runtime.lifecycle import Shutdown
from runtime.ops import OpsServer, Probes
from tests.support.live import HTTP
from worker.process import build_probes
from worker.thread import EngineThread

PATIENCE_S = 30.0
LOADING = "this process is loading\n"


@pytest.fixture
def server() -> Iterator[OpsServer]:
    with OpsServer("127.0.0.1", 0) as server:
        yield server


def get(server: OpsServer, path: str, method: str = "GET") -> httpx.Response:
    return HTTP.request(method, f"http://{server.address}{path}", timeout=PATIENCE_S)


def ask(server: OpsServer, path: str) -> tuple[int, str]:
    answer = get(server, path)
    return answer.status_code, answer.text


def following(server: OpsServer, probes: Probes, look: Callable[[], None]) -> None:
    """Call `look` on another thread while `probes` answer on an event loop."""

    async def follow() -> None:
        server.follow(probes)
        await asyncio.to_thread(look)

    asyncio.run(follow())


def probes(stall: str | None = None, obstacle: str | None = None) -> Probes:
    registry = CollectorRegistry()
    Counter("baton:seen", "Of this test", registry=registry).inc(3)
    return Probes(lambda: stall, lambda: obstacle, registry)


def test_a_process_that_loads_is_live_and_not_ready(server: OpsServer) -> None:
    assert ask(server, "/live") == (200, "live\n")
    assert ask(server, "/ready") == ask(server, "/metrics") == (503, LOADING)


@pytest.mark.parametrize(
    ("stall", "obstacle", "live", "ready"),
    [
        (None, None, (200, "live\n"), (200, "ready\n")),
        (None, "no worker", (200, "live\n"), (503, "no worker\n")),
        ("stück", None, (503, "stück\n"), (503, "stück\n")),
        ("stuck", "no worker", (503, "stuck\n"), (503, "stuck\n")),
    ],
)
def test_the_process_answers_with_its_reasons(
    server: OpsServer, stall: str | None, obstacle: str | None, live: object, ready: object
) -> None:
    def look() -> None:
        assert (ask(server, "/live"), ask(server, "/ready")) == (live, ready)
        metrics = get(server, "/metrics?name=x")
        assert metrics.status_code == 200 and metrics.text.endswith("\n") and "baton:seen_total 3.0\n" in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain; version=")

    following(server, probes(stall, obstacle), look)


def test_other_paths_and_methods_are_refused_in_one_line(server: OpsServer) -> None:
    for path in ("/", "/status", "/live/", "//live", "/LIVE"):
        assert ask(server, path) == (404, "only /live, /ready, /metrics are here\n"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = get(server, "/live", method)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD"), method
    head = get(server, "/live", "HEAD")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "5", b"")
    assert get(server, "/ready", "HEAD").status_code == 503


def test_an_event_loop_that_hangs_is_reported(server: OpsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ANSWER_S", 0.2)

    async def hang() -> None:
        server.follow(probes())
        answers: list[tuple[int, str]] = []
        asking = threading.Thread(target=lambda: answers.extend(ask(server, path) for path in ops.PATHS))
        asking.start()
        asking.join(PATIENCE_S)  # on the event loop, which answers nothing meanwhile
        assert answers == [(503, "the event loop has not answered for 0.2 s\n")] * 3

        monkeypatch.setattr(ops, "ANSWER_S", PATIENCE_S)
        assert await asyncio.to_thread(ask, server, "/live") == (200, "live\n")

    asyncio.run(hang())
    assert ask(server, "/live") == (503, "this process is ending\n")


def test_a_worker_stuck_in_a_step_is_not_live(server: OpsServer) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def step() -> bool:
        begun.set()
        return not may_end.wait(PATIENCE_S)

    async def hang() -> None:
        thread, shutdown = EngineThread(step), Shutdown(PATIENCE_S, lambda: 1)
        parts: Any = SimpleNamespace(
            loop=SimpleNamespace(thread=thread), metrics=SimpleNamespace(registry=CollectorRegistry())
        )
        server.follow(build_probes(parts, shutdown, stall_s=0.01))
        assert await asyncio.to_thread(ask, server, "/live") == (200, "live\n"), "an idle engine is in no step"
        thread.start()
        await asyncio.to_thread(begun.wait)
        await asyncio.sleep(0.02)
        for path in ("/live", "/ready"):
            status, reason = await asyncio.to_thread(ask, server, path)
            assert status == 503 and reason.startswith("this worker has been in one engine step for "), reason
        may_end.set()
        await asyncio.to_thread(thread.stop, PATIENCE_S)
        server.follow(build_probes(parts, shutdown, stall_s=PATIENCE_S))
        shutdown.begin("test")
        assert await asyncio.to_thread(ask, server, "/live") == (200, "live\n")
        assert await asyncio.to_thread(ask, server, "/ready") == (503, "this worker is draining\n")

    asyncio.run(hang())


async def test_a_second_signal_does_what_one_did_before() -> None:
    ended = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    try:
        shutdown = Shutdown(PATIENCE_S, lambda: 1)
        shutdown.listen()
        signal.raise_signal(signal.SIGTERM)
        await shutdown.begun.wait()
        assert ended == []
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_to(server: OpsServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def read_all(raw: socket.socket) -> bytes:
    """What comes until the other side closes; TimeoutError if it does not."""
    try:
        return b"".join(iter(lambda: raw.recv(1 << 16), b""))
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9100", 200), ("127.0.0.1", 200), ("[::1]:1", 200), ("rebound.example", 403), ("gateway:9100", 403)],
)
def test_on_loopback_only_names_of_this_machine_are_answered(server: OpsServer, host: str, status: int) -> None:
    """A stranger's name that leads here (DNS rebinding) would have its page read metrics and addresses."""
    answer = HTTP.get(f"http://{server.address}/live", headers={"host": host}, timeout=PATIENCE_S)
    assert answer.status_code == status
    with OpsServer("0.0.0.0", 0) as public:
        local = public.address.replace("0.0.0.0", "127.0.0.1")
        assert HTTP.get(f"http://{local}/live", headers={"host": host}, timeout=PATIENCE_S).status_code == 200


def test_slow_and_rude_clients_are_cut_off(server: OpsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "REQUEST_S", 0.2)
    for start in (b"", b"GET /live HTTP/1.1\r\nhost: x\r\n", b"GET /" + b"x" * (64 << 10), b"\0\xff" * 100):
        with open_to(server) as raw:
            with suppress(ConnectionError):
                raw.sendall(start)
            assert read_all(raw) == b""
    with open_to(server) as raw, pytest.raises(ConnectionError):  # a byte now and then does not help
        for _ in range(1000):
            raw.sendall(b"x")
            time.sleep(0.01)
    monkeypatch.setattr(ops, "REQUEST_S", PATIENCE_S)
    assert ask(server, "/live") == (200, "live\n")


def test_silent_connections_keep_no_probe_out(server: OpsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones make room."""
    monkeypatch.setattr(ops, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(ops, "REQUEST_S", 10 * PATIENCE_S)
    silent = [open_to(server) for _ in range(12)]
    assert ask(server, "/live") == (200, "live\n")
    for raw in silent[:8]:
        assert read_all(raw) == b""
    for raw in silent:
        raw.close()
