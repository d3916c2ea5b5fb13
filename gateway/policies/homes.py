"""Which workers are a session's home, so that all gateways place its turns alike: the next ones on a ring. Pure.

A worker that comes or goes moves no sessions but its own.
"""

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

from gateway.router.policies import HomeFinder
from gateway.router.worker_view import Role, WorkerView

POINTS = 32  # of a worker: most have within a fifth of their share of sessions
MAX_GONE = 1 << 12  # workers that the ring has although they may be gone


class Homes(HomeFinder):
    """Owns the ring. A worker gets its points when it is first seen."""

    def __init__(self) -> None:
        self._points: list[tuple[bytes, str]] = []  # (hash, incarnation), by hash
        self._names: set[str] = set()  # incarnations

    def find(self, session: str, workers: Sequence[WorkerView]) -> frozenset[str]:
        """Incarnations of the living decode worker and prefill worker that are next behind the session's hash."""
        alive: dict[Role, set[str]] = {}
        for view in workers if session else ():
            if view.is_alive:
                alive.setdefault(view.role, set()).add(view.incarnation)
        self._add(set[str]().union(*alive.values()))
        homes, at = set[str](), bisect_left(self._points, (_hash(session, 1)[0], ""))
        while alive:
            name = self._points[at % len(self._points)][1]
            for role in [role for role, names in alive.items() if name in names]:
                homes.add(name)
                del alive[role]
            at += 1
        return frozenset(homes)

    def _add(self, alive: set[str]) -> None:
        new = alive - self._names
        if not new:
            return
        if len(self._names) > len(alive) + MAX_GONE:
            self._points, self._names, new = [], set(), alive
        self._points += ((point, name) for name in new for point in _hash(name, POINTS))
        self._points.sort()
        self._names |= new


def _hash(name: str, count: int) -> list[bytes]:
    digests = (blake2b(f"{number} {name}".encode()).digest() for number in range(-(-count // 8)))
    return [digest[at : at + 8] for digest in digests for at in range(0, 64, 8)][:count]
