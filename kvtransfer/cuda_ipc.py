"""Reads pages straight from a peer's GPU memory on the same host, over NVLink or PCIe. Nothing runs on the peer.

Knows when what may be believed; the calls of CUDA are PageStore.open_peer's. Has not run on a card yet.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from kvtransfer.copying import copy_in_thread
from kvtransfer.memory_file import PeerFile
from kvtransfer.reader import PageRef, PageStore, PeerPages, ReadError, Transport, check_bounds, check_generations
from protos import kv_pb2


class CudaIpcReader:
    """Keeps a peer's pool open, once for its incarnation; its generations are in a memory file, as with shm.

    A peer offers only pages whose step it has collected, so what is copied was written before. The copy is over, on the
    host too, when a read returns: steps launched after that see the bytes on whatever stream.

    All of CUDA's work is on the executor's one thread, so `close` follows the copy under way. A dead peer's memory may
    be another's: no copy begins once it is known to be dead, and none that ends after its death is believed.
    """

    transport: Transport = "cuda_ipc"

    def __init__(self, peer: kv_pb2.Peer, file: PeerFile, pages: PeerPages, executor: Executor) -> None:
        """Owns `pages`. `executor` has one thread. See `open`."""
        self._pid = peer.pid
        self._num_pages = peer.num_pages
        self._file = file
        self._pages = pages
        self._executor = executor

    @classmethod
    async def open(cls, peer: kv_pb2.Peer, store: PageStore, executor: Executor) -> "CudaIpcReader":
        """Raises ReadError: "transport" when the peer's memory cannot be opened, "layout" when it is another."""
        file = PeerFile(peer, page_bytes=0)
        opened: list[CudaIpcReader] = []

        def open_pages() -> None:
            opened.append(cls(peer, file, store.open_peer(peer.gpu.ipc_handle, peer.num_pages), executor))

        try:
            await _run_in_thread(executor, open_pages)
        except BaseException:  # cancelled: it is open nevertheless
            for reader in opened:
                await reader.close()
            raise
        return opened[0]

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        check_bounds(sources, self._num_pages)
        self._check_alive()
        pages = [source.page for source in sources]
        await _run_in_thread(self._executor, lambda: self._pages.copy(pages, into))
        self._check_alive()
        # After the copy, which another thread has waited for. The owner raises a generation before it launches what
        # writes to the page, so a copy that has seen a new owner's bytes ended after the generation was raised.
        check_generations(sources, [int(self._file.generations[source.page]) for source in sources])

    def _check_alive(self) -> None:
        if self.is_gone():
            raise ReadError("transport", f"the peer's process {self._pid} is gone, and with it its GPU memory")

    async def probe(self, num_pages: int) -> None:
        await _run_in_thread(self._executor, lambda: self._pages.probe(num_pages))

    def is_gone(self) -> bool:
        return not self._file.is_held()

    async def close(self) -> None:
        with suppress(ReadError):  # of a context that can do nothing more: the engine's next step says so
            await _run_in_thread(self._executor, self._pages.close)


async def _run_in_thread(executor: Executor, run: Callable[[], None]) -> None:
    """As copy_in_thread; what CUDA says becomes a ReadError."""
    try:
        await copy_in_thread(executor, run)
    except RuntimeError as error:
        raise ReadError("transport", str(error)) from error
