"""Places that owners share fairly. On the asyncio thread.

An owner may hold all places but one, and those who wait get places in turn: whoever asks for few things waits for few.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import overloaded


class Turns:
    """Hands out places."""

    def __init__(self, num_places: int, max_waiting: int, timeout_s: float, what: str) -> None:
        """`max_waiting`: of one owner; more get 429, as do those that wait for `timeout_s`. `what`: in errors."""
        self._free = num_places
        self._most = max(num_places - 1, 1)
        self._max_waiting, self._timeout_s, self._what = max_waiting, timeout_s, what
        self._held = Counter[str]()
        self._waiting = OrderedDict[str, deque[asyncio.Future[None]]]()  # the next owner first

    @asynccontextmanager
    async def take(self, owner: str) -> AsyncIterator[None]:
        """A place for the length of the context. Raises ApiError 429."""
        await self._wait(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def _wait(self, owner: str) -> None:
        waiting = self._waiting.setdefault(owner, deque())
        if len(waiting) >= self._max_waiting:
            raise overloaded(f"{len(waiting)} {self._what} are waiting; try again in a moment")
        place = asyncio.get_running_loop().create_future()
        waiting.append(place)
        self._hand_out()
        try:
            async with asyncio.timeout(self._timeout_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # it came just now
                self._release(owner)
            elif place in waiting:
                waiting.remove(place)
            if isinstance(error, TimeoutError):
                raise overloaded(f"no time for {self._what} within {self._timeout_s:g} s; try again later") from None
            raise

    def _release(self, owner: str) -> None:
        self._free += 1
        self._held[owner] -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free places to owners in turn."""
        for owner in list(self._waiting):
            waiting = self._waiting[owner]
            while waiting and waiting[0].done():  # cancelled
                waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            elif self._free and self._held[owner] < self._most:
                self._waiting.move_to_end(owner)
                self._free -= 1
                self._held[owner] += 1
                waiting.popleft().set_result(None)
        self._held += Counter()  # forgets owners without places
