"""Adapters (LoRA) that the API has loaded or unloaded: all gateways with one store serve the same ones.

The last change of a name counts, whichever gateway made it, and more than --lora.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from gateway.router.adapter_loader import AdapterLoader
from gateway.router.adapters import Adapter
from gateway.store.database import Database, StoreError
from gateway.store.runs import Runs
from runtime.tasks import keep_running

LOOK_S = 1.0  # between two looks for what other gateways have changed
MOST_UNLOADED = 1000  # latest changes, as long as which a name counts as unloaded


class Shared(NamedTuple):
    """A row of `adapters`."""

    model: str  # its first name
    name: str
    path: str  # on the workers' hosts; empty: the name was unloaded
    digest: str


def share(database: Database, new: Sequence[Shared], seen: int) -> tuple[int, list[Shared] | None]:
    """Writes changes. Returns how many there have ever been, and unless that is `seen` what all of them have led to."""
    with database.transaction(is_written=bool(new)):
        for row in new:
            database.do("UPDATE changes SET number = number + 1")  # holds others up until this is committed
            database.do(
                "INSERT INTO adapters (model, name, path, digest, number)"
                " VALUES (:model, :name, :path, :digest, (SELECT number FROM changes))"
                " ON CONFLICT (model, name) DO UPDATE SET path = excluded.path, digest = excluded.digest,"
                " number = excluded.number",
                **row._asdict(),
            )
        (number,) = database.do("SELECT number FROM changes").fetchone()
        if new:
            database.do("DELETE FROM adapters WHERE path = '' AND number <= :last", last=number - MOST_UNLOADED)
        if number == seen:
            return number, None
        rows = database.do("SELECT model, name, path, digest FROM adapters ORDER BY number").fetchall()
    return number, [Shared(*row) for row in rows]


class SharedAdapters:
    """Follows the store, and adds to it. Lives on the asyncio thread."""

    def __init__(self, runs: Runs, loaders: Mapping[str, AdapterLoader]) -> None:
        """`loaders`: of each model by its first name."""
        self._runs, self._loaders = runs, loaders
        self._unsaved: dict[tuple[str, str], Shared] = {}
        self._seen = -1
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        for model, loader in loaders.items():
            loader.share = partial(self._share, model)

    async def start(self) -> None:
        """After --lora is known: what the API has said since counts more."""
        with suppress(StoreError):
            await self._look()
        self._task = asyncio.create_task(keep_running(self._run, "following adapters"))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _share(self, model: str, name: str, adapter: Adapter | None) -> None:
        """Returns when the store has it, or fails: then it gets it later."""
        path, digest = (adapter.path, adapter.digest) if adapter else ("", "")
        self._unsaved[model, name] = Shared(model, name, path, digest)
        with suppress(StoreError):
            await self._look()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(StoreError):
                await self._look()

    async def _look(self) -> None:
        async with self._looking:
            new = list(self._unsaved.values())
            try:
                self._seen, rows = await self._runs.writes.call(share, new, self._seen)
            except StoreError as error:
                self._runs.note_failure(error)
                raise
            for row in new:
                if self._unsaved[row[:2]] is row:
                    del self._unsaved[row[:2]]
            for row in rows or ():
                if row.model in self._loaders and row[:2] not in self._unsaved:
                    self._loaders[row.model].follow(row.name, row.path, row.digest)
