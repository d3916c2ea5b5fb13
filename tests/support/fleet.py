"""A fleet of single processes on fixed ports, for tests and benchmarks that kill, stop and restart them.

For a service as users start it see live.py.
"""

import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime.events import Ready, parse_event
from tests.support.forks import ForkedPopen
from tests.support.live import CHECKOUT, HAND_OFF_FLAGS, START_S, Service, build_environment, read_metric

PORT_BLOCK = 500
HOST = "127.0.0.1"
PROGRAM = ("cli.main",)  # Python's arguments for each process, before the role: a module and its arguments


@dataclass
class Process:
    """One process of the fleet; after a kill it can be started again on the same ports."""

    name: str
    role: str  # "prefill", "decode" or "gateway"
    port: int
    ops_port: int
    flags: tuple[str, ...]
    log: Path
    program: tuple[str, ...] = PROGRAM
    checkout: Path = CHECKOUT  # whose code it runs
    env: Mapping[str, str] = field(default_factory=dict)  # beside ours
    forks: bool = False  # from a process that has imported everything
    python: str | Path = sys.executable
    popen: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    _events: int = -1  # reading end of its event pipe

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        """Start it; `wait_ready` waits until it serves. Call on the main thread: the process dies with its starter."""
        assert not self.is_running
        self._events, reported = os.pipe()
        with self.log.open("ab") as out:
            self.popen = (ForkedPopen if self.forks else subprocess.Popen)(
                [self.python, "-m", *self.program, self.role, *self.flags, f"--ready-fd={reported}"],
                stdout=out, stderr=out, pass_fds=(reported,), cwd=self.checkout,
                env=build_environment(self.env, self.checkout),
            )  # fmt: skip
        os.close(reported)
        self.num_starts += 1

    def wait_ready(self) -> Ready:
        deadline = time.monotonic() + START_S
        text = b""
        while time.monotonic() < deadline:
            if not select.select([self._events], [], [], 1.0)[0]:
                continue
            data = os.read(self._events, 1 << 16)
            assert data, f"{self.name} ended at its start:\n{self.read_log()[-3000:]}"
            *lines, text = (text + data).split(b"\n")
            for event in (parse_event(line.decode()) for line in lines):
                if isinstance(event, Ready):
                    return event
        raise AssertionError(f"{self.name} did not start:\n{self.read_log()[-3000:]}")

    def signal(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP: it exists, but does not run."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: it finishes its requests and exits."""
        self.signal(signal.SIGTERM)

    def wait_exited(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal; AssertionError if it still runs after `timeout_s`."""
        assert self.popen is not None
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs:\n{self.read_log()[-3000:]}") from None

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(timeout=30)
        if self._events >= 0:
            os.close(self._events)
            self._events = -1

    def find_ranks(self) -> list[int]:
        """Process ids of its ranks except the first, which is the process itself."""
        return find_ranks_of(self.pid)

    def restart(self) -> None:
        """Kill it if needed, start it again and wait until it serves."""
        self.kill()
        self.start()
        self.wait_ready()

    def metric(self, sample: str, labels: Mapping[str, str] | None = None) -> float:
        """The sum of all samples named `baton:SAMPLE` that carry `labels`."""
        return read_metric(f"http://{HOST}:{self.ops_port}/metrics", sample, labels)

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def find_ranks_of(worker: int) -> list[int]:
    """Process ids of a worker's ranks except the first, which is the process `worker` itself."""
    try:
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()  # of its main thread
    except OSError:  # it has ended
        return []
    return [int(pid) for pid in children if "worker.ranks.main" in _read_command(pid)]


def _read_command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


@dataclass
class ProcessFleet(Service):
    """A gateway and its workers, by name: "gateway", "prefill-0", "decode-0" and so on."""

    grpc_address: str
    processes: dict[str, Process] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    @property
    def gateway(self) -> Process:
        return self.processes["gateway"]

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    def add_gateway(self, name: str) -> Process:
        """One more, with the flags of the first; not started yet."""
        first = self.gateway
        port, ops_port, grpc_port = free_ports(3)
        own = [flag for flag in first.flags if not flag.startswith(("--port=", "--ops-port=", "--grpc-port="))]
        own += [f"--port={port}", f"--ops-port={ops_port}", f"--grpc-port={grpc_port}"]
        log = first.log.with_name(f"{name}.log")
        added = Process(name, "gateway", port, ops_port, tuple(own), log, forks=first.forks)
        self.processes[name] = added
        return added

    def start(self) -> None:
        """Start all at once; returns when the gateway considers every worker alive."""
        for process in self.processes.values():
            process.start()
        for process in self.processes.values():
            process.wait_ready()
        self.wait_until_whole()

    def workers(self) -> list[Process]:
        return [process for process in self.processes.values() if process.role != "gateway"]

    def used_pages(self) -> dict[str, float]:
        return {worker.name: worker.metric("kv_cache_used_pages") for worker in self.workers() if worker.is_running}

    def count(self, role: str, sample: str, labels: Mapping[str, str] | None = None) -> float:
        """The sum of a metric over the living workers of a role."""
        workers = [worker for worker in self.workers() if worker.role == role and worker.is_running]
        return sum(worker.metric(sample, labels) for worker in workers)


def _own_ports() -> Iterator[int]:
    """Ports of a block that belongs to this process, in turn; RuntimeError if every block is taken.

    Below the ports of outgoing connections. A listener on the first port marks a block as taken while this lives, so
    that fleets of different processes do not collide, even while a worker is down.
    """
    blocks = range(15000, 32000, PORT_BLOCK)
    for first in random.sample(blocks, len(blocks)):
        with suppress(OSError), socket.create_server((HOST, first)):
            while True:
                yield from range(first + 1, first + PORT_BLOCK)
    raise RuntimeError(f"a listener stands on every {PORT_BLOCK}th port from {blocks[0]} to {blocks[-1]}: end some")


_PORTS = _own_ports()


def free_ports(count: int) -> list[int]:
    """Unused ports that no other process gives to its fleets; each is returned once."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_PORTS)
        with suppress(OSError), socket.create_server((HOST, port)):
            ports.append(port)
    return ports


@contextmanager
def run_fleet(
    num_prefill: int = 1,
    num_decode: int = 1,
    flags: Mapping[str, Sequence[str]] | None = None,
    links: Mapping[str, str] | None = None,
    ports: Sequence[int] | None = None,
    lease_s: float = 4.0,
    heartbeat_s: float = 2.0,  # a loaded machine can silence workers for longer than a second,
    patience_s: float = 20.0,  # and perhaps longer than that
    kv_memory_mib: Mapping[str, int] | None = None,
    programs: Mapping[str, Sequence[str]] | None = None,
    starts: bool = True,
    forks: bool = False,
    python: str | Path = sys.executable,
    num_both: int = 0,
) -> Iterator[ProcessFleet]:
    """Processes that serve the demo model in float32; all are killed at the end. `num_both`: workers of both roles.

    `flags`: additional ones by role or name. `links`: worker name |-> the address at which the gateway reaches it.
    `ports`: two per process, in the order gateway, prefill, decode, and the gateway's for gRPC. `kv_memory_mib`: by
    role, default 64. `programs`: worker name |-> what to run instead of PROGRAM. `starts`: False leaves that to
    the caller. `forks`, `python`: see Process. The environment variable DECODE_TP sets the ranks of decode workers, so
    that a whole suite can run with several.
    """
    flags, links, programs = flags or {}, links or {}, programs or {}
    decode_tp = os.environ.get("DECODE_TP", "1")
    counts = {"prefill": num_prefill, "decode": num_decode, "worker": num_both}
    names = ["gateway", *(f"{role}-{i}" for role, count in counts.items() for i in range(count))]
    ports = ports or free_ports(2 * len(names) + 1)
    fleet = ProcessFleet(f"{HOST}:{ports[-1]}")
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(names):
            role = name.partition("-")[0]
            port, ops_port = ports[2 * index : 2 * index + 2]
            own = [f"--port={port}", f"--ops-port={ops_port}", f"--lease-s={lease_s:g}"]
            if role != "decode":
                own.append(f"--heartbeat-s={heartbeat_s:g}")
            if role != "gateway":
                own += ["--dtype=float32", f"--kv-memory-mib={(kv_memory_mib or {}).get(role, 64)}"]
            extra = (*flags.get(role, ()), *(flags.get(name, ()) if name != role else ()))
            if role == "decode" and decode_tp != "1" and not any(flag.startswith("--tp=") for flag in extra):
                own.append(f"--tp={decode_tp}")
            log, program = Path(folder) / f"{name}.log", tuple(programs.get(name, PROGRAM))
            fleet.processes[name] = Process(
                name, role, port, ops_port, (*own, *extra), log, program, forks=forks, python=python
            )
        peers = [
            f"--{role}={links.get(worker.name, worker.address)}"
            for worker in fleet.workers()
            for role in (("prefill", "decode") if worker.role == "worker" else (worker.role,))
        ]
        gateway = fleet.gateway
        waits = (f"--patience-s={patience_s:g}", f"--grpc-port={ports[-1]}", *HAND_OFF_FLAGS)
        gateway.flags = (*gateway.flags, *waits, *peers)
        try:
            if starts:
                fleet.start()
            yield fleet
        finally:
            for process in fleet.processes.values():
                process.kill()
