"""A real router with sockets to fake workers. Each use checks that all places were given back."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any

from gateway.router.engine_client import TokenizedRequest, Tokens
from gateway.router.fleet import Fleet
from gateway.router.router import Router
from tests.support.fake_workers import PATIENCE_S, Signal


class Routed:
    """A fleet of fake workers and its router."""

    def __init__(self, fleet: Fleet, router: Router, signal: Signal) -> None:
        self.fleet = fleet
        self.router = router
        self.signal = signal
        self.failed_lookups: Callable[[], float] = lambda: 0.0
        fleet.changes.follow(signal.fire)

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
        self.router.queue.check()
        assert self.router.admission.num_waiting == 0


def bounded(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(scenario(*args, **kwargs), PATIENCE_S))

    return test
