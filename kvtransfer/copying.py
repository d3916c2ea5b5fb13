"""Copies of many pages, off the event loop. Knows threads and cancellation, not what is copied."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


async def copy_in_thread(executor: Executor | None, copy: Callable[[], None]) -> None:
    """Run `copy` in a thread of `executor` (None: asyncio's own). Even if cancelled, return only after the copy.

    A running copy cannot be stopped, and until it ends the caller must own the pages that it writes to.
    """
    copying = asyncio.get_running_loop().run_in_executor(executor, copy)
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        raise
