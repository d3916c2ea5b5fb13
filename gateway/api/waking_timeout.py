"""A timeout for clients that hardly counts time in which this process was stopped. Knows only the event loop."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SLICES = 10


@asynccontextmanager
async def waking_timeout(seconds: float) -> AsyncIterator[None]:
    """Like asyncio.timeout, but a stop of this process counts as a tenth of the limit at most.

    A plain deadline would blame the client for our pause. Raises TimeoutError at the end of the block.
    """
    loop = asyncio.get_running_loop()
    slices = itertools.count(1)
    timers: list[asyncio.TimerHandle] = []  # the running one

    def begin_slice() -> None:
        timers[:] = [loop.call_later(seconds / _SLICES, end_slice)]

    def end_slice() -> None:
        if next(slices) < _SLICES:
            begin_slice()
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        begin_slice()
        try:
            yield
        finally:
            timers[0].cancel()
