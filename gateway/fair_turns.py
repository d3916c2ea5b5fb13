"""Turns at something of which there are few, such as threads: given to keys one after another, not first come first."""

import time
from asyncio import CancelledError, Future, get_running_loop, sleep
from collections import Counter, deque

SHORT_BYTES = 4096  # of a request that is read and checked in 4 ms at most
MOST_TURN_S = 1.0  # at the event loop, which a long request needs for 0.2 s


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


class LoopTurn:
    """A request's turn at the event loop, while it is read and checked: of long requests one has it at a time.

    Between its steps, and after the last, all else has the loop for as long as a step took. So others wait for one
    step, however many long requests there are. Short requests take no turn.
    """

    def __init__(self, turns: FairTurns | None = None, owner: str = "", num_bytes: int = 0) -> None:
        """`turns`: of which there is one; None: as for a short request."""
        self._turns = turns if num_bytes > SHORT_BYTES else None
        self._owner = owner
        self._began_s: float | None = None  # the step, by the thread's CPU time

    async def step(self) -> None:
        """Lets others run, and begins a step: the code that follows."""
        await sleep(0)
        if self._turns is None:
            return
        if self._began_s is None:
            await self._turns.take(self._owner)
            get_running_loop().call_later(MOST_TURN_S, self.end)
        else:
            await sleep(time.thread_time() - self._began_s)
        self._began_s = time.thread_time()

    async def last_step(self) -> None:
        """Lets others run, and begins the last step: the code that follows, up to the next await."""
        await self.step()
        get_running_loop().call_soon(self.end)

    def end(self) -> None:
        """Gives the turn back: no step follows. Idempotent."""
        if self._turns is not None and self._began_s is not None:
            rest_s = time.thread_time() - self._began_s
            get_running_loop().call_later(rest_s, self._turns.give_back, self._owner)
            self._turns = None
