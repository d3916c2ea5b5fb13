"""A dispatcher in front of fake workers, and helpers for its tests. Each use checks that all places were given back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import wraps
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gateway.errors import ApiError
from gateway.ring.advice import Goals
from gateway.router.attempt_record import AttemptRecord
from gateway.ring.dispatcher import Dispatcher
from gateway.ring.fleet import Fleet
from gateway.router.engine_client import Admitted, Generation, Tokens
from gateway.ring.routing import Router
from runtime import rpc
from tests.support.fake_workers import PATIENCE_S, FakeDecode, FakePrefill, Signal, serving, token_at
from wire.sampling import SamplingParams

GOALS = Goals(prefill_wait_s=1.0, kv_usage=0.8)
PROMPT = (1, 2, 3)
NO_ROOM = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no pages", ((rpc.REFUSED_FOR, rpc.NO_ROOM),))


def generation(name: str = "r", max_tokens: int = 4, prompt: Sequence[int] = PROMPT) -> Generation:
    return Generation(name, tuple(prompt), max_tokens, SamplingParams(temperature=0.0), frozenset())


def answer(count: int) -> list[int]:
    """The tokens that any fake worker answers to PROMPT."""
    return [token_at(len(PROMPT) + offset) for offset in range(count)]


class Ring:
    """A fleet of fake workers and its dispatcher."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, signal: Signal) -> None:
        self.fleet = fleet
        self.dispatcher = dispatcher
        self.signal = signal
        self.failed_lookups: Callable[[], float] = lambda: 0.0
        fleet.subscribe(signal.fire)

    @property
    def num_held(self) -> int:
        return sum(state.num_mine for state in self.fleet.states())

    @property
    def num_waiting(self) -> int:
        return self.dispatcher._queue.num_waiting

    @property
    def num_failed_attempts(self) -> float:
        return float(self.dispatcher._failed_attempts._value.get())

    async def generate(self, wanted: Generation) -> AsyncGenerator[Tokens, None]:
        """The answer to a one-choice request."""
        with self.dispatcher.admit(1) as admitted:
            async with aclosing(self.dispatcher.generate(wanted, admitted)) as stream:
                async for part in stream:
                    yield part

    async def listen(
        self, wanted: Generation, admitted: Admitted | None = None, attempts: list[AttemptRecord] | None = None
    ) -> list[Tokens]:
        """All parts of an answer. `admitted`: from a request with several choices."""
        if admitted is None:
            with self.dispatcher.admit(1) as admitted:
                return await self.listen(wanted, admitted, attempts)
        parts: list[Tokens] = []
        async with aclosing(self.dispatcher.generate(wanted, admitted, attempts)) as stream:
            async for part in stream:
                assert not parts or parts[-1].finish_reason is None, "tokens after the end"
                parts.append(part)
        return parts

    async def collect(self, wanted: Generation, admitted: Admitted | None = None) -> tuple[list[int], str | None]:
        """All tokens and the finish reason."""
        parts = await self.listen(wanted, admitted)
        return [token for part in parts for token in part.token_ids], parts[-1].finish_reason

    def start(self, wanted: Generation) -> "asyncio.Task[tuple[list[int], str | None]]":
        return asyncio.create_task(self.collect(wanted))

    def start_all(self, wanted: Sequence[Generation]) -> "asyncio.Task[list[tuple[list[int], str | None]]]":
        """One request with several choices."""

        async def collect_all() -> list[tuple[list[int], str | None]]:
            with self.dispatcher.admit(len(wanted)) as admitted:
                return list(await asyncio.gather(*(self.collect(one, admitted) for one in wanted)))

        return asyncio.create_task(collect_all())

    async def is_idle(self) -> None:
        await self.signal.until(lambda: self.num_held == 0)
        self.dispatcher._queue.check()
        assert self.num_waiting == 0


@asynccontextmanager
async def ring(
    signal: Signal,
    decode: Sequence[str],
    prefill: Sequence[str] = (),
    max_queue: int = 8,
    local: int = 0,
    timeout_s: float = PATIENCE_S,
    patience_s: float = 0.0,
    cache_routing: bool = True,
    heartbeat_s: float = 30 * PATIENCE_S,
) -> AsyncIterator[Ring]:
    """A gateway that has heard from all its workers."""
    # No heartbeat polls the workers before `slow_polls` does, a third of the way through an interval.
    fleet = Fleet(prefill, decode, heartbeat_s, stall_s=PATIENCE_S, context_tokens=0)
    router = Router(local, cache_routing)
    dispatcher = Dispatcher(fleet, max_queue, timeout_s, patience_s, CollectorRegistry(), GOALS, router)
    built = Ring(fleet, dispatcher, signal)
    fleet.start()
    try:
        await signal.until(lambda: all(view.is_alive for view in fleet.views()))
        yield built
        await built.is_idle()
    finally:
        await fleet.close()


@asynccontextmanager
async def pair(
    is_manual: bool = False, max_running: int = 4, max_queue: int = 8, timeout_s: float = PATIENCE_S
) -> AsyncIterator[tuple[Ring, FakeDecode, FakePrefill]]:
    """A ring with one worker per role."""
    signal = Signal()
    decode, prefill = FakeDecode("D1", signal, max_running, is_manual), FakePrefill("P1", signal)
    prefill.decodes = {"D1": decode}
    async with (
        serving(decode) as decode_address,
        serving(prefill) as prefill_address,
        ring(
            signal, [decode_address], [prefill_address], max_queue, timeout_s=timeout_s, patience_s=PATIENCE_S
        ) as built,
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
