"""IPv6 addresses as hosts, with brackets and without: sockets of every kind, channels and certificates."""

import asyncio
import socket
from pathlib import Path

import pytest

from cli.certs import certs
from protos import worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.addresses import is_any, is_host_pattern, is_loopback, is_public, split_host
from runtime.config_parts import ProcessConfig
from runtime.ops import OpsServer
from runtime.trust import Trust, load_trust
from tests.support.fake_workers import PATIENCE_S, FakeDecode, Signal
from tests.support.ipv6 import needs_ipv6
from tests.support.live import HTTP

SPELLINGS = ["::1", "[::1]", "::", "[::]"]


def test_what_hosts_stand_for() -> None:
    assert all(is_loopback(host) for host in ("::1", "[::1]", "127.0.0.1", "127.1.2.3", "localhost"))
    assert not any(is_loopback(host) for host in ("::", "0.0.0.0", "fe80::1", "example.org"))
    assert all(is_any(host) for host in ("::", "[::]", "0:0:0:0:0:0:0:0", "0.0.0.0"))
    assert not any(is_any(host) for host in ("::1", "127.0.0.1", "localhost"))


def test_this_hosts_own_address_is_one_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its routes; without any, by its name, as in a network of containers that leads nowhere else."""
    with socket.create_server((rpc.own_address(), 0)):  # it is one of this host's
        pass

    def has_no_route(*_: object) -> None:
        raise OSError("Network is unreachable")

    names = {"box": ["127.0.1.1", "10.1.2.3"], "alone": ["127.0.0.1"]}
    monkeypatch.setattr(socket, "socket", has_no_route)
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, _: [(0, 0, 0, "", (one, 0)) for one in names[name]])
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    assert rpc.own_address() == "10.1.2.3"
    monkeypatch.setattr(socket, "gethostname", lambda: "alone")
    with pytest.raises(OSError, match="set --advertise-host"):
        rpc.own_address()


@needs_ipv6
@pytest.mark.parametrize("host", SPELLINGS)
def test_listeners_take_every_spelling(host: str) -> None:
    targets = ["::1", "127.0.0.1"] if is_any(host) else ["::1"]
    with rpc.listen_tcp(host, 0) as listener:
        for target in targets:
            socket.create_connection((target, listener.getsockname()[1]), timeout=PATIENCE_S).close()
        with pytest.raises(OSError, match=r"cannot listen on \[::1?\]:\d+: Address already in use"):
            rpc.listen_tcp(host, listener.getsockname()[1])
    with OpsServer(host, 0) as ops:
        port = ops.address.rpartition(":")[2]
        assert HTTP.get(f"http://[::1]:{port}/live", timeout=PATIENCE_S).status_code == 200


@needs_ipv6
@pytest.mark.parametrize("host", SPELLINGS)
def test_grpc_takes_every_spelling_with_certificates_too(host: str, tmp_path: Path) -> None:
    certs(tmp_path, host=("[::2]",))

    async def scenario(trust: Trust) -> None:
        server = trust.build_server()
        FakeDecode("D1", Signal()).add_to(server)
        port = trust.bind(server, host, 0)
        await rpc.start(server)
        async with trust.open_channel(f"[::1]:{port}") as channel:
            await worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
        await server.stop(None)

    for trust in (Trust(), load_trust(ProcessConfig(tls_dir=str(tmp_path)))):
        asyncio.run(scenario(trust))


@pytest.mark.parametrize("host", ["img.example", "*.img.example", "localhost", "93.184.216.34", "2606:4700::1111"])
def test_a_host_that_images_may_come_from(host: str) -> None:
    assert is_host_pattern(host)


@pytest.mark.parametrize(
    "host", ["", "*", "*.", "a.*", "https://a.example", "a.example/x", "a.example:80", "a b", "a@b"]
)
def test_what_is_no_such_host(host: str) -> None:
    assert not is_host_pattern(host)


@pytest.mark.parametrize("host", ["93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34"])
def test_an_address_of_the_internet(host: str) -> None:
    assert is_public(host)


CLOSED = "img.example 127.0.0.1 198.18.0.1 240.0.0.1 192.88.99.1 ff02::1 2001:db8::1 fec0::1 feff::1 64:ff9b::1"


@pytest.mark.parametrize("host", [*CLOSED.split(), "::ffff:192.88.99.1"])
def test_an_address_of_a_closed_network_or_none(host: str) -> None:
    assert not is_public(host)


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("a.example:80", "a.example"), ("A.example.", "a.example"), ("[::1]:8000", "[::1]"), ("127.0.0.1", "127.0.0.1"),
        ("", ""), ("a,b", ""), ("a b", ""), ("::1", ""), ("[::1", ""), ("a:b", ""), ("a:80:80", ""),
    ],
)  # fmt: skip
def test_the_host_that_a_client_calls(authority: str, host: str) -> None:
    assert split_host(authority) == host
