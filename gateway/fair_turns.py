"""Turns at something of which there are few, such as threads: given to keys one after another, not first come first."""

from asyncio import CancelledError, Future, get_running_loop
from collections import Counter, deque


class FairTurns:
    """`most` turns at once. Lives on the asyncio thread.

    Of each key those that wait are served in order. One key has at most all turns but one, so that another key's
    request waits for its own only; without keys (owner "") all are given.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[Future[None]]] = {}  # by owner, the next one first

    async def take(self, owner: str) -> None:
        """Waits for a turn. `give_back` must follow, unless it is cancelled."""
        if self._may_run(owner) and not any(map(self._may_run, self._waiting)):
            self._running[owner] += 1
            return
        turn: Future[None] = get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)
            else:
                self._drop(owner, turn)
            raise

    def give_back(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        while (following := next(filter(self._may_run, self._waiting), None)) is not None:
            turn = self._waiting[following][0]
            self._drop(following, turn)
            if following in self._waiting:  # behind the others
                self._waiting[following] = self._waiting.pop(following)
            if not turn.cancelled():
                self._running[following] += 1
                turn.set_result(None)

    def _may_run(self, owner: str) -> bool:
        most_of_one = max(self._most - 1, 1) if owner else self._most
        return self._running.total() < self._most and self._running[owner] < most_of_one

    def _drop(self, owner: str, turn: "Future[None]") -> None:
        if turn in self._waiting.get(owner, ()):
            self._waiting[owner].remove(turn)
            if not self._waiting[owner]:
                del self._waiting[owner]
