"""Merged streams: nothing lost, nothing left open."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from gateway.answer.merge import MergedStreams
from tests.support.dispatching import bounded


class Sources:
    """Counters that record how each of them ended."""

    def __init__(self) -> None:
        self.taken = 0  # items produced
        self.open = 0

    async def count(
        self, num_items: int, delay_s: float = 0.0, fault: Exception | None = None
    ) -> AsyncGenerator[int, None]:
        self.open += 1
        try:
            for item in range(num_items):
                await asyncio.sleep(delay_s)
                self.taken += 1
                yield item
            if fault is not None:
                raise fault
        finally:
            await asyncio.sleep(0)  # closing awaits, too
            self.open -= 1


async def merge(sources: Sequence[AsyncGenerator[int, None]]) -> AsyncGenerator[tuple[int, int], None]:
    num_open = len(sources)
    async with MergedStreams(sources) as merged:
        while num_open:
            index, item = await merged.next()
            if item is None:
                num_open -= 1
            else:
                yield index, item


@pytest.mark.parametrize("num_sources", [0, 1, 2, 40])
@bounded
async def test_each_source_keeps_its_order_and_loses_nothing(num_sources: int) -> None:
    sources, got = Sources(), [list[int]() for _ in range(num_sources)]
    async for index, item in merge([sources.count(index % 5) for index in range(num_sources)]):
        got[index].append(item)
    assert got == [list(range(index % 5)) for index in range(num_sources)]
    assert sources.open == 0


@bounded
async def test_items_come_as_they_are_ready() -> None:
    is_ready, order = asyncio.Event(), list[int]()

    async def wait() -> AsyncGenerator[int, None]:
        await is_ready.wait()
        yield 0

    async for index, _ in merge([wait(), Sources().count(3)]):
        order.append(index)
        if len(order) == 3:
            is_ready.set()
    assert order == [1, 1, 1, 0]


@bounded
async def test_a_reader_that_stops_holds_up_the_sources() -> None:
    sources = Sources()
    async with aclosing(merge([sources.count(1000), sources.count(1000)])) as items:
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sources.taken <= 5  # from each: one read, one waiting and one in hand
    assert sources.open == 0


@pytest.mark.parametrize("num_sources", [1, 3])
@bounded
async def test_a_fault_comes_after_the_items_before_it_and_closes_the_others(num_sources: int) -> None:
    sources, got, num_tasks = Sources(), list[int](), len(asyncio.all_tasks())
    others = [sources.count(10**6, 0.01) for _ in range(num_sources - 1)]
    with pytest.raises(ValueError, match="boom"):
        async for index, _ in merge([sources.count(3, fault=ValueError("boom")), *others]):
            got.append(index)
    assert got.count(0) == 3
    assert (sources.open, len(asyncio.all_tasks())) == (0, num_tasks)


@pytest.mark.parametrize("num_sources", [1, 3])
@pytest.mark.parametrize("num_read", [0, 4])
@bounded
async def test_closing_and_cancelling_close_the_sources(num_sources: int, num_read: int) -> None:
    sources, num_tasks = Sources(), len(asyncio.all_tasks())

    async def read(limit: int) -> None:
        async with aclosing(merge([sources.count(10**6, 0.001) for _ in range(num_sources)])) as items:
            for _ in range(limit):
                await anext(items)

    await read(num_read)
    assert sources.open == 0
    reader = asyncio.create_task(read(10**6))
    await asyncio.sleep(0.01 if num_read else 0)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert (sources.open, len(asyncio.all_tasks())) == (0, num_tasks)


@bounded
async def test_others_get_their_turn_while_many_begin_and_wait_for_a_busy_reader() -> None:
    turns, seen = 0, list[int]()

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    async for _item in merge([Sources().count(1) for _ in range(40)]):
        if not seen:
            assert turns >= 40
            await asyncio.sleep(0.05)  # all others are ready by now
        seen.append(turns)
    turning.cancel()
    assert len(set(seen)) == 40, "items were read without a turn of the loop between them"
