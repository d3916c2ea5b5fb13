"""Adapters (LoRA) that the API has loaded or unloaded: all gateways with one store serve the same ones.

The last change of a name counts, whichever gateway made it, and more than --lora.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from gateway.adapters.loader import AdapterLoader
from gateway.adapters.registry import Adapter
from gateway.store.database import Database
from gateway.store.follower import Follower
from gateway.store.runs import Runs

MOST_UNLOADED = 1000  # latest changes, as long as which a name counts as unloaded


class AdapterRow(NamedTuple):
    """A row of `adapters`."""

    model: str  # its first name
    name: str
    path: str  # on the workers' hosts; empty: the name was unloaded
    digest: str


def share(database: Database, new: Sequence[AdapterRow], seen: int) -> tuple[int, list[AdapterRow] | None]:
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
    return number, [AdapterRow(*row) for row in rows]


class SharedAdapters(Follower):
    """Start it after --lora is known: what the API has said since counts more."""

    def __init__(self, runs: Runs, loaders: Mapping[str, AdapterLoader]) -> None:
        """`loaders`: of each model by its first name."""
        super().__init__(runs)
        self._loaders = loaders
        self._unsaved: dict[tuple[str, str], AdapterRow] = {}
        self._seen = -1
        for model, loader in loaders.items():
            loader.share = partial(self._share, model)

    async def _share(self, model: str, name: str, adapter: Adapter | None) -> None:
        """Returns when the store has it, or fails: then it gets it later."""
        path, digest = (adapter.path, adapter.digest) if adapter else ("", "")
        self._unsaved[model, name] = AdapterRow(model, name, path, digest)
        await self.exchange()

    async def _look(self) -> None:
        new = list(self._unsaved.values())
        self._seen, rows = await self._runs.writes.call(share, new, self._seen)
        for row in new:
            if self._unsaved[row[:2]] is row:
                del self._unsaved[row[:2]]
        for row in rows or ():
            if row.model in self._loaders and row[:2] not in self._unsaved:
                self._loaders[row.model].follow(row.name, row.path, row.digest)
