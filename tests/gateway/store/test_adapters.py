"""Adapters that one gateway has loaded or unloaded: others with the same store follow, now or when they start."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.adapters.link import LinkedAdapters
from gateway.adapters.loader import AdapterLoader
from gateway.router.fleet import Fleet
from gateway.router.worker_client import POLL_S
from gateway.store import adapters
from gateway.store.adapters import AdapterRow, SharedAdapters, share
from gateway.store.database import Database, StoreError
from gateway.store.follower import LOOK_S
from tests.support.virtual_fleet import VirtualFleet, virtual_fleet

MODEL = "m"


class Store:
    """Stands for Runs and its line: a call is done at once, or fails."""

    def __init__(self, database: Database) -> None:
        self.database, self.fails, self.num_failures = database, False, 0
        self.writes = self

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        if self.fails:
            raise StoreError("away")
        return method(self.database, *args)

    def note_failure(self, _: StoreError) -> None:
        self.num_failures += 1


class Gateway:
    """Loads adapters into the virtual fleet's workers, or knows of none."""

    def __init__(self, virtual: VirtualFleet, fleet: Fleet, database: Database, **lora: str) -> None:
        self._virtual, self.loader = virtual, AdapterLoader(fleet, CollectorRegistry())
        virtual.loop.run(lambda: self.loader.expect(lora))
        store: Any = Store(database)
        self.store: Store = store
        self.shared = SharedAdapters(store, {MODEL: self.loader})
        virtual.loop.create_task(self.shared.start())
        virtual.run(POLL_S)

    @property
    def named(self) -> dict[str, str]:
        return {name: one.digest for name, one in self.loader.adapters.named.items()}

    def call(self, work: Any) -> None:
        task = self._virtual.loop.create_task(work)
        self._virtual.run()
        task.result()


@pytest.fixture
def fleet() -> Iterator[VirtualFleet]:
    with virtual_fleet() as virtual:
        (worker,) = virtual.decodes
        worker.max_loras, worker.folders = 2, {"/a": "A", "/b": "B"}
        yield virtual


@pytest.fixture
def first(fleet: VirtualFleet, database: Database) -> Gateway:
    return Gateway(fleet, fleet.fleet, database)


def start_beside(fleet: VirtualFleet, database: Database, **lora: str) -> Gateway:
    """A gateway whose workers do not answer."""
    return Gateway(
        fleet, Fleet((), (), 10.0, 60.0, 0, clock=fleet.loop.time, adapters=LinkedAdapters()), database, **lora
    )


def test_others_follow_and_those_that_start_later(fleet: VirtualFleet, database: Database, first: Gateway) -> None:
    other = start_beside(fleet, database)
    first.call(first.loader.load("one", "/a"))
    assert start_beside(fleet, database).named == {"one": "A"}
    fleet.run(LOOK_S)
    assert other.named == {"one": "A"}
    fleet.decodes[0].folders["/a"] = "C"
    first.call(first.loader.load("one", "/a", in_place=True))
    first.call(first.loader.load("two", "/b"))
    fleet.run(LOOK_S)
    assert other.named == first.named == {"one": "C", "two": "B"}
    other.call(other.loader.unload("one"))
    fleet.run(LOOK_S + POLL_S)
    assert first.named == other.named == start_beside(fleet, database).named == {"two": "B"}
    assert set(fleet.decodes[0].adapters) == {"B"}


def test_what_the_api_has_said_counts_more_than_what_gateways_start_with(
    fleet: VirtualFleet, database: Database, first: Gateway
) -> None:
    first.call(first.loader.load("one", "/a"))
    first.call(first.loader.load("two", "/b"))
    first.call(first.loader.unload("two"))
    assert start_beside(fleet, database, one="/b", two="/b").named == {"one": "A"}


def test_without_the_store_a_gateway_serves_what_it_knows_and_others_learn_later(
    fleet: VirtualFleet, database: Database, first: Gateway
) -> None:
    other = start_beside(fleet, database)
    first.store.fails = True
    first.call(first.loader.load("one", "/a"))
    fleet.run(3 * LOOK_S)
    assert first.named == {"one": "A"} and not other.named and first.store.num_failures
    first.store.fails = False
    fleet.run(2 * LOOK_S)
    assert other.named == {"one": "A"}


def test_a_change_that_the_store_lacks_is_not_undone_by_what_it_has(
    fleet: VirtualFleet, database: Database, first: Gateway
) -> None:
    first.call(first.loader.load("one", "/a"))
    first.store.fails = True
    first.call(first.loader.unload("one"))
    share(database, [AdapterRow(MODEL, "two", "/b", "B")], -1)  # by another gateway: all rows are read again
    first.store.fails = False
    fleet.run(2 * LOOK_S)
    assert first.named == {"two": "B"}


def test_unloaded_names_are_bounded_and_rows_of_other_models_stay(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MOST_UNLOADED", 3)
    kept = AdapterRow("other", "kept", "/a", "A")
    share(database, [kept, *(AdapterRow(MODEL, f"{number}", "", "") for number in range(10))], -1)
    number, rows = share(database, [], -1)
    assert rows == [kept, *(AdapterRow(MODEL, f"{number}", "", "") for number in range(7, 10))]
    assert share(database, [], number) == (number, None)
