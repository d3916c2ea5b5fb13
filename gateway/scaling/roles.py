"""Which roles workers of both take, by load. Pure.

    demand of prefill = tokens placed a second / what a worker computes a second    [workers]
    demand of decode  = answers that are under way / places of a worker             [workers]
    each + what waits for it, as if it were to be done within HORIZON_S, up to one worker

The workers are divided like the demand. What keeps that calm: demand is averaged over MEAN_S; one worker changes at a
time, if the division is off by more than SLACK of one for HOLD_S, and REST_S after the last change; nothing changes
while most is idle. There is always one of each role, if need be by a worker that takes both.
"""

from collections.abc import Mapping, Sequence
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


class Seen(NamedTuple):
    """Counts of this gateway: the work done so far, and what waits."""

    tokens_placed: float  # since its start: tokens of prompts that workers had to compute
    num_answering: int  # requests whose prompt is computed
    tokens_waiting: int  # of the prompts in the queue
    num_waiting: int  # requests there


class Change(NamedTuple):
    """The roles that one worker is to take."""

    incarnation: str
    roles: tuple[Role, ...]


@dataclass(slots=True)
class RoleBalance:
    """The demand so far, and when roles last changed."""

    _demand: dict[Role, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    _tokens_placed: float = 0.0
    _looked_at: float | None = None
    _short: Role | None = None  # which role has too few
    _short_since: float = 0.0
    _changed_at: float = -REST_S

    def look(self, workers: Sequence[WorkerView], seen: Seen, now: float) -> Change | None:
        """Call it every second or so. `workers`: all, those of both roles in each."""
        alive = [view for view in workers if view.is_alive]
        demand = self._find_demand(alive, seen, now)
        able = _find_able(workers)
        open_roles = {role: {view.incarnation for view in alive if view.role == role} for role in ROLES}
        if (change := _find_missing(able, open_roles) or _find_double(able, open_roles, demand)) is not None:
            return change
        num_all = len(open_roles["prefill"] | open_roles["decode"])
        short = _find_short(demand, len(open_roles["prefill"]), num_all)
        if short != self._short:
            self._short, self._short_since = short, now
        if short is None or now - self._changed_at < REST_S or now - self._short_since < HOLD_S:
            return None
        giver: Role = "decode" if short == "prefill" else "prefill"
        givers = [views[giver] for name, views in able.items() if name in open_roles[giver]]
        if not givers or len(open_roles[giver]) == 1:
            return None
        least = min(givers, key=lambda view: (view.num_running, view.tokens_waiting))
        self._changed_at, self._short = now, None
        return Change(least.incarnation, (short,))

    def _find_demand(self, alive: Sequence[WorkerView], seen: Seen, now: float) -> Mapping[Role, float]:
        """The demand for each role in workers, with what waits."""
        passed_s = 0.0 if self._looked_at is None else now - self._looked_at
        speeds = [view.tokens_per_s for view in alive if view.tokens_per_s]
        speed = sum(speeds) / len(speeds) if speeds else 0.0
        decodes = [view for view in alive if view.role == "decode"]
        places = max((view.max_running for view in decodes), default=1)
        if passed_s:
            kept = exp(-passed_s / MEAN_S)
            placed = (seen.tokens_placed - self._tokens_placed) / passed_s / speed if speed else 0.0
            current: dict[Role, float] = {"prefill": placed, "decode": seen.num_answering / places}
            for role in ROLES:
                self._demand[role] = kept * self._demand[role] + (1 - kept) * current[role]
        self._looked_at, self._tokens_placed = now, seen.tokens_placed
        is_decode_full = all(view.is_full or view.num_running >= view.max_running for view in decodes)
        tokens = sum(view.tokens_waiting for view in alive if view.role == "prefill")
        tokens += 0 if is_decode_full else seen.tokens_waiting
        waits: dict[Role, float] = {
            "prefill": tokens / speed / HORIZON_S if speed else 0.0,
            "decode": seen.num_waiting / places if is_decode_full else 0.0,
        }
        return {role: self._demand[role] + min(waits[role], 1.0) for role in ROLES}


def _find_able(workers: Sequence[WorkerView]) -> dict[str, dict[Role, WorkerView]]:
    """Workers of both roles that are well: incarnation |-> its views."""
    found: dict[str, dict[Role, WorkerView]] = {}
    for view in workers:
        if view.incarnation:
            found.setdefault(view.incarnation, {})[view.role] = view
    return {name: views for name, views in found.items() if len(views) == 2 and any(v.is_alive for v in views.values())}


def _find_missing(able: Mapping[str, Mapping[Role, WorkerView]], open_roles: Mapping[Role, set[str]]) -> Change | None:
    """A role that no worker takes is taken by the one with least to do, beside its own."""
    for role in ROLES:
        if not open_roles[role] and able:
            return Change(min(able, key=lambda name: max(view.num_running for view in able[name].values())), ROLES)
    return None


def _find_double(
    able: Mapping[str, Mapping[Role, WorkerView]], open_roles: Mapping[Role, set[str]], demand: Mapping[Role, float]
) -> Change | None:
    """A worker that takes both while others take one of these is left with the role of which more is needed."""
    for name in able:
        if all(name in open_roles[role] for role in ROLES):
            spare = [role for role in ROLES if len(open_roles[role]) > 1]
            if spare:
                dropped = min(spare, key=lambda role: demand[role] / len(open_roles[role]))
                return Change(name, tuple(role for role in ROLES if role != dropped))
    return None


def _find_short(demand: Mapping[Role, float], num_prefill: int, num_all: int) -> Role | None:
    """The role of which there are too few workers; None if the division is right, or nobody waits."""
    total = demand["prefill"] + demand["decode"]
    if total < BUSY * num_all or num_all < 3:
        return None
    wanted = min(max(num_all * demand["prefill"] / total, 1.0), num_all - 1.0)
    if wanted > num_prefill + SLACK:
        return "prefill"
    return "decode" if wanted < num_prefill - SLACK else None
