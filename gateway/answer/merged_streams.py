"""Several streams read as one. Knows nothing of answers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class MergedStreams(Generic[T]):
    """Items of all streams as they arrive. Leaving the `async with` block closes every stream.

    A single stream is read directly. Several are read by one task each, which waits until its last item is taken.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[T, None]]) -> None:
        self._streams = streams
        self._open = set(range(len(streams)))
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Queue[tuple[int, T | None]] = asyncio.Queue()  # None: the task of that stream has ended
        self._room = [asyncio.Semaphore(1) for _ in streams]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for stream in self._streams:
            await stream.aclose()

    async def next(self) -> tuple[int, T | None]:
        """Returns (index of a stream, its next item; None after its last). Raises what the stream raises."""
        if len(self._streams) == 1:
            return 0, await anext(self._streams[0], None)
        if not self._tasks:
            for index in range(len(self._streams)):
                self._tasks.append(asyncio.create_task(self._pump(index)))
                await asyncio.sleep(0)  # lets other requests run while many streams start
        elif not self._ready.empty():
            await asyncio.sleep(0)  # lets other requests run while many items are ready
        while True:
            index, item = await self._ready.get()
            if index in self._open:
                break
        if item is None:
            self._open.remove(index)
            self._tasks[index].result()
        self._room[index].release()
        return index, item

    async def close(self, index: int) -> None:
        """Closes one stream: `next` returns none of its items any more."""
        self._open.discard(index)
        if self._tasks:
            self._tasks[index].cancel()
            await asyncio.wait([self._tasks[index]])
        await self._streams[index].aclose()

    async def _pump(self, index: int) -> None:
        try:
            async for item in self._streams[index]:
                await self._room[index].acquire()
                self._ready.put_nowait((index, item))
        finally:
            self._ready.put_nowait((index, None))
