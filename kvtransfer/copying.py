"""Copies of many pages, off the event loop. Knows threads and cancellation, not what is copied."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


async def copy_in_thread(executor: Executor | None, copy: Callable[[], None]) -> None:
    """Run `copy` in a thread of `executor` (None: asyncio's own). Cancelled, it still ends only after the copy.

    A copy in progress cannot be stopped, and the pages that it writes to belong to the caller until then.
    """
    copying = asyncio.get_running_loop().run_in_executor(executor, copy)
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        raise
