"""Counts what clients make the gateway hold: bytes of bodies that are under way and of answers that are not read yet.

All of it together is bounded. When there is no room, the holder that has been idle longest gives way; if none is idle,
more bodies are refused. Lives on the asyncio thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import structlog

from gateway.errors import overloaded
from gateway.shares import Shared

_log = structlog.get_logger()

MAX_HELD_BYTES = 256 << 20
IDLE_S = 1.0  # without progress: a client that sends or reads is faster
WARN_S = 10.0  # between two warnings


class Holder:
    """One body or one answer, whose bytes are held."""

    def __init__(self, owner: str, give_way: Callable[[], None]) -> None:
        """`owner`: as in Shared. `give_way`: ends it; called once at most."""
        self.owner = owner
        self.give_way = give_way
        self.num_bytes = 0
        self.moved_s = 0.0


class Held:
    """Counts the bytes of all holders."""

    def __init__(self, most: int = MAX_HELD_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes = Shared(most)
        self.num_gave_way = 0
        self._holders: dict[Holder, None] = {}  # the one that moved longest ago first
        self._clock = clock
        self._warned_s = -WARN_S

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """The holder has made progress and has so many bytes. Raises ApiError 429 if no other can make room."""
        grown, now = num_bytes - holder.num_bytes, self._clock()
        self._holders.pop(holder, None)
        self._holders[holder] = None
        holder.num_bytes, holder.moved_s = num_bytes, now
        self.bytes.add(holder.owner, grown)
        while grown > 0 and not self.bytes.has_room(holder.owner, 0):
            if (idle := self._find_idle(holder, now)) is None:
                raise overloaded("clients send and read too much at once; try again in a moment")
            self.end(idle)
            self.num_gave_way += 1
            if now - self._warned_s >= WARN_S:
                self._warned_s = now
                _log.warning("clients hold too much: the oldest idle gives way", bytes=self.bytes.total)
            idle.give_way()

    @asynccontextmanager
    async def body(self, owner: str) -> AsyncIterator[Callable[[int], None]]:
        """Counts a body; yields what to call with its number of bytes. Raises ApiError 429, also if it gives way."""
        try:
            async with asyncio.timeout(None) as limit:
                holder = Holder(owner, lambda: limit.reschedule(asyncio.get_running_loop().time()))
                try:
                    yield partial(self.hold, holder)
                finally:
                    self.end(holder)
        except TimeoutError as error:
            why = "the body came slowly while clients sent too much at once; send it again in a moment"
            raise overloaded(why) from error

    def end(self, holder: Holder) -> None:
        """Counts the holder no more. Idempotent."""
        if holder in self._holders:
            del self._holders[holder]
            self.bytes.add(holder.owner, -holder.num_bytes)
            holder.num_bytes = 0

    def _find_idle(self, holder: Holder, now: float) -> Holder | None:
        """Any for one without a key; else one of the same key, which has more than its share, or one without."""
        for one in self._holders:
            if now - one.moved_s < IDLE_S:
                return None
            if one is not holder and ("" in (holder.owner, one.owner) or one.owner == holder.owner):
                return one
        return None
