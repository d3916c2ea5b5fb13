"""Which roles workers of both take, by load. Pure.

    demand of prefill = tokens placed a second / what a worker computes a second    [workers]
    demand of decode  = answers that are under way / places of a worker             [workers]
    each + what waits for it, as if it were to be done within HORIZON_S, up to as many workers as may change at once;
    requests for which no place is free count as one at least

A worker's places are those that it says, or as many as its pages hold of what runs now. The workers are divided like
the demand, those of each revision alike. What keeps that calm: demand is averaged over MEAN_S; one worker changes at a
time, of many a share of CHANGING, if the division is off by more than SLACK of that for HOLD_S, and REST_S after the
last change; nothing changes while most is idle, and less waits for the role than a worker's work. Of each revision
there is always one of each role, if need be by a worker that takes both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from gateway.router.worker_view import Role, WorkerView

ROLES: tuple[Role, ...] = ("prefill", "decode")
MEAN_S = 8.0
HORIZON_S = 10.0
SLACK = 0.7
HOLD_S = 3.0
REST_S = 8.0  # a changed worker has some work of its new role by then
BUSY = 0.3  # of all workers: with less demand they stay as they are
CHANGING = 0.05  # of all workers


class Seen(NamedTuple):
    """Counts of this gateway: the work done so far, and what waits."""

    tokens_placed: float  # since its start: tokens of prompts that workers had to compute; less when one refuses
    num_answering: int  # requests whose prompt is computed
    tokens_waiting: int  # of the prompts in the queue
    num_waiting: int  # requests there


class Change(NamedTuple):
    """The roles that one worker is to take."""

    incarnation: str
    roles: tuple[Role, ...]


class Group:
    """The workers of one revision: they serve together."""

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        both: dict[str, dict[Role, WorkerView]] = {}
        for view in workers:
            if view.incarnation:
                both.setdefault(view.incarnation, {})[view.role] = view
        alive = [view for view in workers if view.is_alive]
        self.open: Mapping[Role, set[str]] = {
            role: {view.incarnation for view in alive if view.role == role} for role in ROLES
        }
        # those of both roles that are well: incarnation |-> its views
        self.able = {
            name: views for name, views in both.items() if len(views) == 2 and any(v.is_alive for v in views.values())
        }

    @property
    def size(self) -> int:
        return len(self.open["prefill"] | self.open["decode"])

    def find_missing(self) -> Change | None:
        """A role that no worker takes is taken by the one with least to do, beside its own."""
        for role in ROLES:
            if not self.open[role] and self.able:
                return Change(
                    min(self.able, key=lambda name: max(v.num_running for v in self.able[name].values())), ROLES
                )
        return None

    def drop_roles(self, demand: Mapping[Role, float]) -> Iterator[Change]:
        """A worker that takes both while others take one of these is left with the role of which more is needed."""
        for name in self.able:
            if all(name in self.open[role] for role in ROLES):
                spare = [role for role in ROLES if len(self.open[role]) > 1]
                if spare:
                    dropped = min(spare, key=lambda role: (demand[role] / len(self.open[role]), -len(self.open[role])))
                    self.open[dropped].discard(name)
                    yield Change(name, tuple(role for role in ROLES if role != dropped))

    def find_giver(self, role: Role) -> str | None:
        """Who has least to do of those that could leave the role; None if they are needed."""
        views = [views[role] for name, views in self.able.items() if name in self.open[role]]
        if not views or len(self.open[role]) == 1:
            return None
        return min(views, key=lambda view: (view.num_running, view.tokens_waiting)).incarnation


@dataclass(slots=True)
class RoleBalance:
    """The demand so far, and when roles last changed."""

    _demand: dict[Role, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    _tokens_placed: float = 0.0
    _looked_at: float | None = None
    _short: Role | None = None  # which role has too few
    _short_since: float = 0.0
    _changed_at: float = -REST_S

    def look(self, workers: Sequence[WorkerView], seen: Seen, now: float) -> list[Change]:
        """Call it every second or so. `workers`: all, those of both roles in each."""
        groups = [Group([v for v in workers if v.revision == name]) for name in sorted({v.revision for v in workers})]
        num_all = sum(group.size for group in groups)
        step = max(CHANGING * num_all, 1.0)
        waits = self._find_waits([view for view in workers if view.is_alive], seen, now)
        demand = {role: max(self._demand[role], 0.0) + min(waits[role], step) for role in ROLES}
        if missing := [change for group in groups if (change := group.find_missing()) is not None]:
            return missing
        if changes := [change for group in groups for change in group.drop_roles(demand)][: int(step)]:
            return changes
        lacking = _find_lacking(demand, sum(len(group.open["prefill"]) for group in groups), num_all)
        short: Role = "prefill" if lacking > 0 else "decode"
        if abs(lacking) <= SLACK * step or (sum(demand.values()) < BUSY * num_all and waits[short] < 1):
            self._short = None
            return []
        if short != self._short:
            self._short, self._short_since = short, now
        if now - self._changed_at < REST_S or now - self._short_since < HOLD_S:
            return []
        changes = list(_move(groups, short, min(int(step), max(int(abs(lacking)), 1))))
        if changes:
            self._changed_at, self._short = now, None
        return changes

    def _find_waits(self, alive: Sequence[WorkerView], seen: Seen, now: float) -> Mapping[Role, float]:
        """Update the demand; returns what waits for each role beside it, in workers."""
        passed_s = 0.0 if self._looked_at is None else now - self._looked_at
        speeds = [view.tokens_per_s for view in alive if view.tokens_per_s]
        speed = sum(speeds) / len(speeds) if speeds else 0.0
        decodes = [view for view in alive if view.role == "decode"]
        places = _find_places(decodes)
        if passed_s:
            kept = exp(-passed_s / MEAN_S)
            placed = (seen.tokens_placed - self._tokens_placed) / passed_s / speed if speed else 0.0
            current: dict[Role, float] = {"prefill": placed, "decode": seen.num_answering / places}
            for role in ROLES:
                self._demand[role] = kept * self._demand[role] + (1 - kept) * current[role]
        self._looked_at, self._tokens_placed = now, seen.tokens_placed
        is_decode_full = all(view.is_full or view.num_running >= places for view in decodes)
        tokens = sum(view.tokens_waiting for view in alive if view.role == "prefill")
        tokens += 0 if is_decode_full else seen.tokens_waiting
        return {
            "prefill": tokens / speed / HORIZON_S if speed else 0.0,
            "decode": max(seen.num_waiting / places, 1.0) if is_decode_full and seen.num_waiting else 0.0,
        }


def _find_places(decodes: Sequence[WorkerView]) -> float:
    """Places of one worker: as many as it says, or as its pages hold of what runs now."""
    most = max((view.max_running for view in decodes), default=1)
    num_used = sum(view.num_pages - view.free_pages for view in decodes)
    num_running = sum(view.num_running for view in decodes)
    if not (num_used and num_running):
        return most
    num_pages = sum(view.num_pages for view in decodes) / len(decodes)
    return min(max(num_pages * num_running / num_used, 1.0), most)


def _find_lacking(demand: Mapping[Role, float], num_prefill: int, num_all: int) -> float:
    """Prefill workers that are too few for the demand; negative: too many."""
    total = demand["prefill"] + demand["decode"]
    if not total or num_all < 3:
        return 0.0
    return min(max(num_all * demand["prefill"] / total, 1.0), num_all - 1.0) - num_prefill


def _move(groups: Sequence[Group], short: Role, count: int) -> Iterator[Change]:
    """So many workers take the role, each of the revision that has least of it for its size."""
    giving: Role = "decode" if short == "prefill" else "prefill"
    for _ in range(count):
        for group in sorted(groups, key=lambda group: len(group.open[short]) / max(group.size, 1)):
            if (name := group.find_giver(giving)) is not None:
                group.open[giving].discard(name)
                group.open[short].add(name)
                yield Change(name, (short,))
                break
