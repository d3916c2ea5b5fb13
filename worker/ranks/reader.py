"""Reads pages with all ranks of a worker at once, each its own heads, behind one reader."""

from collections.abc import Sequence

from kvtransfer.reader import PageRef, Reader
from worker.peers.other_ranks import run_all


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
