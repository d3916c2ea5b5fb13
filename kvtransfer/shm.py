"""Transport "shm": reads pages from a peer's memory file on the same host. Nothing runs on the peer."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import hosts_of
from kvtransfer.memory_file import PeerFile
from kvtransfer.reader import Local, PageRef, TransportReader, check_generations
from protos import kv_pb2

SHARED_BYTES = 4 << 20  # from here on two threads copy: one reaches half the rate of memory


class ShmReader(TransportReader):
    """Maps a peer's pool read-only through /proc/PID/fd/FD, and only if it is a memory file that cannot shrink.

    The mapping stays valid after the peer's death and keeps its last content; only the prefill side misses the
    acknowledgement.
    """

    name, why = "shm", "the peer's pool is shared memory on this host"

    @staticmethod
    def advertise(local: Local) -> bytes | None:
        """Nothing to add to Peer.pool_fd and pages_offset."""
        return None if local.store.gpu_uuid or local.store.fd is None else b""

    @staticmethod
    def find_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
        if len(hosts_of(ours) | hosts_of(theirs)) > 1:
            return "the workers share no host and PID namespace"
        if not all(ShmReader.name in rank.transports for rank in theirs.ranks):
            return "the peer's pool is not shared memory"
        return None

    def __init__(self, local: Local, peer: kv_pb2.Peer) -> None:
        super().__init__(local, peer)
        num_ranks = len(peer.ranks)
        self._file = PeerFile(peer, num_ranks * self._page_bytes)
        self._generations = self._file.generations
        self._pages: NDArray[np.uint8] = np.frombuffer(self._file.memory, np.uint8, offset=peer.pages_offset).reshape(
            num_ranks, peer.num_pages, self._page_bytes
        )

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        self._check_bounds(sources)

        def copy(part: slice) -> None:
            for rank, begin, target, num_bytes in self._runs:
                theirs = self._pages[rank, :, begin : begin + num_bytes]
                self._store.store(into[part], [theirs[source.page] for source in sources[part]], target)

        is_long = not self._store.gpu_uuid and len(sources) * self._store.page_bytes >= SHARED_BYTES
        threads = 2 if is_long else 1
        await self._copy(*(partial(copy, slice(i, None, threads)) for i in range(threads)))
        # The generations must be read after the bytes. A weakly ordered CPU (ARM, POWER) does not guarantee that for
        # two reads of one thread. Here they are reads of two threads: the copying thread ends with a release (it passes
        # its result under a lock) and this one begins with an acquire (it takes that result), so all reads of the copy
        # come first. A copy that contains a new owner's byte therefore implies the generation written before that byte.
        check_generations(sources, [int(self._generations[source.page]) for source in sources])

    async def probe(self, num_pages: int) -> None:
        scratch = np.empty(self._store.page_bytes, np.uint8)

        def copy() -> None:
            for rank, begin, target, num_bytes in self._runs:
                for page in self._pages[rank, :num_pages, begin : begin + num_bytes]:
                    np.copyto(scratch[target : target + num_bytes], page)

        await self._copy(copy)

    def is_gone(self) -> bool:
        return not self._file.is_held()

    async def close(self) -> None:
        held = [self._file, self._pages, self._generations]
        del self._file, self._pages, self._generations
        await asyncio.to_thread(held.clear)  # the last holder of a pool frees it: 0.5 s per GiB (measured)
