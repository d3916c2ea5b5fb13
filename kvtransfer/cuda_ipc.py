"""Reads pages directly from a peer's GPU memory on the same host, over NVLink or PCIe. Nothing runs on the peer.

Decides when copied bytes are valid; PageStore.open_peer makes the CUDA calls. Has not run on a card yet.
"""

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from kvtransfer.copying import copy_in_thread
from kvtransfer.layout import plan_runs
from kvtransfer.memory_file import PeerFile
from kvtransfer.reader import PageRef, PageStore, PeerPages, ReadError, Transport, check_bounds, check_generations
from protos import kv_pb2
from wire.kv_layout import TEST_BYTES, find_test_bytes, page_bytes_of

PIECE_BYTES = 16 << 20  # copied at once: 50 us over NVLink, 0.7 ms over PCIe, beside some 20 us for the wait at its end


class CudaIpcReader:
    """Keeps one incarnation's pool open; as with shm, its generations are in a memory file.

    A peer offers only pages whose step it has collected, so their content is written before a copy starts. The copy is
    complete on the host too when a read returns: steps launched after that see the bytes on any stream.

    The executor's one thread does all CUDA work, so `close` follows a running copy. A dead peer's memory may already
    belong to another process: no copy starts once the peer is known to be dead, and a copy that ends after its death
    is discarded. CUDA leaves open what becomes of a copy whose owner dies meanwhile; so pages are copied in pieces of
    PIECE_BYTES, and the owner must be alive before each. If the reader's context is lost all the same, its process
    ends.
    """

    transport: Transport = "cuda_ipc"

    def __init__(self, peer: kv_pb2.Peer, store: PageStore, executor: Executor) -> None:
        """`executor` has one thread. See `open`."""
        self._peer = peer
        self._store = store
        self._runs = plan_runs(store.parts, store.rank, store.num_ranks, len(peer.ranks))
        self._ranks = sorted({run.rank for run in self._runs})  # those that have bytes for us
        self._files = {rank: PeerFile(peer, page_bytes=0, rank=rank) for rank in self._ranks}
        self._pages: dict[int, PeerPages] = {}  # rank |-> its memory
        self._executor = executor

    @classmethod
    async def open(cls, peer: kv_pb2.Peer, store: PageStore, executor: Executor) -> "CudaIpcReader":
        """Raises ReadError: "transport" if the peer's memory cannot be opened, "layout" if it is not as announced.

        "transport" too if bytes that the peer wrote behind its pages read otherwise here.
        """
        reader = cls(peer, store, executor)
        page_bytes = page_bytes_of(store.parts, 0, len(peer.ranks))

        def open_pages() -> None:
            for rank in reader._ranks:
                reader._pages[rank] = store.open_peer(peer.ranks[rank].gpu.ipc_handle, peer.num_pages, page_bytes)
                reader._check_test_bytes(rank, find_test_bytes(peer.num_pages * page_bytes))

        try:
            await reader._run(open_pages)
        except BaseException:  # also if cancelled, since the open completes anyway
            await reader.close()
            raise
        return reader

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        check_bounds(sources, self._peer.num_pages)
        pages = [source.page for source in sources]
        at_once = max(1, PIECE_BYTES // sum(run.num_bytes for run in self._runs))

        def copy() -> None:
            for first in range(0, len(pages), at_once):
                self._check_alive()
                piece = slice(first, first + at_once)
                for rank, begin, target, num_bytes in self._runs:
                    self._pages[rank].copy(pages[piece], into[piece], begin, target, num_bytes)

        await self._run(copy)
        self._check_alive()
        # After the copy. The owner raises a generation before it launches a write to the page, so a copy that contains
        # a new owner's bytes ended after the generation was raised.
        generations = self._files[self._ranks[0]].generations  # all have the same
        check_generations(sources, [int(generations[source.page]) for source in sources])

    def _check_test_bytes(self, rank: int, begin: int) -> None:
        expected = self._peer.ranks[rank].gpu.test_checksum
        for read in self._pages[rank].load(begin, TEST_BYTES):
            found = zlib.crc32(read.tobytes())
            if found != expected:
                raise ReadError(
                    "transport",
                    f"the GPU memory of process {self._peer.ranks[rank].pid} reads wrong here: its {TEST_BYTES} test "
                    f"bytes have checksum {expected:08x} there, {found:08x} here",
                )

    def _check_alive(self) -> None:
        for rank, file in self._files.items():
            if not file.is_held():
                pid = self._peer.ranks[rank].pid
                raise ReadError("transport", f"the peer's process {pid} is gone, and with it its GPU memory")

    async def probe(self, num_pages: int) -> None:
        def probe() -> None:
            for rank, begin, _target, num_bytes in self._runs:
                self._pages[rank].probe(num_pages, begin, num_bytes)

        await self._run(probe)

    def is_gone(self) -> bool:
        return not all(file.is_held() for file in self._files.values())

    async def close(self) -> None:
        def close() -> None:
            for pages in self._pages.values():
                with suppress(RuntimeError):  # the context is broken: the engine's next step reports it
                    pages.close()

        await copy_in_thread(self._executor, close)

    async def _run(self, work: Callable[[], None]) -> None:
        """Like copy_in_thread; CUDA errors become ReadErrors, or end the process if nothing works after them."""
        try:
            await copy_in_thread(self._executor, work)
        except RuntimeError as error:
            await copy_in_thread(self._executor, self._store.end_if_lost)
            raise ReadError("transport", str(error)) from error
