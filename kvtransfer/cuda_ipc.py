"""Transport "cuda_ipc": reads pages from a peer's GPU memory on the same host, over NVLink or PCIe.

Nothing runs on the peer. Decides when copied bytes are valid; PageStore.open_peer makes the CUDA calls. Has not run on
a GPU yet.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtransfer.layout import hosts_of
from kvtransfer.memory_file import PeerFile
from kvtransfer.reader import Advert, Local, PageRef, PeerPages, ReadError, TransportReader, check_generations
from protos import kv_pb2
from wire.kv_layout import TEST_BYTES, find_test_bytes

PIECE_BYTES = 16 << 20  # copied at once: 50 us over NVLink, 0.7 ms over PCIe, beside some 20 us for the wait at its end


class GpuMemory(Advert, frozen=True):
    """A pool's GPU."""

    uuid: str  # the driver's identifier
    readable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can read: itself, and visible ones with peer access
    handle: bytes  # cudaIpcGetMemHandle of the allocation that begins with the first page; empty if it has none
    test_checksum: int = 0  # CRC-32 of the TEST_BYTES random bytes behind the last page: peers that open it check them


class CudaIpcReader(TransportReader):
    """Keeps one incarnation's pool open; as with shm, its generations are in a memory file.

    A peer offers only pages whose step it has collected, so their content is written before a copy starts. The copy is
    complete on the host too when a read returns: steps launched after that see the bytes on any stream.

    The executor's one thread does all CUDA work, so `close` follows a running copy. A dead peer's memory may already
    belong to another process: no copy starts once the peer is known to be dead, and a copy that ends after its death
    is discarded. CUDA leaves open what becomes of a copy whose owner dies meanwhile; so pages are copied in pieces of
    PIECE_BYTES, and the owner must be alive before each. If the reader's context is lost all the same, its process
    ends.
    """

    name, why = "cuda_ipc", "the peer's GPU memory can be opened on this host"

    @staticmethod
    def advertise(local: Local) -> bytes | None:
        store = local.store
        memory = GpuMemory(store.gpu_uuid, store.readable_gpus, store.ipc_handle, store.test_checksum)
        return memory.pack() if store.gpu_uuid else None

    @staticmethod
    def find_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
        here, there = ([GpuMemory.read(rank, CudaIpcReader.name) for rank in peer.ranks] for peer in (ours, theirs))
        if not any(here):
            return "this worker's pool is not on a GPU"
        if not any(there):
            return "the peer's pool is not on a GPU"
        if len(hosts_of(ours) | hosts_of(theirs)) > 1:
            return "the workers share no host and PID namespace"
        if ours.pid == theirs.pid:
            return "the workers are one process, which cannot open its own handles"
        for their in there:
            if their is None or not their.handle or not theirs.HasField("pool_fd"):
                return "the peer gives no handle of its GPU memory"
            for our in here:
                if our is None or their.uuid not in our.readable:
                    pair = f"GPU {our.uuid if our else ''} has no peer access to the peer's {their.uuid}"
                    return f"{pair}, or this process cannot see it"
        return None

    def __init__(self, local: Local, peer: kv_pb2.Peer) -> None:
        super().__init__(local, peer)
        ranks = sorted({run.rank for run in self._runs})  # those that have bytes for us
        self._files = {rank: PeerFile(peer, page_bytes=0, rank=rank) for rank in ranks}
        self._pages: dict[int, PeerPages] = {}  # rank |-> its memory

    async def _connect(self, local: Local) -> None:
        await self._run(self._open_pages)

    def _open_pages(self) -> None:
        num_pages, page_bytes = self._peer.num_pages, self._page_bytes
        for rank in self._files:
            memory = GpuMemory.read(self._peer.ranks[rank], self.name)
            if memory is None:
                raise ReadError("layout", f"rank {rank} of the peer has no GPU memory")
            self._pages[rank] = pages = self._store.open_peer(memory.handle, num_pages, page_bytes)
            for read in pages.load(find_test_bytes(num_pages * page_bytes), TEST_BYTES):
                found = zlib.crc32(read.tobytes())
                if found != memory.test_checksum:
                    raise ReadError(
                        "transport",
                        f"the GPU memory of process {self._peer.ranks[rank].pid} reads wrong here: its {TEST_BYTES} "
                        f"test bytes have checksum {memory.test_checksum:08x} there, {found:08x} here",
                    )

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        self._check_bounds(sources)
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
        generations = next(iter(self._files.values())).generations  # all ranks have the same
        check_generations(sources, [int(generations[page]) for page in pages])

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

        await self._copy(close)

    async def _run(self, work: Callable[[], None]) -> None:
        """Like `_copy`; CUDA errors become ReadErrors, or end the process if nothing works after them."""
        try:
            await self._copy(work)
        except RuntimeError as error:
            await self._copy(self._store.end_if_lost)
            raise ReadError("transport", str(error)) from error
