"""Huge pages for pools that peers map: most systems give them to plain memory alone, unless they are asked for."""

import asyncio
import ctypes
import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from engine.kv.pool import Pool
from wire.huge_pages import HUGE_BYTES

LOOK_S = 1.0  # between looks at which pages were used for the first time: a step does not wait to say so
AT_ONCE = 4 * HUGE_BYTES  # 5 to 15 ms of one core
AHEAD = 64 << 20  # beyond what was used, over all ranks: KV comes 7 times as fast into memory that is cleared
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
NICE = 10  # of the thread: steps go first


class HugePages:
    """The huge pages of one pool's memory file, over all its ranks.

    Pages are first used in their order (worker/prefix_cache.py). Attention reads 4 KiB of a page at a time, so with
    small pages each read misses the TLB: up to 12 % of its time.
    """

    def __init__(self, pool: Pool) -> None:
        self.is_done = False  # all is huge, or the system refuses
        self._pool = pool
        self._rank_bytes = pool.num_pages * pool.page_bytes
        first = pool.address - pool.rank * self._rank_bytes
        self._ranks = [first + rank * self._rank_bytes for rank in range(pool.num_ranks)]  # addresses
        self._ends = [-(-begin // HUGE_BYTES) * HUGE_BYTES for begin in self._ranks]  # huge pages so far
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise

    def collapse(self) -> bool:
        """Makes some huge that are used, or soon will be, while they are read and written. False: none to make now."""
        unused = np.flatnonzero(self._pool.generations == 0)
        num_used = int(unused[0]) if len(unused) else self._pool.num_pages
        wanted = min(num_used * self._pool.page_bytes + AHEAD // len(self._ranks), self._rank_bytes)
        begins = list(self._ends)
        for rank, address in enumerate(self._ranks):
            end = (address + wanted) // HUGE_BYTES * HUGE_BYTES
            self._ends[rank] = max(begins[rank], min(end, begins[rank] + AT_ONCE))
            self._collapse(begins[rank], self._ends[rank])
        is_idle = begins == self._ends
        self.is_done |= is_idle and wanted == self._rank_bytes
        return not (is_idle or self.is_done)

    def _collapse(self, begin: int, end: int) -> None:
        for at in range(begin, end, HUGE_BYTES):
            ctypes.string_at(at, 1)  # where nothing was written or read yet, there is nothing to collapse
        if begin < end and self._madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), COLLAPSE):
            self.is_done |= ctypes.get_errno() == errno.EINVAL  # else there is just none to be had


async def use_huge_pages(pools: Sequence[Pool]) -> None:
    """Asks for huge pages until all memory that can have them has."""
    looked_at = [HugePages(pool) for pool in pools if pool.fd is not None and not pool.gpu_uuid]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "kv-huge", partial(os.nice, NICE)) as executor:
        while looked_at:
            worked = [await loop.run_in_executor(executor, one.collapse) for one in looked_at]
            looked_at = [one for one in looked_at if not one.is_done]
            if not any(worked):
                await asyncio.sleep(LOOK_S)
