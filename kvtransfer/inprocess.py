"""Reads pages of a pool in the same process: the simplest Reader, for tests of everything above it."""

from collections.abc import Sequence

from kvtransfer.reader import PageRef, PageStore, Transport, check_bounds, check_generations


class InProcessReader:
    """Copies between two stores."""

    transport: Transport = "inprocess"

    def __init__(self, peer_store: PageStore, store: PageStore) -> None:
        self._peer_store = peer_store
        self._store = store

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        check_bounds(sources, self._peer_store.num_pages)
        rows = self._peer_store.load([source.page for source in sources])
        for row, target in zip(rows, into, strict=True):
            self._store.store(target, row)
        check_generations(sources, [int(self._peer_store.generations[source.page]) for source in sources])

    async def probe(self, num_pages: int) -> None:
        self._peer_store.load(range(num_pages))

    def is_gone(self) -> bool:
        return False

    async def close(self) -> None:
        pass
