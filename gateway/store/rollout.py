"""The shares of a rollout: all gateways with one store give revisions the same, and remember them."""

from collections.abc import Mapping

from gateway.policies.rollout import Rollout
from gateway.store.database import Database
from gateway.store.follower import Follower
from gateway.store.runs import Runs

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


class SharedRollout(Follower):
    """The store's part of a rollout."""

    def __init__(self, runs: Runs, rollout: Rollout) -> None:
        super().__init__(runs)
        self._rollout = rollout
        self._unsaved: Mapping[str, float] | None = None
        rollout.share = self._share

    async def _share(self, shares: Mapping[str, float]) -> None:
        """Returns when the store has them, or fails: then it gets them later."""
        self._unsaved = shares
        await self.exchange()

    async def _look(self) -> None:
        new = self._unsaved
        shares = await self._runs.writes.call(exchange_shares, new)
        if self._unsaved is new:
            self._unsaved = None
            if shares is not None:
                self._rollout.shares = shares
