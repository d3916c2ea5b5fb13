"""The shares of a rollout: all gateways with one store give revisions the same, and remember them."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from gateway.router.rollout import Rollout
from gateway.store.database import Database, StoreError
from gateway.store.runs import Runs
from runtime.tasks import keep_running

LOOK_S = 1.0  # between two looks for what another gateway has changed
_MARK = ""  # no revision: a row that says that shares were given, if only to end a rollout


def exchange_shares(database: Database, new: Mapping[str, float] | None) -> dict[str, float] | None:
    """Writes new shares in place of those before; returns those that count. None: none were ever given."""
    with database.transaction(is_written=new is not None):
        if new is not None:
            database.do("DELETE FROM shares")
            for revision, share in (*new.items(), (_MARK, 0.0)):
                database.do(
                    "INSERT INTO shares (revision, share) VALUES (:revision, :share)", revision=revision, share=share
                )
        rows = dict(database.do("SELECT revision, share FROM shares").fetchall())
    return None if rows.pop(_MARK, None) is None else rows


class SharedRollout:
    """Follows the store, and tells it. Lives on the asyncio thread."""

    def __init__(self, rollout: Rollout, runs: Runs | None) -> None:
        """`runs`: None: there is no store."""
        self._rollout, self._runs = rollout, runs
        self._unsaved: Mapping[str, float] | None = None
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def change(self, shares: Mapping[str, float]) -> None:
        """Returns when the store has them, or fails: then it gets them later."""
        self._rollout.shares = self._unsaved = shares
        with suppress(StoreError):
            await self._look()

    async def start(self) -> None:
        """What the store has counts more than what this gateway was started with."""
        if self._runs is not None:
            with suppress(StoreError):
                await self._look()
            self._task = asyncio.create_task(keep_running(self._run, "following shares of revisions"))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(StoreError):
                await self._look()

    async def _look(self) -> None:
        if self._runs is None:
            return
        async with self._looking:
            new = self._unsaved
            try:
                shares = await self._runs.writes.call(exchange_shares, new)
            except StoreError as error:
                self._runs.note_failure(error)
                raise
            if self._unsaved is new:
                self._unsaved = None
                if shares is not None:
                    self._rollout.shares = shares
