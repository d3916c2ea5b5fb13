"""Work that lasts as long as a process, and is begun again where it fails."""

import asyncio
import ctypes
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime import tasks
from runtime.lifecycle import return_freed_memory
from runtime.tasks import keep_running, run_to_end


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)


async def test_work_begins_again_whatever_ends_it_and_a_bug_is_logged_once() -> None:
    failures: list[BaseException] = [ValueError("a"), ValueError("a"), asyncio.CancelledError(), ValueError("b")]
    bugs: list[BaseException] = []

    async def work() -> None:
        await asyncio.sleep(0)
        if len(bugs) < len(failures):
            raise failures[len(bugs)]

    with capture_logs() as logs:
        await keep_running(work, "some work", bugs.append, address="x")
    assert bugs == failures
    assert [(one["event"], one["address"]) for one in logs] == [("some work failed and is begun again", "x")] * 3


async def test_work_ends_when_it_is_cancelled() -> None:
    task = asyncio.create_task(keep_running(lambda: asyncio.sleep(1000), "some work"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_nobody_waits_for_is_not_collected() -> None:
    waiting: list[weakref.ref[asyncio.Future[int]]] = []

    async def work() -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting.append(weakref.ref(future))
        return await future

    done = list[int]()
    run_to_end(work()).add_done_callback(lambda task: done.append(task.result()))
    await asyncio.sleep(0)
    gc.collect()
    future = waiting[0]()
    assert future is not None
    future.set_result(7)
    while not done:  # noqa: ASYNC110, no event for it
        await asyncio.sleep(0)
    assert done == [7]


needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")


def read_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


async def returned(holds: Callable[[], bool]) -> None:
    """Until this holds, while memory is given back."""
    task = asyncio.create_task(return_freed_memory(0.0))
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.wait({task}, timeout=0.01)
    task.cancel()


@needs_glibc
async def test_freed_memory_is_given_back_though_other_blocks_are_in_use() -> None:
    blocks = [bytes(100_000) for _ in range(2000)]  # less than glibc maps apart
    kept = blocks[::50]
    before = read_mib()
    del blocks
    await returned(lambda: before - read_mib() >= 100)
    assert len(kept) == 40


@needs_glibc
async def test_a_thread_does_not_keep_what_it_freed() -> None:
    """Without a threshold of its own, glibc would keep twice the largest block at the end of the thread's arena."""
    with ThreadPoolExecutor(1) as thread:
        await returned(lambda: True)
        await asyncio.wrap_future(thread.submit(lambda: len(b"x" * (30 << 20))))
        before = read_mib()
        blocks = await asyncio.wrap_future(thread.submit(lambda: [b"x" * 100_000 for _ in range(2000)]))
        assert read_mib() - before > 100  # of 191: holes that this process has are filled first
        await asyncio.wrap_future(thread.submit(blocks.clear))
        await returned(lambda: read_mib() - before < 30)


async def test_cycles_are_collected_though_nothing_is_allocated() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    gone = weakref.ref(Cycle())
    gc.disable()
    try:
        await returned(lambda: gone() is None)
    finally:
        gc.enable()
