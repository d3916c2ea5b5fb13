"""Clients' TLS: one certificate for REST and gRPC, read again when it changes, while connections go on."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cli.certs import certs
from gateway.api.http.connection import ServerConfig
from gateway.api.tls import ServerTls
from gateway.main import RestServer
from runtime import file_watch, rpc
from runtime.config import ServeConfig
from runtime.settings import ConfigError
from tests.support.api_server import WAIT_S


async def say(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate and its key, of an authority `name`."""
    assert certs(folder / name) == 0
    return folder / name / "cert.pem", folder / name / "key.pem"


@asynccontextmanager
async def serve(tls: ServerTls) -> AsyncIterator[tuple[int, int]]:
    """Ports of REST and gRPC."""
    listener = rpc.listen_tcp("127.0.0.1", 0)
    rest = RestServer(ServerConfig(Starlette(routes=[Route("/", say)]), 5.0, 1, tls.context))
    serving = asyncio.create_task(rest.serve(sockets=[listener]))
    server = rpc.build_server()
    port = rpc.bind(server, "127.0.0.1", 0, tls.credentials)
    await rpc.start(server)
    following = asyncio.create_task(tls.follow())
    yield listener.getsockname()[1], port
    following.cancel()
    rest.should_exit = True
    await serving
    await server.stop(0)


async def ask_rest(port: int, ca: Path) -> str:
    context = ssl.create_default_context(cafile=ca)
    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=WAIT_S) as client:
        return (await client.get(f"https://127.0.0.1:{port}/")).text


async def ask_grpc(port: int, ca: Path) -> int:
    credentials = grpc.ssl_channel_credentials(await asyncio.to_thread(ca.read_bytes))
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)).status
        return status


async def serves(ca: Path, rest: int, grpc_port: int) -> bool:
    try:
        return (await ask_rest(rest, ca), await ask_grpc(grpc_port, ca)) == ("hello", 1)
    except (httpx.ConnectError, grpc.aio.AioRpcError):
        return False


async def test_a_new_certificate_is_served_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.02)
    (tmp_path / "used").mkdir()
    cert, key = tmp_path / "used" / "cert.pem", tmp_path / "used" / "key.pem"
    for made, used in zip(make(tmp_path, "old"), (cert, key), strict=True):
        shutil.copy(made, used)
    old, new = tmp_path / "old" / "ca.pem", tmp_path / "new" / "ca.pem"
    async with serve(ServerTls(cert, key)) as (rest, grpc_port):
        assert (await ask_rest(rest, old), await ask_grpc(grpc_port, old)) == ("hello", 1)
        with pytest.raises(httpx.HTTPError):
            await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{rest}/")
        context = ssl.create_default_context(cafile=old)
        async with httpx.AsyncClient(verify=context, trust_env=False, timeout=WAIT_S) as before:
            await before.get(f"https://127.0.0.1:{rest}/")
            new_cert, new_key = make(tmp_path, "new")
            shutil.copy(new_cert, cert)  # the old key does not fit: both stay as they were
            await asyncio.sleep(0.2)
            assert (await ask_rest(rest, old), await ask_grpc(grpc_port, old)) == ("hello", 1)
            shutil.copy(new_key, key)
            async with asyncio.timeout(WAIT_S):
                while not await serves(new, rest, grpc_port):  # noqa: ASYNC110  no event for it
                    await asyncio.sleep(0.02)
            assert (await before.get(f"https://127.0.0.1:{rest}/")).text == "hello", "the connection is another"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await ask_rest(rest, old)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask_grpc(grpc_port, old)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "one")
    _, other = make(tmp_path, "two")
    (tmp_path / "rubbish").write_text("x")
    for wrong in ((cert, other), (tmp_path / "rubbish", key), (cert, tmp_path / "rubbish"), (tmp_path / "none", key)):
        with pytest.raises(ValueError, match=r"--tls-cert .* and --tls-key .* cannot be used"):
            ServerTls(*wrong)
    assert x509.load_pem_x509_certificate(cert.read_bytes())
    for cert_file, key_file in (("a", ""), ("", "a")):
        with pytest.raises(ConfigError, match="--tls-key needs"):
            ServeConfig(tls_cert=cert_file, tls_key=key_file)
