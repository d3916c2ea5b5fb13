"""Access between processes by certificates and secrets, and what is refused before that. Real sockets."""

import asyncio
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.certs import build_files, certs
from cli.plan import plan_gateway, plan_workers
from cli.service import CommandError
from gateway.router.fleet import Fleet
from protos import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.config import ServeConfig
from runtime.config_parts import ProcessConfig
from runtime.settings import ConfigError
from runtime.trust import TlsFiles, Trust, find_problem, load_trust
from tests.support.fake_workers import PATIENCE_S, FakeDecode, Signal

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
SECRET = Trust(secret="0123456789abcdef")
HERE = ("localhost", "127.0.0.1")


def issue(now: datetime = NOW, hosts: tuple[str, ...] = HERE) -> TlsFiles:
    files = build_files(hosts, now, DAY)
    return TlsFiles(*(files[name][0] for name in ("ca.pem", "cert.pem", "key.pem")))


GOOD, FOREIGN, EXPIRED, ELSEWHERE = issue(), issue(), issue(NOW - 3 * DAY), issue(hosts=("worker.example",))
MIXED = replace(FOREIGN, ca=GOOD.ca)  # trusts us, but is not trusted


def outcome(server_trust: Trust, client_trust: Trust) -> str:
    """The outcome of a call between two processes: "served", or the error as the client sees it."""

    async def scenario() -> str:
        server = server_trust.build_server()
        FakeDecode("D1", Signal()).add_to(server)
        port = server_trust.bind(server, "127.0.0.1", 0)
        await rpc.start(server)
        channel = client_trust.open_channel(f"127.0.0.1:{port}")
        try:
            await worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
            return "served"
        except grpc.aio.AioRpcError as error:
            return rpc.find_distrust(error) or error.code().name
        finally:
            await channel.close()
            await server.stop(None)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("server", "client", "expected"),
    [
        (Trust(GOOD), Trust(GOOD), "served"),
        (Trust(GOOD), Trust(FOREIGN), "no certificate of our authority (unable to get local issuer certificate)"),
        (Trust(FOREIGN), Trust(GOOD), "no certificate of our authority (unable to get local issuer certificate)"),
        (Trust(EXPIRED), Trust(EXPIRED), "no certificate of our authority (certificate has expired)"),
        (Trust(ELSEWHERE), Trust(ELSEWHERE), "its certificate does not name this address"),
        (Trust(GOOD), Trust(MIXED), "UNAVAILABLE"),
        (Trust(GOOD), Trust(), "UNAVAILABLE"),
        (Trust(), Trust(GOOD), "it does not speak TLS"),
        (SECRET, SECRET, "served"),
        (SECRET, Trust(), "it refuses our calls, without the fleet secret: give"),
        (SECRET, Trust(secret="another-0123456789"), "it refuses our calls, with a wrong fleet secret: give"),
        (Trust(GOOD, SECRET.secret), Trust(GOOD, SECRET.secret), "served"),
        (Trust(GOOD, SECRET.secret), Trust(GOOD), "it refuses our calls, without the fleet secret"),
        (Trust(), SECRET, "served"),
    ],
)  # fmt: skip
def test_who_is_let_in(server: Trust, client: Trust, expected: str) -> None:
    assert outcome(server, client).startswith(expected)


async def test_every_call_needs_the_secret_but_health_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    server = SECRET.build_server()
    FakeDecode("D1", Signal()).add_to(server)
    address = f"127.0.0.1:{SECRET.bind(server, '127.0.0.1', 0)}"
    await rpc.start(server)
    methods = [f"Decode/{name}" for name in ("Reserve", "Steps", "Abort", "Handshake", "Renew", "Offer")]
    async with rpc.open_channel(address) as channel:
        for method in (*methods, "Worker/Status", "KvPages/Read", "Prefill/Run", "Nothing/Here"):
            for metadata in ((), (("baton-fleet-secret", "0123456789abcdeX"),), (("baton-fleet-secret", ""),)):
                call: Any = channel.unary_unary(f"/baton.v1.{method}")
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(b"", metadata=metadata, timeout=PATIENCE_S)
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
        said = capsys.readouterr().out
        assert "call without the fleet secret refused" in said and "call with a wrong fleet secret refused" in said
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with SECRET.open_channel(address) as channel:  # both unary and streaming calls carry the secret
        stub = decode_pb2_grpc.DecodeStub(channel)
        await worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
        stream = stub.Steps(decode_pb2.StepsRequest(gateway="g"), timeout=PATIENCE_S)
        assert await stream.read() is not grpc.aio.EOF
        stream.cancel()
    await server.stop(None)


def test_a_gateway_says_once_whom_it_cannot_trust(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        server = SECRET.build_server()
        signal = Signal()
        FakeDecode("D1", signal).add_to(server)
        address = f"127.0.0.1:{SECRET.bind(server, '127.0.0.1', 0)}"
        await rpc.start(server)
        fleet = Fleet([], [address], PATIENCE_S, PATIENCE_S, 0, Trust().open_channel)
        polls = 0

        def count() -> None:
            nonlocal polls
            polls += 1
            signal.fire()

        fleet.changes.follow(count)
        fleet.start()
        await signal.until(lambda: polls > 6)
        trouble = fleet.decode[address].find_trouble() or ""
        assert "give all processes the same BATON_FLEET_SECRET" in trouble
        await fleet.close()
        await server.stop(None)

    asyncio.run(scenario())
    assert capsys.readouterr().out.count("worker not trusted") == 1


class TestSettings:
    """What is refused before any socket is opened."""

    @pytest.mark.parametrize(
        "secret", ["short", "x" * 15, "with space 0123456", "ümlaut-0123456789", "nul\0-0123456789"]
    )
    def test_a_secret_that_cannot_be_one_is_refused_without_being_shown(self, secret: str) -> None:
        with pytest.raises(ConfigError, match="BATON_FLEET_SECRET needs 16") as refusal:
            ProcessConfig(fleet_secret=secret)
        assert secret not in str(refusal.value)

    def test_the_secret_travels_to_children_by_environment_alone(self) -> None:
        config = ServeConfig(fleet_secret=SECRET.secret)
        for spec in (*plan_workers(config), plan_gateway(config, ("a:1",), ("b:1",))):
            assert spec.environment["BATON_FLEET_SECRET"] == SECRET.secret
            assert not any(SECRET.secret in word for word in spec.command)

    def test_secrets_and_keys_are_not_in_what_may_be_logged(self) -> None:
        shown = repr(ProcessConfig(fleet_secret=SECRET.secret)) + repr(SECRET) + repr(Trust(GOOD))
        assert SECRET.secret not in shown
        assert "PRIVATE KEY" not in shown

    def test_what_is_wrong_with_certificates_is_said(self, tmp_path: Path) -> None:
        assert find_problem(GOOD, NOW) is None
        assert "valid from" in (find_problem(GOOD, NOW + 2 * DAY) or "")
        assert "valid from" in (find_problem(GOOD, NOW - DAY) or "")
        assert find_problem(replace(GOOD, key=FOREIGN.key), NOW) == "key.pem does not belong to cert.pem"
        assert find_problem(MIXED, NOW) == "cert.pem was not signed by ca.pem"
        assert "no valid PEM" in (find_problem(replace(GOOD, cert=b"rubbish"), NOW) or "")
        assert "no valid PEM" in (find_problem(replace(GOOD, key=b""), NOW) or "")
        with pytest.raises(ConfigError, match=r"needs ca.pem, cert.pem, key.pem, such as `baton certs` makes"):
            load_trust(ProcessConfig(tls_dir=str(tmp_path)))


class TestCerts:
    """`baton certs`."""

    def test_its_files_work_and_keys_are_private(self, tmp_path: Path) -> None:
        folder = tmp_path / "new"
        assert certs(folder, host=("worker.example", "192.0.2.7"), days=2) == 0
        trust = load_trust(ProcessConfig(tls_dir=str(folder)))
        assert outcome(trust, trust) == "served"
        for name in ("key.pem", "ca-key.pem"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match=r"has ca\.pem, ca-key\.pem, cert\.pem, key\.pem already"):
            certs(folder)
        before = (folder / "cert.pem").read_bytes()
        assert certs(folder, force=True) == 0
        assert (folder / "cert.pem").read_bytes() != before

    def test_what_it_cannot_make_is_refused(self, tmp_path: Path) -> None:
        for days in (0, -1, 10**9):
            with pytest.raises(ConfigError, match="--days needs 1 to"):
                certs(tmp_path, days=days)
        with pytest.raises(ConfigError, match="--host needs an ASCII name"):
            certs(tmp_path, host=("bücher.example",))
        (tmp_path / "file").touch()
        with pytest.raises(CommandError, match="cannot write to"):
            certs(tmp_path / "file" / "below")
