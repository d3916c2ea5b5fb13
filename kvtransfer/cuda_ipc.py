"""Transport "cuda_ipc": reads pages from a peer's GPU memory on the same host, over NVLink or PCIe.

Nothing runs on the peer. Decides when copied bytes are valid; PageStore.open_peer makes the CUDA calls. Has not run on
a card yet.
"""

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

import msgspec

from kvtransfer.memory_file import PeerFile
from kvtransfer.reader import (
    Local,
    PageRef,
    PageStore,
    PeerPages,
    PeerReader,
    ReadError,
    Transport,
    check_generations,
    copy_in_thread,
    read_advert,
)
from protos import kv_pb2
from wire.kv_layout import TEST_BYTES, find_test_bytes

PIECE_BYTES = 16 << 20  # copied at once: 50 us over NVLink, 0.7 ms over PCIe, beside some 20 us for the wait at its end


class GpuMemory(msgspec.Struct, frozen=True):
    """A rank's entry in Rank.transports: its pool's GPU."""

    uuid: str  # the driver's identifier
    readable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can read: itself, and visible ones with peer access
    handle: bytes  # cudaIpcGetMemHandle of the allocation that begins with the first page; empty if it has none
    test_checksum: int = 0  # CRC-32 of the TEST_BYTES random bytes behind the last page: peers that open it check them


class CudaIpcReader(PeerReader):
    """Keeps one incarnation's pool open; as with shm, its generations are in a memory file.

    A peer offers only pages whose step it has collected, so their content is written before a copy starts. The copy is
    complete on the host too when a read returns: steps launched after that see the bytes on any stream.

    The executor's one thread does all CUDA work, so `close` follows a running copy. A dead peer's memory may already
    belong to another process: no copy starts once the peer is known to be dead, and a copy that ends after its death
    is discarded. CUDA leaves open what becomes of a copy whose owner dies meanwhile; so pages are copied in pieces of
    PIECE_BYTES, and the owner must be alive before each. If the reader's context is lost all the same, its process
    ends.
    """

    transport = "cuda_ipc"

    def __init__(self, peer: kv_pb2.Peer, store: PageStore, executor: Executor) -> None:
        """`executor` has one thread. See `open`."""
        super().__init__(peer, store)
        self._executor = executor
        ranks = sorted({run.rank for run in self._runs})  # those that have bytes for us
        self._files = {rank: PeerFile(peer, page_bytes=0, rank=rank) for rank in ranks}
        self._pages: dict[int, PeerPages] = {}  # rank |-> its memory

    @classmethod
    async def open(cls, peer: kv_pb2.Peer, store: PageStore, executor: Executor) -> "CudaIpcReader":
        """Raises ReadError: "transport" if the peer's memory cannot be opened, "layout" if it is not as announced.

        "transport" too if bytes that the peer wrote behind its pages read otherwise here.
        """
        reader = cls(peer, store, executor)
        try:
            await reader._run(reader._open_pages)
        except BaseException:  # also if cancelled, since the open completes anyway
            await reader.close()
            raise
        return reader

    def _open_pages(self) -> None:
        num_pages, page_bytes = self._peer.num_pages, self._page_bytes
        for rank in self._files:
            memory = read_advert(self._peer.ranks[rank], self.transport, GpuMemory)
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

        await copy_in_thread(self._executor, close)

    async def _run(self, work: Callable[[], None]) -> None:
        """Like copy_in_thread; CUDA errors become ReadErrors, or end the process if nothing works after them."""
        try:
            await copy_in_thread(self._executor, work)
        except RuntimeError as error:
            await copy_in_thread(self._executor, self._store.end_if_lost)
            raise ReadError("transport", str(error)) from error


def _advertise(local: Local) -> bytes | None:
    store = local.store
    if not store.gpu_uuid:
        return None
    memory = GpuMemory(store.gpu_uuid, store.readable_gpus, store.ipc_handle, store.test_checksum)
    return msgspec.msgpack.encode(memory)


def _find_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
    here, there = ([read_advert(rank, CUDA_IPC.name, GpuMemory) for rank in peer.ranks] for peer in (ours, theirs))
    if not any(here):
        return "this worker's pool is not on a GPU"
    if not any(there):
        return "the peer's pool is not on a GPU"
    if ours.host != theirs.host:
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


CUDA_IPC = Transport(
    "cuda_ipc",
    "the peer's GPU memory can be opened on this host",
    _advertise,
    _find_obstacle,
    lambda local, peer: CudaIpcReader.open(peer, local.store, local.executor),
)
