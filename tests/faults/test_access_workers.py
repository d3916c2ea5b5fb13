"""Strangers at the workers' ports: closed, counted, logged without a flood. Row 22 of the fault list.

On a port without TLS gRPC closes what is not HTTP/2 without reporting it, so that is not counted.
"""

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.router.admission import DRAINING
from protos import worker_pb2
from runtime.trust import SECRET_KEY, TlsFiles
from tests.faults.strangers import CALL_S, ask_status, issue, knock, open_channel, write_tls_dir
from tests.support.fault_answers import Truth, ask
from tests.support.fleet import HOST, Process, ProcessFleet, free_ports, run_fleet
from tests.support.live import HTTP, wait_until

pytestmark = pytest.mark.timeout(900)  # starting three processes takes minutes on a loaded machine

SECRET = "row-22-fleet-secret"
TIMES = 40
DRAIN_S = 120.0  # for a loaded machine
HEALTH = health_pb2.HealthCheckRequest()
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LIVE, READY = (200, "live\n"), (200, "ready\n")
COUNTED_S = 30.0
OWN = issue()
RUBBISH = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"\x80",
    b"SSH-2.0-x\r\n",
]
EVENT, NO_SECRET = '"event": "TLS handshake failed"', "call without the fleet secret refused"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """A pair with certificates and a secret."""
    flags = (f"--tls-dir={write_tls_dir(tmp_path_factory.mktemp('tls'), OWN)}", f"--drain-s={DRAIN_S:g}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_FLEET_SECRET", SECRET)
        with run_fleet(flags=dict.fromkeys(("gateway", "prefill", "decode"), flags)) as fleet:
            yield fleet


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_row_22_strangers_are_closed_and_counted(guarded: ProcessFleet, truth: Truth, name: str) -> None:
    """Wrong, expired or missing certificates, random bytes, and wrong secrets."""
    worker = guarded[name]
    expired = issue(datetime.now(UTC) - timedelta(days=3))
    strangers = [None, issue(), expired]
    before, lines = worker.metric("peers_refused_total", {"by": "tls"}), worker.read_log().count(EVENT)
    for _ in range(TIMES):
        for files in strangers:
            assert knock(worker.address, files and TlsFiles(OWN.ca, files.cert, files.key)) is not grpc.StatusCode.OK
        for start in RUBBISH:
            _throw(worker.port, start + os.urandom(2000))
    _check_said(worker, before, lines, TIMES * (len(strangers) + len(RUBBISH)))
    before, lines = worker.metric("peers_refused_total", {"by": "secret"}), worker.read_log().count(NO_SECRET)
    with open_channel(worker.address, OWN) as channel:
        for _ in range(TIMES):
            for secret in ("", SECRET[:-1], SECRET + "x", "another-fleet-secret"):
                assert ask_status(channel, secret) is grpc.StatusCode.UNAUTHENTICATED
        assert ask_status(channel, SECRET) is grpc.StatusCode.OK
    assert worker.metric("peers_refused_total", {"by": "secret"}) == before + 4 * TIMES
    assert worker.read_log().count(NO_SECRET) - lines <= 1 + math.log2(4 * TIMES)
    truth.check_canary(guarded)


def _throw(port: int, data: bytes) -> None:
    """Send until the other side has closed."""
    with socket.create_connection((HOST, port), timeout=30) as raw:
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(1 << 16):
                pass
        except ConnectionError:
            pass  # closed while sending


def _check_said(worker: Process, before: float, lines: int, expected: int) -> None:
    """All were counted, and the log has at most one line per doubling of each reason."""
    wait_until(
        lambda: (
            worker.metric("peers_refused_total", {"by": "tls"}) >= before + expected * 0.95
        ),  # a few are cut too early
        COUNTED_S,
        lambda: (before, expected, worker.metric("peers_refused_total", {"by": "tls"})),
    )
    log = worker.read_log()
    said = log.count(EVENT) - lines
    print(f"row 22, {worker.name}: {expected} refused, {said} lines")
    num_reasons = 12  # OpenSSL's, for random bytes
    assert said <= num_reasons * (2 + math.log2(expected))
    assert "ssl_transport_security" not in log and "Traceback" not in log
    assert worker.is_running


def probe(process: Process, path: str) -> tuple[int, str]:
    """By plain HTTP, without key, secret and certificate."""
    answer = HTTP.get(f"http://{HOST}:{process.ops_port}{path}", timeout=CALL_S)
    return answer.status_code, answer.text


def open_health(fleet: ProcessFleet, process: Process) -> grpc.Channel:
    """Without the secret."""
    is_public = process is fleet.gateway
    return open_channel(fleet.grpc_address if is_public else process.address, None if is_public else OWN)


@pytest.mark.parametrize("name", ["decode-0", "gateway"])
def test_a_drain_shows_at_once_to_probes_without_secrets(guarded: ProcessFleet, truth: Truth, name: str) -> None:
    process = guarded[name]
    assert (probe(process, "/live"), probe(process, "/ready")) == (LIVE, READY)
    assert "baton:peers_refused_total" in probe(process, "/metrics")[1]
    stream = ask(guarded, num_tokens=1500)
    stream.wait_for_tokens(3)
    with open_health(guarded, process) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        if name == "gateway":
            process.terminate()
            wait_until(lambda: probe(process, "/ready") != READY)
            assert health.Check(HEALTH, timeout=CALL_S).status == NOT_SERVING
            assert probe(process, "/ready") == (503, f"{DRAINING}\n")
        else:
            watch = health.Watch(HEALTH, timeout=CALL_S)
            assert next(watch).status == SERVING
            drain: Any = channel.unary_unary("/baton.v1.Worker/Drain", worker_pb2.DrainRequest.SerializeToString)
            drain(worker_pb2.DrainRequest(), metadata=((SECRET_KEY, SECRET),), timeout=CALL_S)
            assert health.Check(HEALTH, timeout=CALL_S).status == NOT_SERVING
            assert next(watch).status == NOT_SERVING
            watch.cancel()
            assert probe(process, "/ready") == (503, "this worker is draining\n")
    assert probe(process, "/live") == LIVE
    assert not stream.is_over
    truth.check(stream)
    assert process.wait_exited(DRAIN_S) == 0
    process.restart()
    guarded.wait_until_whole()
    assert (probe(process, "/live"), probe(process, "/ready")) == (LIVE, READY)
    truth.check_canary(guarded)


def test_row_22_certificate_that_expires_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open connections go on; new ones are refused and counted, with the reason."""
    monkeypatch.delenv("BATON_FLEET_SECRET", raising=False)
    files, ends, worker = _start_with_short_certificate(tmp_path)
    try:
        with open_channel(worker.address, files) as early:
            assert ask_status(early) is grpc.StatusCode.OK
            time.sleep(max(0.0, (ends - datetime.now(UTC)).total_seconds()) + 2)
            for _ in range(TIMES):  # these clients trust any certificate and present the expired one
                assert knock(worker.address, files) is grpc.StatusCode.UNAVAILABLE
            assert ask_status(early) is grpc.StatusCode.OK
        _throw(worker.port, RUBBISH[0])
        _check_said(worker, 0, 0, 1)
    finally:
        worker.kill()


def _start_with_short_certificate(folder: Path) -> tuple[TlsFiles, datetime, Process]:
    """A worker, its trusted authority, and when its certificate expires: soon, but after its start."""
    for lifetime_s in (40, 200):  # the longer one if the start takes more than half a minute
        ends = datetime.now(UTC) + timedelta(seconds=lifetime_s)
        files = issue(lifetime=timedelta(seconds=lifetime_s))
        port, ops_port = free_ports(2)
        flags = (f"--port={port}", f"--ops-port={ops_port}", f"--tls-dir={write_tls_dir(folder, files)}")
        worker = Process("decode-0", "decode", port, ops_port, (*flags, "--kv-memory-mib=64"), folder / "log")
        worker.start()
        with suppress(AssertionError):  # already too late
            worker.wait_ready()
            if datetime.now(UTC) < ends - timedelta(seconds=10):
                return files, ends, worker
        worker.kill()
    raise AssertionError("the worker takes minutes to start")
