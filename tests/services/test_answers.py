"""Stored answers in real processes: gateways, workers and the database are killed while answers are written."""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest

from tests.support.fleet import HOST, Process, ProcessFleet, free_ports, run_fleet
from tests.support.live import WAIT_S, wait_until
from tests.support.postgres import Postgres, run_postgres
from tests.support.surface import MODEL

NUM_STREAMS = 8
NUM_BEFORE = 8  # events of the first stream that has so many, when its gateway is killed
LEASE_S = 2.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with run_postgres(Path(folder) / "cluster") as server:
            yield server


@pytest.fixture(scope="module")
def fleet(postgres: Postgres) -> Iterator[ProcessFleet]:
    """With two gateways."""
    flags = [f"--state-url={postgres.url}", f"--state-lease-s={LEASE_S:g}"]
    with run_fleet(1, 2, {"gateway": flags}, lease_s=60, forks=True, starts=False) as running:
        first = running.gateway
        port, ops_port, grpc_port = free_ports(3)
        own = [flag for flag in first.flags if not flag.startswith(("--port=", "--ops-port=", "--grpc-port="))]
        own += [f"--port={port}", f"--ops-port={ops_port}", f"--grpc-port={grpc_port}"]
        log = first.log.with_name("gateway-b.log")
        running.processes["gateway-b"] = Process("gateway-b", "gateway", port, ops_port, tuple(own), log, forks=True)
        running.start()
        yield running


def client_of(gateway: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{HOST}:{gateway.port}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def asked(number: int) -> Any:
    return {
        "model": MODEL,
        "input": f"Tell me story {number}",
        "max_output_tokens": 160,
        "extra_body": {"seed": number},
    }


def shape(events: Sequence[Any]) -> list[Any]:
    """What does not differ between two answers to one request."""
    return [(event.type, event.sequence_number, getattr(event, "delta", "")) for event in events]


@contextmanager
def stopped(processes: Sequence[Process]) -> Iterator[None]:
    for process in processes:
        process.stop()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def read_on(gateways: Sequence[Process], answer_id: str, events: list[Any]) -> None:
    """Reads the rest of a stream from whichever gateway answers."""

    def is_read() -> bool:
        for gateway in gateways:
            try:
                after = events[-1].sequence_number
                stream = client_of(gateway).responses.retrieve(answer_id, stream=True, starting_after=after)
                events.extend(stream)
            except (openai.APIConnectionError, openai.APIStatusError, openai.APIError):
                continue
            if events[-1].type in ("response.completed", "response.incomplete"):
                return True
        return False

    wait_until(is_read)


def test_killed_gateway(fleet: ProcessFleet) -> None:
    """Each client gets each event once, and the text of an undisturbed answer."""
    first, second = fleet.gateway, fleet["gateway-b"]
    begun = Event()

    def follow(number: int) -> list[Any]:
        events: list[Any] = []
        try:
            for event in client_of(first).responses.create(**asked(number), stream=True):
                events.append(event)
                if len(events) == NUM_BEFORE:
                    begun.set()
        except openai.APIError:  # the connection broke
            pass
        except Exception as error:  # of httpx, in the middle of a body
            assert "peer closed" in str(error) or "closed" in str(error).lower(), repr(error)
        read_on([second, first], events[0].response.id, events)
        return events

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        following = [threads.submit(follow, number) for number in range(NUM_STREAMS)]
        assert begun.wait(WAIT_S)
        with stopped([worker for worker in fleet.workers() if worker.role == "decode"]):  # so that some are not over
            first.kill()
        got = [one.result(WAIT_S) for one in following]
    first.start()
    first.wait_ready()
    for number, events in enumerate(got):
        whole = list(client_of(second).responses.create(**asked(number), stream=True))
        assert shape(events) == shape(whole)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        stored = client_of(first).responses.retrieve(events[0].response.id)
        assert stored.output_text == events[-1].response.output_text == whole[-1].response.output_text
    assert "an answer goes on here" in second.read_log()
