"""The gateway's log about its workers: some do not answer, or all are gone."""

import socket
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.ring import worker_state
from gateway.ring.fleet import Fleet
from tests.support.dispatching import answer, bounded, generation, ring
from tests.support.fake_workers import PATIENCE_S, FakeDecode, Signal, serving


def test_addresses_that_do_not_answer_are_logged_once_with_the_reason() -> None:
    """One refuses connections, the other accepts them and never answers."""
    logged: dict[str, list[str]] = {}

    async def hear_nothing() -> None:
        signal = Signal()
        with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as mute:
            gone, silent = (f"127.0.0.1:{one.getsockname()[1]}" for one in (free, mute))
            free.close()
            async with AsyncExitStack() as stack:
                fleet = Fleet([silent], [gone], PATIENCE_S, PATIENCE_S, 0)
                stack.push_async_callback(fleet.close)
                polls: list[None] = []  # one per failed poll of `gone`
                fleet.subscribe(lambda: polls.append(None))
                fleet.subscribe(signal.fire)
                logs = stack.enter_context(capture_logs())
                fleet.start()
                logged.update({gone: [], silent: []})
                await signal.until(lambda: len(polls) > 6 and any(one["address"] == silent for one in logs))
                for one in logs:
                    assert one["event"] == "worker does not answer"
                    logged[one["address"]].append(one["reason"])

    bounded(hear_nothing)()
    (refused,), (nothing,) = logged.values()
    assert refused.startswith("UNAVAILABLE: ") and "refused" in refused
    assert nothing == "nothing came for 1.5 s"


def test_the_end_of_the_last_decode_worker_is_logged_once() -> None:
    logs: list[MutableMapping[str, Any]] = []

    async def drain_it() -> None:
        signal = Signal()
        decode = FakeDecode("D1", signal)
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(serving(decode))
            fleet = Fleet([], [address], 0.5, PATIENCE_S, 0)
            stack.push_async_callback(fleet.close)
            fleet.subscribe(signal.fire)
            captured = stack.enter_context(capture_logs())
            fleet.start()
            await signal.until(lambda: fleet.decode[address].find_trouble() is None)
            decode.is_draining = True
            await signal.until(lambda: fleet.decode[address].find_trouble() is not None)
            calls = decode.num_status_calls
            await signal.until(lambda: decode.num_status_calls > calls + 2)
            decode.is_draining = False
            await signal.until(lambda: fleet.decode[address].find_trouble() is None)
            logs.extend(captured)
            logs.append({"event": address})

    bounded(drain_it)()
    address = logs.pop()["event"]
    assert [one["event"] for one in logs] == [
        "decode workers take requests",
        "no decode worker takes requests: they wait, then get a 503",
        "decode workers take requests",
    ]
    assert logs[1]["reason"] == f"{address} is draining"


def test_three_gateways_share_two_workers_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests of each: alone, each gateway gives its first worker three of them."""
    monkeypatch.setattr(worker_state, "POLL_S", 0.05)

    @bounded
    async def scenario() -> None:
        signal = Signal()
        workers = [FakeDecode(name, signal, max_running=64, is_manual=True) for name in ("D1", "D2")]

        async def are_polled() -> None:
            """Each gateway has asked each worker since now."""
            least = [worker.num_status_calls + 2 * len(gateways) for worker in workers]
            await signal.until(lambda: all(one.num_status_calls > at for one, at in zip(workers, least, strict=True)))

        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(serving(worker)) for worker in workers]
            gateways = [
                await stack.enter_async_context(ring(signal, addresses, heartbeat_s=PATIENCE_S, cache_routing=False))
                for _ in range(3)
            ]
            answers = []
            for number in range(15):
                answers.append(gateways[number % 3].start(generation(f"r{number}")))
                await signal.until(lambda: sum(len(one.sessions) for one in workers) == len(answers))
                await are_polled()
            assert sorted(len(worker.sessions) for worker in workers) == [7, 8]
            for worker in workers:
                for session in worker.sessions:
                    session.emit(4, "length")
            assert [(await one)[0] for one in answers] == [answer(4)] * 15

    scenario()
