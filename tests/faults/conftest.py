"""The fleets that fault tests share; before and after each test all processes run and no page is used."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.paths import TARGET_DIR
from tests.faults.proxy import FaultProxy
from tests.support.fault_answers import Truth
from tests.support.fleet import HOST, Process, ProcessFleet, free_ports, run_fleet
from tests.support.oracle import Oracle
from tests.support.traces import Collector, run_collector

HERE = Path(__file__).parent
GATEWAY_SIDE, WORKER_SIDE = "127.0.0.2", "127.0.0.3"  # 127/8 is all loopback; the ports stay the workers' own
STALL_S = 5.0  # of the holdable workers: longer than a step takes on a loaded machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the hook receives the whole session's."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.faults)


@dataclass(frozen=True)
class Linked:
    """One prefill and one decode worker; each of the four connections between processes has a proxy."""

    fleet: ProcessFleet
    links: dict[str, FaultProxy]


@dataclass(frozen=True)
class Held:
    """One prefill and two decode workers, whose engines can be held in mid-step; see held_worker.py."""

    fleet: ProcessFleet
    folder: Path

    def hold(self, *workers: Process) -> None:
        """From now on none of their steps ends; the processes answer as usual."""
        for worker in workers:
            (self.folder / worker.name).write_text("")

    def slow_down(self, token_s: float, *workers: Process) -> None:
        """From now on each of their forwards takes that much longer for each of its tokens."""
        for worker in workers:
            file = self.folder / worker.name
            file.with_suffix(".new").write_text(str(token_s))
            file.with_suffix(".new").replace(file)

    def release(self, *workers: Process) -> None:
        """They run as usual again. Idempotent."""
        for worker in workers:
            (self.folder / worker.name).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def truth() -> Truth:
    return Truth(Oracle(TARGET_DIR))


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the traces of `quad`."""
    with run_collector() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
        yield running


@pytest.fixture(scope="session")
def running_quad(collector: Collector) -> Iterator[ProcessFleet]:
    drain = ["--drain-s=120"]  # for a loaded machine
    traced = [*drain, f"--otlp-endpoint={collector.url}"]
    with run_fleet(2, 2, {"gateway": traced, "prefill": drain, "decode": drain}) as fleet:
        yield fleet


@pytest.fixture
def quad(running_quad: ProcessFleet) -> Iterator[ProcessFleet]:
    """Two prefill and two decode workers."""
    _check_calm(running_quad)
    yield running_quad
    _mend(running_quad)
    _check_calm(running_quad)


@pytest.fixture(scope="session")
def running_held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("held")
    names = ("prefill-0", "decode-0", "decode-1")
    programs = {name: ("tests.faults.held_worker", str(folder / name)) for name in names}
    stalls = [f"--stall-s={STALL_S:g}"]
    # patience: no request is refused while all engines are held or the gateway is stopped for a minute
    with run_fleet(1, 2, {"gateway": stalls, "prefill": stalls}, patience_s=120.0, programs=programs) as fleet:
        yield Held(fleet, folder)


@pytest.fixture
def held(running_held: Held) -> Iterator[Held]:
    _check_calm(running_held.fleet)
    yield running_held
    running_held.release(*running_held.fleet.workers())
    _mend(running_held.fleet)
    _check_calm(running_held.fleet)


@contextmanager
def run_linked(**options: Any) -> Iterator[Linked]:
    """`options`: of run_fleet."""
    ports = free_ports(7)
    prefill, decode = ports[2], ports[4]
    with ExitStack() as stack:
        links = {
            name: stack.enter_context(FaultProxy(side, port, HOST, port, seed))
            for seed, (name, side, port) in enumerate(
                [
                    ("gateway-prefill", GATEWAY_SIDE, prefill),
                    ("gateway-decode", GATEWAY_SIDE, decode),
                    ("prefill-decode", WORKER_SIDE, decode),
                    ("decode-prefill", WORKER_SIDE, prefill),
                ]
            )
        }
        advertised = f"--advertise-host={WORKER_SIDE}"
        fleet = stack.enter_context(
            run_fleet(
                flags={"prefill": [advertised], "decode": [advertised, "--transport=grpc"]},
                links={"prefill-0": f"{GATEWAY_SIDE}:{prefill}", "decode-0": f"{GATEWAY_SIDE}:{decode}"},
                ports=ports,
                **options,
            )
        )
        yield Linked(fleet, links)


@pytest.fixture(scope="session")
def running_linked() -> Iterator[Linked]:
    with run_linked() as linked:
        yield linked


@pytest.fixture
def linked(running_linked: Linked) -> Iterator[Linked]:
    _check_calm(running_linked.fleet)
    yield running_linked
    for proxy in running_linked.links.values():
        proxy.heal()
    _mend(running_linked.fleet)
    _check_calm(running_linked.fleet)


def _mend(fleet: ProcessFleet) -> None:
    for process in fleet.processes.values():
        if process.is_running:
            process.resume()
        else:
            process.restart()


def _check_calm(fleet: ProcessFleet) -> None:
    fleet.wait_until_whole()
    fleet.wait_until_unused()
