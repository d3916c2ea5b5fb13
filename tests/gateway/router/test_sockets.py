"""The router and workers with gRPC between them: a few of the virtual tests' cases, and what only sockets show."""

import socket
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import grpc
import pytest
from structlog.testing import capture_logs

from decode_worker import service
from gateway.router.fleet import Fleet
from protos import decode_pb2, kv_pb2
from runtime import rpc
from tests.support.dispatching import bounded
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.real_workers import MAX_RUNNING, decode_worker, gateway, prefill_worker


async def refused_for(call: Awaitable[object]) -> str:
    """The reason in the trailing metadata of a RESOURCE_EXHAUSTED."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(dict(tuple(error.value.trailing_metadata() or ()))[rpc.REFUSED_FOR])


def test_real_workers_say_what_they_have_not_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_WAIT_S", 0.01)

    @bounded
    async def scenario() -> None:
        signal = Signal()
        async with (
            prefill_worker(signal) as prefill,
            decode_worker(signal) as decode,
            gateway(decode, signal) as opened,
        ):
            prefill.scheduler.max_running = decode.scheduler.max_running = 0
            assert await refused_for(prefill.run(kv_pb2.Ticket(end=1), [1, 2])) == rpc.NO_ROOM
            assert await refused_for(opened.reserve(1, [1, 2])) == rpc.NO_ROOM
            grammar = decode_pb2.Grammar(kind="regex", text="a")
            assert await refused_for(opened.reserve(1, [1, 2], grammar=grammar)) == rpc.GRAMMAR_BUSY
            prefill.scheduler.max_running = decode.scheduler.max_running = MAX_RUNNING

    scenario()


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
                fleet.changes.follow(lambda: polls.append(None))
                fleet.changes.follow(signal.fire)
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
