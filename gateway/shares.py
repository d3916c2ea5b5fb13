"""How much of a bound that all keys share one of them may use. Pure.

One key may hold at most SHARE times what would then be left free: three quarters of the bound while it is alone, and
less the more others hold, so that a key that comes later always finds room. It needs no list of keys and no timer.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 3


def is_fair(mine: int, total: int, most: int) -> bool:
    """Whether an owner may hold `mine` of a bound `most` when all hold `total`; both with what it asks for."""
    return mine <= SHARE * (most - total)


class Shared:
    """Counts what the owners hold of one bound. Owners are counted apart where there are keys; else "" has it all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._held: Counter[str] = Counter()

    def held_by(self, owner: str) -> int:
        return self._held[owner]

    def has_room(self, owner: str, amount: int = 1) -> bool:
        if self.total + amount > self.most:
            return False
        return not owner or is_fair(self._held[owner] + amount, self.total + amount, self.most)

    def add(self, owner: str, amount: int = 1) -> None:
        """Adds to what the owner holds, also beyond the bound. A negative amount gives back."""
        self.total += amount
        self._held[owner] += amount
        if not self._held[owner]:
            del self._held[owner]

    @contextmanager
    def held(self, owner: str, amount: int = 1) -> Iterator[None]:
        self.add(owner, amount)
        try:
            yield
        finally:
            self.add(owner, -amount)
