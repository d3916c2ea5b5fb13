"""Pools that peers map get huge pages where their pages were used, and nobody who uses them notices."""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kv.memory import create_file
from engine.kv.pool import Pool, PoolShape, PoolShare
from kvtransfer.reader import PageRef
from kvtransfer.shm import ShmReader
from tests.support.pool_process import build_local, describe
from wire.huge_pages import HUGE_BYTES, map_file
from wire.kv_layout import KvPart
from worker.peers import huge_pages
from worker.peers.huge_pages import COLLAPSE, HugePages

NUM_PAGES, PAGE_BYTES = 40, 256 << 10  # of a rank: 10 MiB
SHAPE = PoolShape(NUM_PAGES, (KvPart(2, 8, 128),), 16, torch.float32)


def count_huge(pool: Pool) -> int:
    """Bytes of the pool's mapping that are in huge pages."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= pool.address < end
        elif inside and first == "ShmemPmdMapped:":
            found += int(rest[0]) << 10
    return found


def count_bytes(pool: Pool) -> int:
    """Bytes of its file that take memory."""
    return Path(f"/proc/self/fd/{pool.fd}").stat().st_blocks * 512


def is_refused() -> bool:
    """This system gives shared memory no huge pages, even if it is asked: an old one, or a forbidding setting."""
    fd = create_file()
    os.ftruncate(fd, HUGE_BYTES)
    memory = np.frombuffer(map_file(fd, HUGE_BYTES), np.uint8)
    memory.fill(1)
    system = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(memory.ctypes.data)
    refused = system.madvise(address, ctypes.c_size_t(HUGE_BYTES), COLLAPSE) and ctypes.get_errno() == errno.EINVAL
    os.close(fd)
    return bool(refused)


def use(pool: Pool, pages: Sequence[int], number: int = 1) -> None:
    for page in pages:
        pool.generations[page] = number
        pool.store([page], [content(page, number)])


def content(page: int, number: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng([page, number]).integers(0, 256, PAGE_BYTES, np.uint8)


def run_to_end(huge: HugePages) -> None:
    while huge.collapse():
        pass


async def test_used_pages_become_huge_and_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For their owner, and for a peer that reads them."""
    monkeypatch.setattr(huge_pages, "AHEAD", 0)
    pool, into = Pool(SHAPE), Pool(SHAPE)
    assert pool.page_bytes == PAGE_BYTES and pool.fd is not None
    reader = ShmReader(build_local(into, "reader"), describe(build_local(pool)))
    huge, used = HugePages(pool), range(20)
    assert not huge.collapse() and not huge.is_done and count_bytes(pool) <= pool.pages_offset
    use(pool, used)
    run_to_end(huge)
    assert count_bytes(pool) <= 20 * PAGE_BYTES + pool.pages_offset, "what was not used takes no memory"
    assert [pool.load([page]).tobytes() for page in used] == [content(page).tobytes() for page in used]
    await reader.read([PageRef(page, 1) for page in used], list(used))
    assert (into.load(used) == pool.load(used)).all()
    use(pool, range(NUM_PAGES), 2)
    run_to_end(huge)
    await reader.read([PageRef(page, 2) for page in range(NUM_PAGES)], list(range(NUM_PAGES)))
    assert (into.load(range(NUM_PAGES)) == [content(page, 2) for page in range(NUM_PAGES)]).all()
    assert huge.is_done and (is_refused() or count_huge(pool) >= NUM_PAGES * PAGE_BYTES - 2 * HUGE_BYTES)
    await reader.close()


def test_memory_is_there_before_it_is_used_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "AHEAD", 2 * HUGE_BYTES)
    pool = Pool(SHAPE)
    huge = HugePages(pool)
    run_to_end(huge)
    assert is_refused() or (HUGE_BYTES <= count_bytes(pool) <= 2 * HUGE_BYTES and not huge.is_done)
    assert not pool.load(range(NUM_PAGES)).any()


def test_rank_0_asks_for_all_ranks() -> None:
    fd, pools = create_file(), list[Pool]()
    for rank in range(2):
        pools.append(Pool(SHAPE, share=PoolShare(rank, 2, SHAPE.page_parts(SHAPE.parts), fd, lambda: None)))
    for pool in pools:
        use(pool, range(NUM_PAGES))
    huge = HugePages(pools[0])
    run_to_end(huge)
    assert huge.is_done and (is_refused() or count_huge(pools[0]) >= 2 * NUM_PAGES * PAGE_BYTES - 4 * HUGE_BYTES)
    assert (pools[1].load(range(NUM_PAGES)) == [content(page) for page in range(NUM_PAGES)]).all()


@pytest.mark.parametrize(("number", "most"), [(errno.EAGAIN, 2), (errno.EINVAL, 1)])
def test_a_system_that_refuses_is_not_asked_for_the_rest(
    number: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a huge page that cannot be had now the next ones are asked for all the same."""
    monkeypatch.setattr(huge_pages, "AT_ONCE", 2 * HUGE_BYTES)
    pool = Pool(SHAPE)
    huge, asked = HugePages(pool), list[int]()

    def refuse(*parts: object) -> int:
        asked.append(1)
        return -1

    monkeypatch.setattr(huge, "_madvise", refuse)
    monkeypatch.setattr("ctypes.get_errno", lambda: number)
    run_to_end(huge)
    assert len(asked) == most and huge.is_done
