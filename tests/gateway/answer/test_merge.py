"""Merged streams: nothing lost, nothing left open. How faults and departures end them: api/test_ends.py."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from gateway.answer.merged_streams import MergedStreams
from tests.support.dispatching import bounded


class Sources:
    """Counters that record how each of them ended."""

    def __init__(self) -> None:
        self.taken = 0  # items produced
        self.open = 0

    async def count(self, num_items: int) -> AsyncGenerator[int, None]:
        self.open += 1
        try:
            for item in range(num_items):
                await asyncio.sleep(0)
                self.taken += 1
                yield item
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
async def test_a_reader_that_stops_holds_up_the_sources() -> None:
    sources = Sources()
    async with aclosing(merge([sources.count(1000), sources.count(1000)])) as items:
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sources.taken <= 5  # from each: one read, one waiting and one in hand
    assert sources.open == 0


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
            for _ in range(100):  # all others are ready after that
                await asyncio.sleep(0)
        seen.append(turns)
    turning.cancel()
    assert len(set(seen)) == 40, "items were read without a turn of the loop between them"
