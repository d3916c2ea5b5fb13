"""Work that lasts as long as a process, and is begun again where it fails."""

import asyncio
import ctypes
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime import tasks
from runtime.lifecycle import return_freed_memory
from runtime.tasks import keep_running


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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
async def test_freed_memory_is_given_back_though_other_blocks_are_in_use() -> None:
    def read_mib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

    blocks = [bytes(100_000) for _ in range(2000)]  # less than glibc maps apart
    kept = blocks[::50]
    before = read_mib()
    del blocks
    task = asyncio.create_task(return_freed_memory(0.0))
    async with asyncio.timeout(60):
        while before - read_mib() < 100:
            await asyncio.wait({task}, timeout=0.01)
    task.cancel()
    assert len(kept) == 40
