"""Worker processes that get garbage, silent sockets and calls by strangers; and a service with mTLS."""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.certs import certs
from protos import worker_pb2
from runtime.config_parts import ProcessConfig
from runtime.events import Ready
from runtime.trust import Trust, load_trust
from tests.support.fake_workers import PATIENCE_S
from tests.support.fleet import Process
from tests.support.ipv6 import needs_ipv6
from tests.support.live import HTTP, Live, serve_calmly, wait_until

SECRET = Trust(secret="0123456789abcdef")


@contextmanager
def worker(role: str, log: Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Ready]:
    """A worker process with the demo model, or a gateway; must exit with status 0 on SIGTERM."""
    sizes = () if role == "gateway" else ("--kv-memory-mib=32", "--threads=1")
    process = Process(role, role, 0, 0, (*sizes, *flags), log, env=env or {}, forks=True)
    process.start()
    try:
        yield process.wait_ready()
        process.terminate()
        assert process.wait_exited(PATIENCE_S) == 0, process.read_log()
    finally:
        process.kill()


RUBBISH = [
    b"\x00" * 100,
    bytes(range(256)) * 40,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /baton.v1.Worker/Status HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    + b"\x00\xff\xff\x01\x05\x00\x00\x00\x01" * 9,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"A" * 60,
    b"SSH-2.0-OpenSSH_9.0\r\n",
    b"\x80",
]


def test_rubbish_and_silent_sockets_disturb_no_worker(tmp_path: Path) -> None:
    with worker("decode", tmp_path / "decode", env={"BATON_FLEET_SECRET": SECRET.secret}) as decode:
        asyncio.run(disturb(decode, SECRET))
        with pytest.raises(grpc.aio.AioRpcError):
            asyncio.run(ask_status(Trust(), decode))
    log = (tmp_path / "decode").read_text()
    assert "call without the fleet secret refused" in log
    assert "no fleet secret" not in log and "Traceback" not in log


async def disturb(ready: Ready, trust: Trust) -> None:
    host, _, port = ready.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(50)]
    for number, rubbish in enumerate(RUBBISH * 3):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
            raw.sendall(rubbish)
            if number % 2:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing sends a reset
        status = await ask_status(trust, ready)
        assert status.peer.incarnation == ready.incarnation
    for one in silent:
        one.close()
    assert (await ask_status(trust, ready)).used_pages == 0


async def ask_status(trust: Trust, ready: Ready) -> worker_pb2.WorkerStatus:
    async with trust.open_channel(ready.address) as channel:
        ask: Any = channel.unary_unary(
            "/baton.v1.Worker/Status",
            request_serializer=worker_pb2.StatusRequest.SerializeToString,
            response_deserializer=worker_pb2.WorkerStatus.FromString,
        )
        status: worker_pb2.WorkerStatus = await ask(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
        return status


def test_a_service_with_mtls_serves_and_lets_nobody_else_near_its_workers(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs(folder)
    trust = load_trust(ProcessConfig(tls_dir=str(folder)))
    flags = (f"--tls-dir={folder}", "--transport=grpc", "--require-transport", "--kv-memory-mib=64")
    with serve_calmly("demo", *flags) as live:
        asyncio.run(disturb(find_ready(live, "prefill-0"), trust))
        body = {"prompt": "Once upon a time there was a fox", "max_tokens": 5, "temperature": 0, "model": "baton-demo"}
        answer = HTTP.post(f"{live.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert live.metric("decode-0", "kv_transfer_bytes_total", {"transport": "grpc"}) > 0
        for name in ("prefill-0", "decode-0"):
            stranger = find_ready(live, name)
            with pytest.raises(grpc.aio.AioRpcError):
                asyncio.run(ask_status(Trust(), stranger))
            asyncio.run(ask_status(trust, stranger))
        assert "no fleet secret" not in live.read_log() and "Traceback" not in live.read_log()


def find_ready(live: Live, name: str) -> Ready:
    """What a worker of a service has reported."""
    return Ready(name[:-2], live.addresses[name], "", 0, live.find(name)["incarnation"])


@needs_ipv6
def test_a_gateway_and_a_worker_on_ipv6_addresses(tmp_path: Path) -> None:
    with worker("decode", tmp_path / "decode", "--host=::1", "--ops-host=::1") as decode:
        assert decode.address.startswith("[::1]:")
        [line] = [line for line in (tmp_path / "decode").read_text().splitlines() if "no fleet secret" in line]
        assert "BATON_FLEET_SECRET" in line  # it was started by hand, without one
        assert asyncio.run(ask_status(Trust(), decode)).peer.address == decode.address
        assert decode.ops_address.startswith("[::1]:")
        metrics = HTTP.get(f"http://{decode.ops_address}/metrics", timeout=60)
        assert "baton:kv_cache_used_pages" in metrics.text
        flags = ("--host=::", "--port=0", "--grpc-port=0", f"--decode={decode.address}")
        with worker("gateway", tmp_path / "gateway", *flags) as gateway:
            for address, grpc_address in (  # IPv6's wildcard includes IPv4
                (gateway.address, gateway.detail["grpc"]),
                (gateway.address.replace("[::]", "127.0.0.1"), gateway.detail["grpc"].replace("[::]", "127.0.0.1")),
            ):
                url = f"http://{address}/ready"
                wait_until(lambda url=url: HTTP.get(url, timeout=60).status_code == 200)  # type: ignore[misc]
                with grpc.insecure_channel(grpc_address) as channel:
                    models: Any = channel.unary_unary("/baton.v1.Inference/ListModels")
                    assert models(b"", timeout=60)
