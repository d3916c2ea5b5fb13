"""Three gateways find their workers by DNS, which adds, removes and moves some under load, and is silent. Row 27."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from tests.faults.load import Load
from tests.support.dns_server import DnsServer, dns_server
from tests.support.fault_answers import Truth
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


@pytest.mark.timeout(600)
def test_row_27_workers_come_go_and_move_by_name_while_no_request_fails(named: Named, truth: Truth) -> None:
    """No attempt fails on the way either: no stream is cut."""
    fleet = named.fleet
    stays, goes = fleet["decode-0"], fleet["decode-1"]
    (port,) = free_ports(1)
    moved = replace(goes, port=port, flags=(f"--port={port}", *goes.flags[1:]), popen=None, _events=-1)
    prefills = (fleet["prefill-0"], fleet["prefill-1"])
    failed = [gateway.metric("attempts_failed_total") for gateway in named.gateways.values()]
    with Load(fleet, 6, addresses=list(named.gateways)) as load:
        load.wait_for(6)
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
        load.wait_for(6)
        named.publish("prefill", prefills[0])
        named.wait_until_used(prefills[0])
        load.wait_for(6)

        named.dns.is_silent = True
        asked = named.dns.num_asked
        time.sleep(SILENT_S)
        assert named.dns.num_asked > asked
        named.wait_until_used(stays, moved)
        load.wait_for(6)
        named.dns.is_silent = False
        named.publish("prefill", *prefills)
        named.wait_until_used(*prefills)
        served = moved.metric("generation_tokens_total")
        wait_until(lambda: moved.metric("generation_tokens_total") > served)
    load.check(truth)
    assert [gateway.metric("attempts_failed_total") for gateway in named.gateways.values()] == failed
    for gateway in named.gateways.values():
        assert gateway.metric("dns_lookups_failed_total") > 0
