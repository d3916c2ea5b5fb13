"""Long prompts on threads: keys take turns, and work stops with its request."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from gateway.errors import ApiError
from gateway.text.offload import CHEAP_CHARS, MAX_WAITING, THREADS, Check, Offload

LONG = CHEAP_CHARS + 1
WAIT_S = 60.0


@pytest.fixture
def offload() -> Iterator[Offload]:
    offload = Offload()
    yield offload
    offload.close()


async def test_a_key_with_much_work_holds_up_no_other(offload: Offload) -> None:
    may_end = threading.Event()
    many = [asyncio.create_task(offload.run(LONG, lambda _: may_end.wait(), "one")) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(offload.run(LONG, lambda _: 5, "other"), WAIT_S) == 5
    may_end.set()
    await asyncio.gather(*many)


async def test_a_key_has_a_share_of_what_may_wait(offload: Offload) -> None:
    may_end = threading.Event()
    many = [asyncio.create_task(offload.run(LONG, lambda _: may_end.wait(), "one")) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0.05)
    refused = [task for task in many if task.done() and isinstance(task.exception(), ApiError)]
    assert len(refused) == MAX_WAITING // 4
    other = asyncio.create_task(offload.run(LONG, lambda _: 6, "other"))
    may_end.set()
    assert await other == 6
    await asyncio.gather(*many, return_exceptions=True)


async def test_work_stops_with_its_request(offload: Offload) -> None:
    began, ended = threading.Semaphore(0), threading.Semaphore(0)

    def work(check: Check) -> None:
        began.release()
        try:
            while True:
                check()
                time.sleep(0.001)
        finally:
            ended.release()

    tasks = [asyncio.create_task(offload.run(LONG, work)) for _ in range(THREADS)]
    for _ in tasks:
        assert await asyncio.to_thread(began.acquire, timeout=WAIT_S)
    for task in tasks:
        task.cancel()
    for _ in tasks:
        assert await asyncio.to_thread(ended.acquire, timeout=WAIT_S)
    assert await offload.run(LONG, lambda _: 7) == 7


async def test_a_thread_counts_until_it_is_free(offload: Offload) -> None:
    """Work that cannot stop holds its key's turn, not that of the others."""
    began, may_end = threading.Semaphore(0), threading.Event()

    def work(_: Check) -> None:
        began.release()
        may_end.wait()

    stuck = [asyncio.create_task(offload.run(LONG, work, "one")) for _ in range(THREADS)]
    for _ in range(THREADS - 1):  # one key's share
        assert await asyncio.to_thread(began.acquire, timeout=WAIT_S)
    for task in stuck:
        task.cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(offload.run(LONG, lambda _: 8, "one"), 0.1)
    assert await offload.run(LONG, lambda _: 9, "other") == 9
    may_end.set()
    assert await asyncio.wait_for(offload.run(LONG, lambda _: 8, "one"), WAIT_S) == 8
