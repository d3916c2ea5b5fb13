"""Workers of several ranks on two hosts: network namespaces with a cable between them and nothing else in common.

Row 34 of the fault list.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from demo.paths import TARGET_DIR
from tests.support.fault_answers import Truth, ask, read_events
from tests.support.fleet import find_ranks_of
from tests.support.live import CHECKOUT, HAND_OFF_FLAGS, START_S, WAIT_S, Service, build_environment, wait_until
from tests.support.oracle import Oracle

HERE, THERE = "10.99.0.1", "10.99.0.2"
ALONE = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
OTHER = (
    "unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "sh", "-c",
    "ip link set lo up && mount -t tmpfs tmpfs /dev/shm; while sleep 60; do :; done",
)  # fmt: skip
STALL_S = 12.0
TIMEOUT_S = 1500
SECRET = "a-secret-of-two-hosts"
CASES: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (  # role over both hosts, its ranks, the other worker's
    ("prefill", ("--pp=2", "--tp=2"), ("--pp=3",)),
    ("decode", ("--pp=2",), ("--tp=2",)),
    ("prefill", ("--tp=2",), ()),
    ("decode", ("--tp=2",), ()),
)


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_row_34_a_worker_over_two_hosts_is_right_and_ends_by_name() -> None:
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} (Debian: util-linux, iproute2)")
    command = [*ALONE, sys.executable, "-m", "tests.faults.test_hosts"]
    tried = subprocess.run([*command, "try"], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"this system gives no two network namespaces: {tried.stderr.strip()[-300:]}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@contextmanager
def other_host() -> Iterator[tuple[str, ...]]:
    """What runs a command there. This process's own namespace is the first host."""
    holder = subprocess.Popen(OTHER)
    try:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        wait_until(lambda: bool(children.read_text().split()), 30)
        (pid,) = children.read_text().split()
        enter = ("nsenter", f"--target={pid}", "--net", "--pid", "--mount", "--ipc")
        wait_until(lambda: "tmpfs /dev/shm" in Path(f"/proc/{pid}/mounts").read_text(), 30)
        for words in (
            f"ip link add here type veth peer name there netns {pid}",
            f"ip address add {HERE}/24 dev here",
            "ip link set here up",
            " ".join((*enter, f"ip address add {THERE}/24 dev there")),
            " ".join((*enter, "ip link set there up")),
        ):
            subprocess.run(words.split(), check=True, timeout=30)
        yield enter
    finally:
        holder.kill()
        holder.wait(30)


@dataclass
class Part:
    """A process of one host."""

    name: str
    words: Sequence[str]
    folder: Path
    enter: tuple[str, ...] = ()  # what runs it on the other host
    popen: subprocess.Popen[bytes] | None = None
    num_starts: int = 0

    def start(self) -> None:
        self.num_starts += 1
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                [*self.enter, sys.executable, "-m", "cli.main", *self.words], stdout=out, stderr=out, cwd=CHECKOUT,
                env=build_environment({"BATON_FLEET_SECRET": SECRET}),
            )  # fmt: skip

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of the worker's process, which is a child of what entered the other host."""
        assert self.popen is not None
        if not self.enter:
            return self.popen.pid
        (pid,) = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(pid)

    def read_incarnation(self) -> str:
        """Of a worker that was ready; of its last start."""
        ready = read_events(self.log.read_text(), "ready")
        return str(ready[-1]["incarnation"]) if len(ready) == self.num_starts else ""

    def wait_exited(self) -> int:
        assert self.popen is not None
        try:
            return self.popen.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs: {self.log.read_text()[-3000:]}") from None

    def wait_logged(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text(), explain=lambda: (self.name, self.log.read_text()[-3000:]))


@dataclass
class Fleet(Service):
    """A prefill and a decode worker, one of them over both hosts, and a gateway here."""

    folder: Path
    enter: tuple[str, ...]
    spread: str  # the role of the worker over both hosts
    first_port: int
    shapes: Sequence[Sequence[str]]  # flags of its ranks, and of the other worker's
    parts: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ports = {role: self.first_port + number for number, role in enumerate(("prefill", "decode"))}
        self.grpc_address = f"{HERE}:{self.first_port + 2}"
        self._url = f"http://{HERE}:{self.first_port + 3}"
        both = ["--dtype=float32", "--kv-memory-mib=64", "--lease-s=10", "--threads=1", f"--stall-s={STALL_S:g}"]
        both += ["--draft-model=none"] * any("--pp" in flag for own in self.shapes for flag in own)
        for role, port in ports.items():
            words = [role, f"--host={HERE}", f"--port={port}", *both]
            if role == self.spread:
                meet = [f"--rendezvous={HERE}:{self.first_port + 4}", *self.shapes[0], "--num-hosts=2"]
                words += meet
                away = [role, f"--host={THERE}", *both, *meet, "--host-rank=1"]
                self._add("away", away, self.enter)
            else:
                words += self.shapes[1]
            self._add(role, words)
        peers = [f"--{role}={HERE}:{port}" for role, port in ports.items()]
        gates = [
            f"--port={self.first_port + 3}",
            f"--grpc-port={self.first_port + 2}",
            "--patience-s=120",
            "--no-prefill=wait",
        ]
        self._add(
            "gateway", ["gateway", f"--host={HERE}", *gates, "--lease-s=10", "--heartbeat-s=2", *HAND_OFF_FLAGS, *peers]
        )

    def _add(self, name: str, words: Sequence[str], enter: tuple[str, ...] = ()) -> None:
        self.parts[name] = Part(f"{self.first_port}-{name}", words, self.folder, enter)

    @property
    def url(self) -> str:
        return self._url

    def start(self, *names: str) -> None:
        """Returns when the gateway considers both workers alive."""
        for name in names or self.parts:
            self.parts[name].start()

        def are_alive() -> bool:
            for part in self.parts.values():
                assert part.popen is not None and part.popen.poll() is None, part.log.read_text()[-3000:]
            try:
                known = {str(worker["incarnation"]) for worker in self.status() if worker["alive"]}
            except httpx.TransportError:  # the gateway loads
                return False
            return known == {self.parts[role].read_incarnation() for role in ("prefill", "decode")}

        wait_until(are_alive, START_S, lambda: [part.log.read_text()[-1000:] for part in self.parts.values()])

    @property
    def first(self) -> Part:
        """Of the spread worker, host 0's."""
        return self.parts[self.spread]

    @property
    def away(self) -> Part:
        return self.parts["away"]

    def set_link(self, state: str) -> None:
        """Of the cable's end there: this host keeps its address."""
        subprocess.run([*self.enter, "ip", "link", "set", "there", state], check=True, timeout=30)

    def kill(self) -> None:
        for part in self.parts.values():
            if part.popen is not None and part.popen.poll() is None:
                part.popen.kill()


def check_answers(fleet: Fleet, truth: Truth) -> None:
    for stream in [ask(fleet, num_prompt=40 + 150 * number, num_tokens=40, seed=number) for number in range(4)]:
        truth.check(stream)


def check_cut(fleet: Fleet, truth: Truth) -> None:
    """Under load. Each side names the other, and both come back."""
    stream = ask(fleet, num_prompt=400, num_tokens=400, timeout_s=WAIT_S)
    if fleet.spread == "decode":
        stream.wait_for_tokens(5)
    began = time.monotonic()
    fleet.set_link("down")
    for part in (fleet.first, fleet.away):
        assert part.wait_exited() == 1
        print(f"{part.name} ended {time.monotonic() - began:.1f} s after the cut, --stall-s is {STALL_S:g}")
    fleet.first.wait_logged(f"host 1 at {THERE} does not answer")
    fleet.away.wait_logged("host 0 does not answer")
    fleet.set_link("up")
    fleet.start(fleet.spread, "away")
    truth.check_clean(stream)
    check_answers(fleet, truth)


def check_death(fleet: Fleet, truth: Truth) -> None:
    """Of the other host's process, or of its rank."""
    rank = find_ranks_of(fleet.away.pid)[0]
    is_host = fleet.spread == "prefill"
    os.kill(fleet.away.pid if is_host else rank, signal.SIGKILL)
    assert fleet.first.wait_exited() == 1
    assert fleet.away.wait_exited() == (-signal.SIGKILL if is_host else 1)
    fleet.first.wait_logged(f"host 1 at {THERE} hung up")
    if not is_host:
        fleet.away.wait_logged("ended with signal SIGKILL")
    wait_until(lambda: not Path(f"/proc/{rank}").exists())
    fleet.start(fleet.spread, "away")
    check_answers(fleet, truth)


def check_end(fleet: Fleet, truth: Truth) -> None:
    """As Kubernetes ends a group: all hosts are asked at once, and host 0 drains."""
    stream = ask(fleet, num_prompt=100, num_tokens=200)
    stream.wait_for_tokens(1)
    for part in (fleet.away, fleet.first):
        os.kill(part.pid, signal.SIGTERM)
    truth.check(stream)
    assert (fleet.first.wait_exited(), fleet.away.wait_exited()) == (0, 0)


def main() -> None:
    truth = Truth(Oracle(TARGET_DIR))
    with tempfile.TemporaryDirectory() as folder, other_host() as enter:
        for number, (role, *shapes) in enumerate(CASES):
            fleet = Fleet(Path(folder), enter, role, 20000 + 100 * number, shapes)
            try:
                fleet.start()
                check_answers(fleet, truth)
                assert '"transport": "grpc"' in fleet.parts["decode"].log.read_text()
                check_cut(fleet, truth)
                check_death(fleet, truth)
                check_end(fleet, truth)
                print(f"{role} {shapes} over two hosts: answers right, also after a cut link and a death")
            finally:
                fleet.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["try"]:
        with other_host() as enter_other:
            subprocess.run([*enter_other, "true"], check=True, timeout=30)
    else:
        main()
