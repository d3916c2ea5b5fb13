"""Shares of revisions that one gateway was given: others with the same store follow, now or when they start."""

from typing import Any

from gateway.policies.rollout import Rollout
from gateway.store.database import Database
from gateway.store.follower import LOOK_S
from gateway.store.rollout import SharedRollout, exchange_shares
from tests.gateway.store.test_adapters import Store
from tests.support.virtual_fleet import VirtualFleet, virtual_fleet


class Gateway:
    def __init__(self, virtual: VirtualFleet, database: Database, **shares: float) -> None:
        self.rollout, self.store = Rollout(shares), Store(database)
        runs: Any = self.store
        self._virtual, self.shared = virtual, SharedRollout(runs, self.rollout)
        self.call(self.shared.start())

    @property
    def shares(self) -> dict[str, float]:
        return dict(self.rollout.shares)

    def call(self, work: Any) -> None:
        task = self._virtual.loop.create_task(work)
        self._virtual.run()
        task.result()


def test_others_follow_and_those_that_start_later_whatever_they_start_with(database: Database) -> None:
    with virtual_fleet() as virtual:
        first, other = Gateway(virtual, database, new=0.5), Gateway(virtual, database)
        assert (first.shares, other.shares) == ({"new": 0.5}, {}), "nobody has said anything"
        first.call(first.rollout.give({"new": 0.1, "old": 0.25}))
        later = Gateway(virtual, database, new=0.5)
        virtual.run(LOOK_S)
        assert first.shares == other.shares == later.shares == {"new": 0.1, "old": 0.25}
        other.call(other.rollout.give({}))
        virtual.run(LOOK_S)
        assert first.shares == later.shares == Gateway(virtual, database, new=0.5).shares == {}


def test_without_the_store_a_gateway_has_what_it_was_told_and_others_learn_later(database: Database) -> None:
    with virtual_fleet() as virtual:
        first, other = Gateway(virtual, database), Gateway(virtual, database)
        first.store.fails = True
        first.call(first.rollout.give({"new": 1.0}))
        virtual.run(3 * LOOK_S)
        assert first.shares == {"new": 1.0} and not other.shares and first.store.num_failures
        exchange_shares(database, {"old": 1.0})  # meanwhile by another one
        first.store.fails = False
        virtual.run(2 * LOOK_S)
        assert first.shares == other.shares == {"new": 1.0}


async def test_without_any_store_shares_are_one_gateways_memory() -> None:
    rollout = Rollout()
    await rollout.give({"new": 0.5})
    assert rollout.shares == {"new": 0.5}
