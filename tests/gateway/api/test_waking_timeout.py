"""A timeout for peers that excludes the time for which this process itself was stopped."""

import asyncio
import time

import pytest

from gateway.api.access import waking_timeout


def test_it_ends_what_takes_too_long() -> None:
    async def wait() -> None:
        async with waking_timeout(0.05):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


def test_it_leaves_alone_what_ends_in_time() -> None:
    async def wait() -> int:
        async with waking_timeout(0.05):
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)  # past the limit, outside the block
        return len(asyncio.all_tasks())

    assert asyncio.run(wait()) == 1


def test_a_stop_of_this_process_is_nobodys_fault() -> None:
    """On waking both the awaited result and the deadline have arrived."""

    async def wait() -> None:
        news = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with waking_timeout(1.0):
            loop.call_later(0.01, news.set)
            time.sleep(1.5)  # noqa: ASYNC251, as SIGSTOP would
            await news.wait()

    asyncio.run(wait())


def test_a_cancellation_passes() -> None:
    async def wait() -> None:
        async with waking_timeout(10):
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
