"""A real router with sockets to fake workers. Each use checks that all places were given back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import wraps
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.errors import ApiError
from gateway.router.engine_client import TokenizedRequest, Tokens
from gateway.router.fleet import Fleet
from gateway.router.placer import Placer
from gateway.router.router import Router
from tests.support.fake_workers import PATIENCE_S, FakeDecode, FakePrefill, Signal, serving
from tests.support.virtual_fleet import GOALS


class Routed:
    """A fleet of fake workers and its router."""

    def __init__(self, fleet: Fleet, router: Router, signal: Signal) -> None:
        self.fleet = fleet
        self.router = router
        self.signal = signal
        self.failed_lookups: Callable[[], float] = lambda: 0.0
        fleet.subscribe(signal.fire)

    async def generate(self, wanted: TokenizedRequest) -> AsyncGenerator[Tokens, None]:
        """The answer to a one-choice request."""
        with self.router.admit(1) as admitted:
            async with aclosing(self.router.generate(wanted, admitted)) as stream:
                async for part in stream:
                    yield part

    async def collect(self, wanted: TokenizedRequest) -> tuple[list[int], str | None]:
        """All tokens and the finish reason."""
        parts = [part async for part in self.generate(wanted)]
        return [token for part in parts for token in part.token_ids], parts[-1].finish_reason

    def start(self, wanted: TokenizedRequest) -> "asyncio.Task[tuple[list[int], str | None]]":
        return asyncio.create_task(self.collect(wanted))

    async def is_idle(self) -> None:
        await self.signal.until(lambda: not any(worker.num_mine for worker in self.fleet.workers()))
        self.router._queue.check()
        assert self.router._queue.num_waiting == 0


@asynccontextmanager
async def routed(signal: Signal, decode: Sequence[str], prefill: Sequence[str] = ()) -> AsyncIterator[Routed]:
    """A gateway that has heard from all its workers."""
    fleet = Fleet(prefill, decode, 30 * PATIENCE_S, stall_s=PATIENCE_S, context_tokens=0)
    router = Router(fleet, 8, PATIENCE_S, PATIENCE_S, CollectorRegistry(), GOALS, Placer(0))
    built = Routed(fleet, router, signal)
    fleet.start()
    try:
        await signal.until(lambda: all(view.is_alive for view in fleet.views()))
        yield built
        await built.is_idle()
    finally:
        await fleet.close()


@asynccontextmanager
async def pair(is_manual: bool = False) -> AsyncIterator[tuple[Routed, FakeDecode, FakePrefill]]:
    """One worker per role."""
    signal = Signal()
    decode, prefill = FakeDecode("D1", signal, is_manual=is_manual), FakePrefill("P1", signal)
    async with (
        serving(decode) as decode_address,
        serving(prefill) as prefill_address,
        routed(signal, [decode_address], [prefill_address]) as built,
    ):
        yield built, decode, prefill


def bounded(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(scenario(*args, **kwargs), PATIENCE_S))

    return test


async def failure(task: "asyncio.Task[Any]") -> ApiError:
    with pytest.raises(ApiError) as error:
        await task
    return error.value
