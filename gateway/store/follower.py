"""Carries what operators tell one gateway, by the store, to all gateways with the same store."""

import asyncio
from abc import ABC, abstractmethod

from gateway.store.database import StoreError
from gateway.store.runs import Runs
from runtime.tasks import keep_running

LOOK_S = 1.0  # between two looks for what other gateways have changed


class Follower(ABC):
    """Follows one kind of change in the store, and adds to it. Lives on the asyncio thread."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._exchanging = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Takes what the store has, which counts more than what this gateway was started with; then follows it."""
        await self.exchange()
        self._task = asyncio.create_task(keep_running(self._run, "following other gateways"))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def exchange(self) -> None:
        """Returns when the store has what was changed here, and the reverse; or it fails, and gets it later."""
        async with self._exchanging:
            try:
                await self._look()
            except StoreError as error:
                self._runs.note_failure(error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.exchange()

    @abstractmethod
    async def _look(self) -> None:
        """One exchange. Raises StoreError."""
