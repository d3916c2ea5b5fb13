"""Which revision of the workers a new request goes to. Pure, but for the shares, which operators change.

Workers of one revision serve together: a request's prefill and decode are of one. A revision takes new requests once it
is complete: it has a decode worker that is alive, and a prefill worker if any worker of the model is one. Shares are
for a rollout, which is over once all is at one revision:

    no share       new requests go to all complete revisions, as if they were one fleet
    new=0.1        a tenth of the sessions go to `new`, the rest to all others
    new=1          `new` takes all that is new, and what others have runs to its end: they can be stopped

With shares all answers to one request go to one revision, and a session, or a request without one, stays where it was
while shares grow: those that move, move to the growing one.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from gateway.router.policies import Revisions
from gateway.router.worker_view import WorkerView

ROUNDING = 1e-9  # of shares that add up to 1
REST = ""  # all revisions without a share


Share = Callable[[Mapping[str, float]], Awaitable[None]]
Groups = Mapping[str, Sequence[WorkerView]]  # revision with a share, or REST |-> its workers


async def _keep_to_itself(_: Mapping[str, float]) -> None:
    pass


@dataclass(slots=True)
class Rollout(Revisions):
    """The shares of new requests, by revision."""

    shares: Mapping[str, float] = field(default_factory=dict)  # as runtime/config_parts.py: check_shares takes them
    share: Share = _keep_to_itself  # called when an operator has changed them
    is_for_several: bool = False  # models: revisions that no worker of a model has, alive or not, are other models'
    # of the last list of workers and all shares, as many requests ask for the same: the shares that concern these
    # workers, groups that are whole, and groups that decode alone
    _divided: tuple[Sequence[WorkerView], Mapping[str, float], Mapping[str, float], Groups, Groups] | None = None

    async def give(self, shares: Mapping[str, float]) -> None:
        """Takes an operator's shares, in place of those before."""
        self.shares = shares
        await self.share(shares)

    def choose(self, workers: Sequence[WorkerView], key: str) -> Sequence[WorkerView]:
        """The workers for a new request. `key`: its session or id. Empty: no revision with a share is complete."""
        if self._divided is None or self._divided[0] is not workers or self._divided[1] is not self.shares:
            self._divided = workers, self.shares, self._find_shares(workers), *self._divide(workers)
        _, _, shares, whole, spare = self._divided
        return _draw(whole, key, shares) or _draw(spare, key, shares)

    def _find_shares(self, workers: Sequence[WorkerView]) -> Mapping[str, float]:
        if not (self.is_for_several and self.shares):
            return self.shares
        revisions = {view.revision for view in workers}
        return {name: share for name, share in self.shares.items() if name in revisions}

    def _divide(self, workers: Sequence[WorkerView]) -> tuple[Groups, Groups]:
        revisions = {view.revision for view in workers}
        if len(revisions) == 1 and not self.shares:
            return {REST: workers}, {}
        has_prefill = any(view.role == "prefill" for view in workers)
        whole: dict[str, list[WorkerView]] = {}
        spare: dict[str, list[WorkerView]] = {}
        for revision in revisions:
            views = [view for view in workers if view.revision == revision]
            alive = [view for view in views if view.is_alive]
            if any(view.answers for view in alive):
                into = whole if not has_prefill or any(view.role == "prefill" for view in alive) else spare
                into.setdefault(revision if revision in self.shares else REST, []).extend(views)
        return whole, spare

    def explain(self, workers: Sequence[WorkerView]) -> str:
        """Why a new request can go to none of these workers, of which some decode."""
        alive = sorted({view.revision for view in workers if view.answers and view.is_alive})
        wanted = ", ".join(f"{name}={share:g}" for name, share in self.shares.items())
        return (
            f"new requests go to {wanted}, of which no decode worker is alive, and alive are: {', '.join(alive)}; "
            "change it by `baton rollout` or POST /v1/revisions"
        )


def _draw(groups: Groups, key: str, shares: Mapping[str, float]) -> Sequence[WorkerView]:
    """Draws a group that has a share: of exponential clocks the first to ring. So no session moves between two
    groups whose shares did not change."""
    if not shares:
        return groups.get(REST, ())
    rest = 1 - sum(shares.values())
    all_shares = {REST: rest if rest > ROUNDING else 0.0, **shares}
    rings = {name: -math.log(_draw_number(key, name)) / all_shares[name] for name in groups if all_shares[name] > 0}
    return groups[min(rings, key=rings.__getitem__)] if rings else ()


def _draw_number(key: str, revision: str) -> float:
    """A number in (0, 1), the same for the same key and revision."""
    digest = blake2b(f"{revision} {key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
