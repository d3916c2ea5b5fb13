"""Where workers live: they die there, drain, and come back as another incarnation, perhaps of another revision."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from bench.simulate.channels import REVISIONS, BothChannel, WorkerChannel
from bench.simulate.virtual_time import MemoryChannel, refusal
from gateway.policies.rollout import Rollout

DRAIN_S = 300.0  # after which a worker ends with whatever it has
WAVES = 20  # of a rollout

LiveChannel = WorkerChannel | BothChannel


@dataclass(frozen=True, slots=True)
class Troubles:
    """Deaths and rollouts in a fleet."""

    deaths_per_hour: float = 0.0  # of a worker
    restart_s: float = 60.0  # until a worker that died or drained is there again
    rollout_at_s: float = 0.0  # when all begin to be replaced by those of another revision; 0: never
    seed: int = 0


class Host(MemoryChannel):
    """The gateway's channel to an address: calls reach the worker that is there now, if any."""

    def __init__(self, name: str, build: Callable[[str, int], LiveChannel]) -> None:
        """`build`: a worker of this incarnation and revision, an index into REVISIONS, with nothing in its pool."""
        self.revision = 0
        self.num_lives = 0
        self._busy_s = 0.0  # of earlier lives
        self.channel: LiveChannel | None = None
        self._name = name
        self._build = build
        self._calls: set[asyncio.Task[Any]] = set()
        self.start()

    def start(self) -> None:
        self.num_lives += 1
        self.channel = self._build(f"{self._name}#{self.num_lives}", self.revision)

    def find_busy_s(self) -> float:
        return self._busy_s + (self.channel.worker.busy_s if self.channel is not None else 0.0)

    def die(self) -> None:
        """At once: callers see a broken connection."""
        if self.channel is not None:
            self._busy_s += self.channel.worker.busy_s
            self.channel.worker.end()
            self.channel = None
            for call in self._calls:
                call.cancel()

    async def drain(self) -> None:
        """It takes nothing new; returns when it has nothing left, or after DRAIN_S."""
        channel = self.channel
        if channel is None:
            return
        channel.drain()
        for _ in range(int(DRAIN_S)):
            channel.worker.settle()
            if not len(channel.worker.scheduler) or self.channel is not channel:
                return
            await asyncio.sleep(1.0)

    async def restart(self, after_s: float) -> None:
        self.die()
        await asyncio.sleep(after_s)
        self.start()

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        async def call(request: object, timeout: float) -> Any:  # noqa: ASYNC109 - as stubs have it
            channel = self._find()
            return await self._reach(channel, lambda: channel.unary_unary(path)(request, timeout))

        return call

    def unary_stream(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        async def stream(request: object) -> AsyncIterator[Any]:
            channel = self._find()
            events = channel.unary_stream(path)(request)
            while True:
                yield await self._reach(channel, lambda: anext(events))

        return stream

    def _find(self) -> LiveChannel:
        if self.channel is None:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "connection refused")
        return self.channel

    async def _reach(self, channel: LiveChannel, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The worker's answer, unless it dies before."""

        async def wait() -> Any:
            return await ask()

        call, own = asyncio.get_running_loop().create_task(wait()), asyncio.current_task()
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if channel is self.channel or (own is not None and own.cancelling()):
                raise
            raise refusal(grpc.StatusCode.UNAVAILABLE, "connection reset") from None
        finally:
            self._calls.discard(call)


class Operator:
    """Lets workers die, and rolls out another revision as `baton rollout` would be used."""

    def __init__(self, hosts: Sequence[Host], troubles: Troubles, rollout: Rollout) -> None:
        self.num_deaths = 0
        self._hosts = hosts
        self._troubles = troubles
        self._rollout = rollout
        self._draw = np.random.default_rng(troubles.seed)

    @property
    def works(self) -> Sequence[Callable[[], Coroutine[None, None, None]]]:
        """Functions whose coroutines run beside the load."""
        troubles = self._troubles
        wanted = (troubles.deaths_per_hour, self._let_die), (troubles.rollout_at_s, self._roll_out)
        return [work for is_wanted, work in wanted if is_wanted]

    async def _let_die(self) -> None:
        mean_s = 3600.0 / (self._troubles.deaths_per_hour * len(self._hosts))
        while True:
            await asyncio.sleep(float(self._draw.exponential(mean_s)))
            host = self._hosts[int(self._draw.integers(len(self._hosts)))]
            if host.channel is not None:
                self.num_deaths += 1
                asyncio.get_running_loop().create_task(host.restart(self._troubles.restart_s))

    async def _roll_out(self) -> None:
        """A wave after the other, of both roles; its share of new requests follows what is there of the revision."""
        await asyncio.sleep(self._troubles.rollout_at_s)
        waves = [self._hosts[number::WAVES] for number in range(min(WAVES, len(self._hosts)))]
        num_done = 0
        for wave in waves:
            for host in wave:
                host.revision = 1
            await asyncio.gather(*map(self._replace, wave))
            num_done += len(wave)
            await self._rollout.give({REVISIONS[1]: num_done / len(self._hosts)})

    async def _replace(self, host: Host) -> None:
        await host.drain()
        if host.channel is not None:  # else it has died, and comes back as one of the new revision
            await host.restart(self._troubles.restart_s)


def spawn(
    works: Sequence[Callable[[], Coroutine[None, None, None]]], create_task: Callable[..., asyncio.Task[None]]
) -> None:
    """A work that fails ends the simulation."""
    for work in works:
        create_task(work()).add_done_callback(lambda task: task.cancelled() or task.result())
