"""Pages read by all ranks of a worker at once, each its own heads: one reader to whoever takes offers."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from kvtransfer.reader import PageRef, Reader


class RanksReader:
    """A read is over when no rank reads any more, and good only if all were. See kvtransfer's Reader."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        """Owns them: one for each rank, this process' first."""
        self._readers = readers

    @property
    def transport(self) -> str:
        return self._readers[0].transport

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        await run_all([reader.read(sources, into) for reader in self._readers])

    async def probe(self, num_pages: int) -> None:
        await run_all([reader.probe(num_pages) for reader in self._readers])

    def is_gone(self) -> bool:
        return any(reader.is_gone() for reader in self._readers)

    async def close(self) -> None:
        await run_all([reader.close() for reader in self._readers])


async def run_all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Ends when all have ended, however they did; raises what the first of them raised that failed."""
    failure = find_failure(await asyncio.gather(*work, return_exceptions=True))
    if failure is not None:
        raise failure


def find_failure(results: Sequence[BaseException | None]) -> BaseException | None:
    """What of all ranks together comes of what each of them gave: one failure is everybody's. Pure."""
    return next((result for result in results if result is not None), None)
