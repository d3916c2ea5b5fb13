"""Three gateways find their workers by DNS, which adds, removes and moves some under load, and is silent. Row 27."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import pytest

from tests.faults.chaos import Case, Tally, build_cases
from tests.support.asking import Asking
from tests.support.dns_server import DnsServer, dns_server
from tests.support.fleet import Process, ProcessFleet, free_ports, run_fleet
from tests.support.live import read_workers, wait_until

NAMES = {role: f"_grpc._tcp.{role}.test" for role in ("prefill", "decode")}
NUM_GATEWAYS = 3
SILENT_S = 30.0


@dataclass
class Named:
    """Two prefill and two decode workers behind names, and gateways that share them."""

    fleet: ProcessFleet
    dns: DnsServer
    gateways: dict[str, Process]  # gRPC address |-> process

    def publish(self, role: str, *workers: Process) -> None:
        """DNS names these workers of a role, and no others."""
        self.dns.name_services(NAMES[role], *(worker.port for worker in workers))

    def wait_for(self, is_true: Callable[[dict[str, dict[str, object]]], bool]) -> None:
        """Until it is true of every gateway's view: address |-> worker."""

        def views() -> list[dict[str, dict[str, object]]]:
            return [
                {worker["address"]: worker for worker in read_workers(f"http://{gateway.address}")}
                for gateway in self.gateways.values()
            ]

        wait_until(lambda: all(map(is_true, views())), explain=views)

    def wait_until_used(self, *workers: Process) -> None:
        """Until all gateways use exactly these workers of one role."""
        wanted, role = {f"worker.test:{worker.port}" for worker in workers}, workers[0].role
        self.wait_for(
            lambda view: {name for name, one in view.items() if one["role"] == role and one["alive"]} == wanted
        )


@pytest.fixture(scope="module")
def named() -> Iterator[Named]:
    with dns_server() as dns, ExitStack() as stack:
        ports = free_ports(9)
        roles = ("prefill", "prefill", "decode", "decode")
        for role in NAMES:
            own = [port for port, one in zip(ports[2:10:2], roles, strict=True) if one == role]
            dns.name_services(NAMES[role], *own)
        flags = {"gateway": [f"--dns-server={dns.address}"]}
        links = {f"{role}-{number}": f"dns:{name}" for role, name in NAMES.items() for number in range(2)}
        fleet = stack.enter_context(run_fleet(2, 2, flags, links, [*ports, *free_ports(2)], lease_s=10.0))
        gateways = {fleet.grpc_address: fleet.gateway}
        for number in range(1, NUM_GATEWAYS):
            port, ops_port, grpc_port = free_ports(3)
            own_ports = (f"--port={port}", f"--ops-port={ops_port}", f"--grpc-port={grpc_port}")
            name = f"gateway-{number}"
            kept = (flag for flag in fleet.gateway.flags if "port=" not in flag)
            log = fleet.gateway.log.with_name(f"{name}.log")
            process = Process(name, "gateway", port, ops_port, (*kept, *own_ports), log)
            stack.callback(process.kill)
            process.start()
            process.wait_ready()
            gateways[f"127.0.0.1:{grpc_port}"] = process
        yield Named(fleet, dns, gateways)


@dataclass
class Load:
    """Clients with a gateway each, and what became of their requests."""

    cases: Iterator[Case]
    tally: Tally = field(default_factory=Tally)
    is_over: threading.Event = field(default_factory=threading.Event)

    def keep_asking(self, gateway: str) -> None:
        dice = random.Random(gateway)
        while not self.is_over.is_set():
            with self.tally.lock:
                case = next(self.cases)
            asking = Asking(gateway, case.prompt, len(case.answer), cache_salt=f"{dice.getrandbits(64):x}").finish()
            self.tally.add(case, asking)

    def wait_for(self, count: int) -> None:
        """Until this many more requests are over."""
        before = self.tally.outcomes.total()
        wait_until(lambda: self.tally.outcomes.total() >= before + count)


@contextmanager
def load(named: Named, num_clients: int) -> Iterator[Load]:
    """All answers are right in the end, and no attempt failed on the way: no stream was cut."""
    asking = Load(cycle(build_cases(named.fleet, 8, seed=27)))
    failed = {gateway.name: gateway.metric("attempts_failed_total") for gateway in named.gateways.values()}
    gateways = islice(cycle(named.gateways), num_clients)
    clients = [threading.Thread(target=asking.keep_asking, args=(gateway,), daemon=True) for gateway in gateways]
    for client in clients:
        client.start()
    yield asking
    asking.is_over.set()
    for client in clients:
        client.join(120.0)
        assert not client.is_alive(), "a request hangs"
    assert set(asking.tally.outcomes) == {"right"}, (asking.tally.outcomes, asking.tally.complaints)
    assert {gateway.name: gateway.metric("attempts_failed_total") for gateway in named.gateways.values()} == failed


@pytest.mark.timeout(600)
def test_row_27_workers_come_go_and_move_by_name_while_no_request_fails(named: Named) -> None:
    fleet = named.fleet
    stays, goes = fleet["decode-0"], fleet["decode-1"]
    (port,) = free_ports(1)
    moved = replace(goes, port=port, flags=(f"--port={port}", *goes.flags[1:]), popen=None, _events=-1)
    prefills = (fleet["prefill-0"], fleet["prefill-1"])
    with load(named, 6) as asking:
        asking.wait_for(6)
        named.publish("decode", stays)
        named.wait_until_used(stays)
        wait_until(lambda: not goes.metric("kv_cache_used_pages"))  # what ran there has run to its end
        named.wait_for(lambda view: f"worker.test:{goes.port}" not in view)
        goes.kill()
        fleet.processes["decode-1"] = moved
        moved.start()
        moved.wait_ready()
        named.publish("decode", stays, moved)
        named.wait_until_used(stays, moved)
        asking.wait_for(6)
        named.publish("prefill", prefills[0])
        named.wait_until_used(prefills[0])
        asking.wait_for(6)

        named.dns.is_silent = True
        asked = named.dns.num_asked
        time.sleep(SILENT_S)
        assert named.dns.num_asked > asked
        named.wait_until_used(stays, moved)
        asking.wait_for(6)
        named.dns.is_silent = False
        named.publish("prefill", *prefills)
        named.wait_until_used(*prefills)
        served = moved.metric("generation_tokens_total")
        wait_until(lambda: moved.metric("generation_tokens_total") > served)
    for gateway in named.gateways.values():
        assert gateway.metric("dns_lookups_failed_total") > 0
