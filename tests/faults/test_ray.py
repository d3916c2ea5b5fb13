"""`baton serve --ray` on a real Ray cluster: nodes and single processes are killed under load."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.cluster_utils import Cluster

from demo.paths import TARGET_DIR
from tests.support.asking import Asking, draw_salt
from tests.support.fault_answers import Truth
from tests.support.oracle import Oracle

START_S, BACK_S, STOP_S = 300.0, 180.0, 60.0
NUM_CLIENTS, NUM_TOKENS = 8, 120
pytestmark = [pytest.mark.faults, pytest.mark.timeout(900), pytest.mark.usefixtures("same_niceness")]
MEMORY = 80 << 20  # of each node's store of objects, which Baton does not use


@pytest.fixture
def same_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes have that of the tests."""
    monkeypatch.setenv("RAY_worker_niceness", "0")


@contextmanager
def cluster(*cores: int) -> Iterator[Any]:
    """A head without cores for workers, and a node for each of these numbers of cores."""
    opened = Cluster()
    try:
        for num_cpus in (0, *cores):
            opened.add_node(num_cpus=num_cpus, object_store_memory=MEMORY, include_dashboard=False)
        yield opened
    finally:
        opened.shutdown()  # type: ignore[no-untyped-call]


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in listeners]


class Service:
    """A running `baton serve --ray`, with as many prefill as decode workers."""

    def __init__(self, address: str, folder: Path, num_each: int, *more: str) -> None:
        self.port, self.grpc_port = free_ports(2)
        self._roles = ["decode"] * num_each + ["prefill"] * num_each
        self._log = (folder / "log").open("wb")
        flags = [f"--prefill-workers={num_each}", f"--decode-workers={num_each}", "--local-prefill-max-tokens=0", *more]
        flags += [f"--port={self.port}", f"--grpc-port={self.grpc_port}", "--model=demo", "--device=cpu"]
        command = [sys.executable, "-m", "baton", "serve", f"--ray={address}", "--lease-s=10", *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def read_workers(self) -> list[dict[str, Any]]:
        """The workers that are alive; none while there is no gateway."""
        try:
            status = httpx.get(f"http://127.0.0.1:{self.port}/status", timeout=5.0)
        except httpx.HTTPError:
            return []
        return [one for one in status.json()["workers"] if one["alive"]]

    def until_whole(self, timeout_s: float, without: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """All workers, none of these incarnations."""
        until = time.monotonic() + timeout_s
        while True:
            alive = self.read_workers()
            found = sorted(one["role"] for one in alive)
            if found == self._roles and without.isdisjoint(one["incarnation"] for one in alive):
                return alive
            assert time.monotonic() < until, f"alive: {found}; the log: {self.read_log()}"
            time.sleep(0.2)

    def read_log(self) -> str:
        return Path(self._log.name).read_text()[-4000:]

    def ask(self, prompt: list[int], salt: str = "") -> Asking:
        return Asking(f"127.0.0.1:{self.grpc_port}", prompt, NUM_TOKENS, BACK_S, cache_salt=salt)


@contextmanager
def serving(address: str, folder: Path, num_each: int, *flags: str) -> Iterator[Service]:
    service = Service(address, folder, num_each, *flags)
    try:
        service.until_whole(START_S)
        yield service
    finally:
        service.process.send_signal(signal.SIGINT)
        try:
            assert service.process.wait(STOP_S) == 0, service.read_log()
        finally:
            service.process.kill()


def find_baton(parents: set[int]) -> set[int]:
    """Processes of `python -m baton` below these."""
    found, todo = set[int](), list(parents)
    while todo:
        listed = subprocess.run(["pgrep", "-P", str(todo.pop())], capture_output=True, text=True, check=False).stdout
        todo += map(int, listed.split())
        found |= {pid for pid in map(int, listed.split()) if "baton" in Path(f"/proc/{pid}/cmdline").read_text()}
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_node_and_workers_are_killed_under_load_and_all_answers_are_right(tmp_path: Path) -> None:
    dice, wrong, is_over, num_right = random.Random(1), list[str](), threading.Event(), list[int]()
    with cluster(4, 4) as nodes, serving(nodes.address, tmp_path, 2) as service:
        prompts = [[dice.randrange(6, 300) for _ in range(dice.choice((20, 200, 900)))] for _ in range(NUM_CLIENTS)]
        right = [tuple(service.ask(prompt).finish().tokens) for prompt in prompts]
        assert {len(tokens) for tokens in right} == {NUM_TOKENS}

        def keep_asking(number: int) -> None:
            own = random.Random(number)
            while not is_over.is_set():
                asking = service.ask(prompts[number], draw_salt(own)).finish()
                if asking.code is not None or tuple(asking.tokens) != right[number]:
                    wrong.append(f"{asking.code} {asking.detail} {asking.tokens}")
                num_right.append(1)

        clients = [threading.Thread(target=keep_asking, args=(number,), daemon=True) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        before = {one["incarnation"] for one in service.until_whole(BACK_S)}
        nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)  # kill -9 of its raylet
        while not (alive := {one["incarnation"] for one in service.read_workers()}) or len(before & alive) > 2:
            time.sleep(0.1)
        service.until_whole(BACK_S, frozenset(before - alive))  # on the node that is left: the head has no cores
        for _ in range(2):
            whole = service.until_whole(BACK_S)
            victim = dice.choice([one for one in whole if one["role"] == "decode"])
            os.kill(find_pid(victim["address"]), signal.SIGKILL)
            service.until_whole(BACK_S, frozenset({victim["incarnation"]}))
        is_over.set()
        for client in clients:
            client.join(BACK_S)
            assert not client.is_alive()
        assert not wrong and len(num_right) >= NUM_CLIENTS, wrong[:3]
        ours = find_ours()
        assert len(ours) >= 5
    until_ended(ours)


def test_a_worker_over_two_nodes_is_placed_again_and_all_answers_are_right(tmp_path: Path) -> None:
    dice, truth = random.Random(2), Truth(Oracle(TARGET_DIR))
    flags = ("--decode-tp=2", "--decode-hosts=2", "--dtype=float32", "--patience-s=180")
    with cluster(2, 2, 2) as nodes, serving(nodes.address, tmp_path, 1, *flags) as service:
        for is_node in (False, True):
            before = {one["incarnation"] for one in service.read_workers() if one["role"] == "decode"}
            streams = [service.ask([dice.randrange(6, 300) for _ in range(200)]) for _ in range(NUM_CLIENTS)]
            for stream in streams:
                stream.wait_for_tokens(5)
            if is_node:  # not the gateway's, which is the command's own, too
                gateway, hosts = find_pid(f":{service.port}"), find_hosts(0) | find_hosts(1)
                below = [(node, find_baton(set(find_pids_of(node)))) for node in nodes.list_all_nodes()]
                node = next(one for one, pids in below if gateway not in pids and hosts & pids)
                nodes.remove_node(node, allow_graceful=False)
            else:
                (guest,) = find_hosts(1)
                os.kill(guest, signal.SIGKILL)
            for stream in streams:
                truth.check(stream)
            service.until_whole(BACK_S, frozenset(before))
        ours = find_ours()
    until_ended(ours)


def find_pids_of(node: Any) -> list[int]:
    """PIDs of a node's own processes."""
    return [one.process.pid for group in node.all_processes.values() for one in group]


def find_hosts(number: int) -> set[int]:
    """Processes of workers over several hosts, of the host of this number."""
    own = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in find_ours()}
    return {pid for pid, variables in own.items() if b"BATON_HOST_RANK=%d" % number in variables}


def find_ours() -> set[int]:
    """Processes that actors have started."""
    return find_baton({int(pid) for pid in subprocess.check_output(["pgrep", "-f", "ray::Holder"]).split()})


def until_ended(pids: set[int]) -> None:
    until = time.monotonic() + STOP_S
    while left := {pid for pid in pids if is_alive(pid)}:
        assert time.monotonic() < until, f"left: {left}"
        time.sleep(0.1)


def find_pid(address: str) -> int:
    """PID of the process that listens at the address."""
    port = int(address.rpartition(":")[2])
    listening = subprocess.check_output(["ss", "-Hltnp", f"sport = :{port}"], text=True)
    return int(listening.partition("pid=")[2].partition(",")[0])
