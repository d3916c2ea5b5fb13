"""Answers of workers that are no messages, and bugs in what follows a worker: no link ends, no request is lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.adapters.link import LinkedAdapters
from gateway.adapters.loader import AdapterLoader
from gateway.router.admission import Admission
from gateway.router.fleet import Fleet
from gateway.router.placer import Placer
from gateway.router.queue import Queue
from gateway.router.router import Router
from runtime.rpc import bind, build_server
from tests.gateway.router.test_requests import answer
from tests.support.dispatching import Routed, bounded
from tests.support.fake_workers import PATIENCE_S, FakeDecode, FakePrefill, Signal
from tests.support.garbling import Garbler
from tests.support.virtual_fleet import wanted

SOON_S = PATIENCE_S / 2  # leases and heartbeats last as long as that


class Ring(Routed):
    """A prefill and a decode worker with gRPC between them and the router, and what garbles their answers."""

    def __init__(self, fleet: Fleet, router: Router, signal: Signal) -> None:
        super().__init__(fleet, router, signal)
        self.garbler = Garbler()
        self.decode = FakeDecode("D1", signal)
        self.prefill = FakePrefill("P1", signal)

    async def is_ready(self) -> None:
        """Both workers: without prefill's, the first request would be computed by decode."""
        await self.signal.until(
            lambda: self.router.readiness() is None and all(view.is_alive for view in self.fleet.views())
        )

    async def is_answered_soon(self, name: str) -> None:
        began = time.monotonic()
        assert await self.collect(wanted(name)) == (answer(4), "length")
        assert time.monotonic() - began < SOON_S
        await self.is_idle()


@asynccontextmanager
async def ring() -> AsyncIterator[Ring]:
    signal, registry = Signal(), CollectorRegistry()
    garbler, servers, addresses = Garbler(), [], []
    decode, prefill = FakeDecode("D1", signal), FakePrefill("P1", signal)
    for worker in (prefill, decode):
        server = build_server([garbler])
        addresses.append(f"127.0.0.1:{bind(server, '127.0.0.1', 0)}")
        worker.add_to(server)
        await server.start()
        servers.append(server)
    fleet = Fleet(addresses[:1], addresses[1:], PATIENCE_S, PATIENCE_S, 0, adapters=LinkedAdapters())
    router = Router(
        fleet, Admission(8), PATIENCE_S, PATIENCE_S, registry, False,
        Placer(),
    )  # fmt: skip
    built = Ring(fleet, router, signal)
    built.garbler, built.decode, built.prefill = garbler, decode, prefill
    fleet.start()
    try:
        await built.is_ready()
        yield built
    finally:
        await fleet.close()
        for server in servers:
            await server.stop(None)


async def begin_and_leave(opened: Ring) -> None:
    opened.decode.is_manual = True
    client = opened.start(wanted("leaves"))
    await opened.decode.has_sessions(2)
    client.cancel()
    opened.decode.is_manual = False


@pytest.mark.parametrize("method", ["Status", "Steps", "Reserve", "Abort"])
@bounded
async def test_one_broken_answer_of_a_worker_costs_no_request(method: str) -> None:
    async with ring() as opened:
        await opened.is_answered_soon("before")
        opened.garbler.wanted[method] = 1
        if method == "Abort":
            await begin_and_leave(opened)
        if method == "Status":
            await opened.signal.until(lambda: opened.garbler.garbled == ["Status"])
        await asyncio.gather(*(opened.is_answered_soon(f"r{number}") for number in range(3)))
        await opened.signal.until(lambda: opened.garbler.garbled == [method])
        await opened.is_answered_soon("after")
        await opened.is_ready()


@pytest.mark.parametrize("what", ["wanted", "wanted_requests"])
@bounded
async def test_a_broken_run_or_answer_to_it_begins_another_attempt(what: str) -> None:
    async with ring() as opened:
        opened.decode.is_manual = True
        getattr(opened.garbler, what)["Run"] = 1
        asking = opened.start(wanted())
        await opened.decode.has_sessions(2)
        opened.decode.sessions[1].emit(4, "length")
        assert await asking == (answer(4), "length") and opened.garbler.garbled == ["Run"]
        await opened.is_idle()
        opened.decode.is_manual = False
        await opened.is_answered_soon("after")


@pytest.mark.parametrize("method", ["Status", "Steps", "Reserve", "Abort"])
@bounded
async def test_a_request_that_reaches_a_worker_damaged_is_a_lost_call(method: str) -> None:
    async with ring() as opened:
        await opened.is_answered_soon("before")
        opened.garbler.wanted_requests[method] = 1
        if method == "Steps":
            opened.garbler.wanted["Steps"] = 1  # it is called again
        if method == "Abort":
            await begin_and_leave(opened)
        await opened.is_answered_soon("meanwhile")
        await opened.signal.until(lambda: not opened.garbler.wanted_requests.total())
        await opened.is_answered_soon("after")
        await opened.is_ready()


@bounded
async def test_a_first_status_that_is_broken_is_asked_for_again() -> None:
    async with ring() as opened:
        opened.garbler.wanted["Status"] = 4
        with capture_logs() as logs:
            await opened.signal.until(lambda: len(opened.garbler.garbled) == 4)
            await opened.is_ready()
        reasons = [one["reason"] for one in logs if one["event"] == "worker does not answer"]
        assert len(reasons) in (1, 2) and all("is no answer of /baton.v1." in reason for reason in reasons)


@pytest.mark.parametrize("method", ["LoadAdapter", "UnloadAdapter"])
@bounded
async def test_adapters_are_loaded_and_unloaded_though_an_answer_is_broken(method: str) -> None:
    async with ring() as opened:
        for worker in (opened.decode, opened.prefill):
            worker.max_loras, worker.folders = 1, {"/a": "A"}
        await opened.signal.until(lambda: all(one.status.max_loras for one in opened.fleet.workers()))
        loader = AdapterLoader(opened.fleet, CollectorRegistry())
        opened.garbler.wanted[method] = 1
        await loader.load("a", "/a")
        assert opened.decode.adapters == opened.prefill.adapters == {"A": "a"}
        await loader.unload("a")
        await opened.signal.until(lambda: not opened.decode.adapters and not opened.prefill.adapters)
        assert opened.garbler.garbled == [method]
        await opened.is_answered_soon("after")


@bounded
async def test_a_bug_in_deciding_ends_no_link_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ring() as opened:
        decide, num_bugs = Queue.decide, 0

        def decide_wrongly(queue: Queue, now: float) -> list[object]:
            nonlocal num_bugs
            decided = decide(queue, now)
            if num_bugs < 3:
                num_bugs += 1
                raise AssertionError("a bug")
            return decided  # type: ignore[return-value]

        monkeypatch.setattr(Queue, "decide", decide_wrongly)
        for number in range(3):
            await opened.is_answered_soon(f"r{number}")
        assert num_bugs == 3 and all(one.find_trouble() is None for one in opened.fleet.workers())


@pytest.mark.parametrize("task", ["poll", "listen", "abort", "adapters"])
@bounded
async def test_a_task_of_a_link_that_ends_makes_the_worker_not_ready_and_begins_again(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring() as opened:
        (link,) = opened.fleet.decode.values()
        owner: Any = link.adapters if task == "adapters" else link
        seen: list[int] = []
        name = {"poll": "_learn", "listen": "_deliver", "abort": "_send_aborts", "adapters": "run"}[task]
        works = getattr(owner, name)

        def fail_once(*args: object) -> object:
            if not seen:
                seen.append(1)
                raise ValueError("a bug")
            return works(*args)

        monkeypatch.setattr(owner, name, fail_once)
        with capture_logs() as logs:
            if task == "adapters":
                link._keep(owner.run)
            if task == "abort":
                link._abort([])
            asking = opened.start(wanted())
            await opened.signal.until(lambda: bool(link._bug))
            assert "a link that failed (ValueError('a bug'))" in (opened.router.readiness() or "")
            await opened.is_ready()
            assert await asking == (answer(4), "length")
        assert [one["event"] for one in logs].count("a link to a worker failed and is begun again") == 1
        await opened.is_answered_soon("after")
