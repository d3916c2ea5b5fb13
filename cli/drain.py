"""`baton drain WORKER`: one worker finishes what it has and ends; others take over."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
from cyclopts import Parameter

from cli.service import URL, ApiKey, CommandError, Service, Url
from cli.status import read_status
from protos import worker_pb2, worker_pb2_grpc
from runtime.addresses import is_loopback
from runtime.config_parts import ProcessConfig
from runtime.malformed import ask_twice
from runtime.trust import load_trust

TIMEOUT_S = 15.0  # for one answer
MARGIN_S = 30.0  # for the process to end after its drain
POLL_S = 0.5


def drain(
    worker: str,
    /,
    *,
    wait: bool = True,
    force: Annotated[bool, Parameter(negative="")] = False,
    tls_dir: Annotated[str, Parameter(env_var="BATON_TLS_DIR")] = "",
    fleet_secret: Annotated[str, Parameter(env_var="BATON_FLEET_SECRET", show=False)] = "",
    url: Url = URL,
    api_key: ApiKey = "",
) -> int:
    """Let one worker finish the requests it has, and end. New ones go to other workers.

    Args:
        worker: host:port of a prefill or decode worker, as `baton status` shows it.
        wait: Wait until the worker has ended.
        force: Drain it even if no other decode worker is left.
        tls_dir: Folder with ca.pem, cert.pem and key.pem, where the fleet uses TLS.
        fleet_secret: Secret of the fleet; pass it by BATON_FLEET_SECRET, never by flag. One that this user's `baton
            serve` drew is found without.
    """
    peers = Peers.read(worker, url, api_key)
    if peers.is_only("decode") and not force:
        raise CommandError(
            f"{worker} is the only decode worker of {peers.model or url}: without it every request gets a 503. Start "
            "another one first, or add --force"
        )
    return asyncio.run(_drain(worker, peers.find_trust(tls_dir, fleet_secret), wait))


@dataclass(frozen=True, slots=True)
class Peers:
    """A worker among those of its service, as GET /status describes them: one line for each role of each."""

    address: str
    lines: Sequence[Mapping[str, Any]]  # empty: the service does not answer

    @classmethod
    def read(cls, address: str, url: str, api_key: str) -> "Peers":
        """Says so where the service does not answer."""
        try:
            with closing(Service(url, api_key)) as service:
                return cls(address, read_status(service)[0])
        except CommandError as error:
            print(f"it is not known whether other workers are left: {error}")
            return cls(address, ())

    def _find(self, name: str) -> Any:
        return next((one.get(name) for one in self.lines if one["address"] == self.address), None)

    @property
    def model(self) -> str | None:
        """The worker's, where the service has several."""
        found: str | None = self._find("model")
        return found

    def is_only(self, role: str) -> bool:
        """Whether the worker alone takes requests in this role, of those of its model."""
        same = [one for one in self.lines if one["role"] == role and one.get("model") == self.model]
        return [one["address"] for one in same if one["alive"]] == [self.address]

    def find_trust(self, tls_dir: str, fleet_secret: str) -> ProcessConfig:
        """Settings to call the worker with."""
        if not fleet_secret and not tls_dir and (pid := self._find("pid")) is not None:
            fleet_secret = read_secret(self.address, pid)
        return ProcessConfig(tls_dir=tls_dir, fleet_secret=fleet_secret)


def read_secret(address: str, pid: int) -> str:
    """The secret that `baton serve` of this user gave a worker on this machine; empty for any other process."""
    name = b"BATON_FLEET_SECRET="
    if is_loopback(address.rpartition(":")[0]):
        with suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(name):
                    return variable.removeprefix(name).decode()
    return ""


async def _drain(address: str, config: ProcessConfig, is_waiting: bool) -> int:
    async with load_trust(config).open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            answer = await ask_twice(lambda: stub.Drain(worker_pb2.DrainRequest(), timeout=TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise explain(address, error, "; or send SIGTERM to the process whose pid `baton status` shows") from error
        print(f"{address} drains: {answer.num_left} requests left, for at most {answer.drain_s:g} s")
        if is_waiting:
            await _watch(address, stub, answer.drain_s)
    return 0


def explain(address: str, error: grpc.aio.AioRpcError, or_else: str = "") -> CommandError:
    """Why a worker did not take a call, and what to do. `or_else`: without the fleet's secret."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return CommandError(f"{address} is no Baton worker: `baton status` lists the workers' addresses")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return CommandError(
            f"{address} refuses us ({error.details()}): set BATON_FLEET_SECRET as its fleet has it{or_else}"
        )
    return CommandError(
        f"{address} does not answer ({error.code().name}: {error.details()}): give host:port of a worker, as "
        "`baton status` lists them; a gateway is drained by SIGTERM"
    )


async def _watch(address: str, stub: worker_pb2_grpc.WorkerStub, drain_s: float) -> None:
    """Print what is left until the worker has ended."""
    deadline = time.monotonic() + drain_s + MARGIN_S
    num_left = -1
    while time.monotonic() < deadline:
        try:
            status = await ask_twice(lambda: stub.Status(worker_pb2.StatusRequest(), timeout=TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                print(f"{address} has ended")
                return
            if error.code() is not grpc.StatusCode.CANCELLED:  # a server answers so just before it ends
                raise CommandError(
                    f"{address} drains, but does not say how far it is ({error.code().name}: {error.details()})"
                ) from error
        else:
            if not status.draining:  # a supervisor may have started a new one there
                print(f"{address} has ended; another process serves there now")
                return
            if status.num_running != num_left:
                num_left = status.num_running
                print(f"{address}: {num_left} requests left")
        await asyncio.sleep(POLL_S)
    raise CommandError(f"{address} still has {num_left} requests after {drain_s + MARGIN_S:g} s: kill its process")
