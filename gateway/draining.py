"""The ring while the gateway is told to stop: nothing new goes in, what is in comes out, within a bound.

Knows generations; must not know HTTP, gRPC, workers or why the gateway stops. Lives on the asyncio thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from gateway.errors import not_ready
from gateway.generation import Generation, Ring, SharedPrompt, Tokens

DRAINING = "the gateway is draining: it is about to stop and takes no new requests"
CUT_OFF = "the gateway stopped before the answer was complete; try again"


@dataclass(slots=True, eq=False)
class _Guest:
    """One generation under way."""

    task: asyncio.Task[None] | None  # that iterates over it
    is_waiting: bool = False  # for news of the ring, and not for its client
    is_cut_off: bool = False


class DrainingRing:
    """A Ring in front of another: counts what is under way, and refuses new requests once the gateway drains."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._guests: set[_Guest] = set()
        self.is_draining: Callable[[], bool] = lambda: False  # set by who knows
        self.on_empty: Callable[[], None] = lambda: None  # called when the last generation is over

    def __len__(self) -> int:
        return len(self._guests)

    def check_ready(self) -> str | None:
        return DRAINING if self.is_draining() else self._ring.check_ready()

    async def generate(
        self, generation: Generation, shared: SharedPrompt | None = None
    ) -> AsyncGenerator[Tokens, None]:
        if self.is_draining():
            raise not_ready(DRAINING)
        guest = _Guest(cast("asyncio.Task[None] | None", asyncio.current_task()))
        self._guests.add(guest)
        try:
            async with aclosing(cast(AsyncGenerator[Tokens, None], self._ring.generate(generation, shared))) as news:
                while (tokens := await _next(guest, news)) is not None:
                    yield tokens
        finally:
            self._guests.remove(guest)
            if not self._guests:
                self.on_empty()

    def cut_off(self) -> None:
        """End what is still under way with a 503 that says why."""
        for guest in self._guests:
            guest.is_cut_off = True
            if guest.is_waiting and guest.task is not None:
                guest.task.cancel()


async def _next(guest: _Guest, news: AsyncGenerator[Tokens, None]) -> Tokens | None:
    """The next news, None after the last. Raises ApiError when cut off."""
    if guest.is_cut_off:
        raise not_ready(CUT_OFF)
    guest.is_waiting = True
    try:
        return await anext(news, None)
    except asyncio.CancelledError:
        if guest.is_cut_off and guest.task is not None and not guest.task.uncancel():  # else its client left as well
            raise not_ready(CUT_OFF) from None
        raise
    finally:
        guest.is_waiting = False
