"""Reads pages with all ranks of a worker at once, each its own heads, behind one reader."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from kvtransfer.reader import PageRef, Reader


class RanksReader:
    """A read ends when all ranks have ended theirs, and fails if any rank's failed. See kvtransfer's Reader."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        """Owns the readers: one per rank, this process's first."""
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
    """Wait until all have ended, whatever their result; raises the failure of the first that failed."""
    failure = find_failure(await asyncio.gather(*work, return_exceptions=True))
    if failure is not None:
        raise failure


def find_failure(results: Sequence[BaseException | None]) -> BaseException | None:
    """Combine the ranks' results: the first failure fails all. Pure."""
    return next((result for result in results if result is not None), None)
