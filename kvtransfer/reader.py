"""The interface of a transport: makes a pool readable, and reads a peer's pool. Pages are bytes here."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, NamedTuple, Protocol, Self

import grpc
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import plan_runs, stages_of
from protos import kv_pb2
from wire.kv_layout import PagePart, page_bytes_of


class Landing(Protocol):
    """Pages on a store's device, beside the store. One caller at a time. RuntimeError with the driver's message."""

    @property
    def address(self) -> int:
        """Address of the first page; the others follow without gaps."""

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None:
        """Copy pages[i] to the store's page into[i], which the caller holds; returns when the bytes are there."""

    def close(self) -> None:
        """Free the pages; nothing may write to them any more. Idempotent. Copies after it raise."""


class PeerPages(Landing, Protocol):
    """Another process's pool, opened on a GPU."""

    def copy(
        self, pages: Sequence[int], into: Sequence[int], source: int = 0, target: int = 0, num_bytes: int | None = None
    ) -> None:
        """The same of `num_bytes` (default: all) of each page, from byte `source` to byte `target`."""

    def probe(self, num_pages: int, source: int, num_bytes: int) -> None:
        """Copy `num_bytes` of each of its first pages, from byte `source` on, and drop them."""

    def load(self, begin: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """[num_bytes] bytes from byte `begin` on, once for each way in which `copy` may read them."""


class PageStore(Protocol):
    """One rank's pool, as transfers use it."""

    num_pages: int
    page_bytes: int
    parts: tuple[PagePart, ...]  # of a page, over all ranks
    rank: int
    num_ranks: int
    num_stages: int
    generations: NDArray[np.uint64]  # one per page, changed by the owner when a page gets a new holder
    fd: int | None  # memory file with the generations and, unless they are on a GPU, the pages; None if there is none
    gpu_uuid: str  # of the pages' GPU; empty in main memory
    readable_gpus: tuple[str, ...]  # UUIDs of the GPUs whose memory that GPU can read, its own first
    ipc_handle: bytes  # opens the pages in another process; empty if that is not possible
    test_checksum: int  # CRC-32 of the test bytes behind the pages on a GPU

    @property
    def address(self) -> int:
        """Address of the first page."""

    @property
    def device_index(self) -> int:
        """Index of the pages' GPU; -1 for main memory."""

    def load(self, pages: Sequence[int], begin: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """[len(pages), num_bytes]: a copy of `num_bytes` (default: all) of each page from byte `begin` on."""

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]], begin: int = 0) -> None:
        """Overwrite each page from byte `begin` on with its row. The caller holds the pages."""

    def open_peer(self, handle: bytes, num_pages: int, page_bytes: int) -> PeerPages:
        """The GPU memory of another process on this host, test bytes included. RuntimeError if that is not possible."""

    def open_landing(self, num_pages: int) -> Landing:
        """New pages of page_bytes on this pool's device. Raises RuntimeError with the driver's message."""

    def end_if_lost(self) -> None:
        """After a failed copy: end this process if its GPU is lost to it."""


class PageRef(NamedTuple):
    """A peer's page with a given content."""

    page: int
    generation: int


class ReadError(Exception):
    """The pages could not be read; the content of the destination pages is undefined."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason  # one word, as in OfferResponse.reason
        self.detail = detail


@dataclass(slots=True)
class Local:
    """One pool of this process, and what transports use to read into it, or to let peers read it."""

    store: PageStore
    name: str  # unique over all processes: the incarnation that peers know the pool by, a dot and the rank
    wanted: str  # --transport
    open_channel: Callable[[str], grpc.aio.Channel]
    is_loopback: bool  # all peers are on this host
    nixl_allow_tcp: bool
    timeout_s: float  # of each read
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kv-read"))  # copies here
    cleanup: ExitStack = field(default_factory=ExitStack)  # ends what `advertise` began
    numbers: Iterator[int] = field(default_factory=count)  # for names that are never reused

    def close(self) -> None:
        """Call after all readers are closed, and when no peer reads the pool any more."""
        self.cleanup.close()
        self.executor.shutdown(wait=True)


class Reader(Protocol):
    """Reads pages of one incarnation of one peer into the local store."""

    @property
    def transport(self) -> str:
        """The name for users: the transport's; for NIXL with UCX's transport, such as "nixl:rc_mlx5"."""

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        """Copy sources[i] to the local page into[i], then check every source's generation.

        The caller holds the local pages until this returns or raises, even if it is cancelled.
        Raises ReadError: "generation" if a page was recycled, "bounds", or "transport" if the peer is gone.
        """

    async def probe(self, num_pages: int) -> None:
        """Read the peer's first pages and drop them, to measure speed. Raises ReadError("transport")."""

    def is_gone(self) -> bool:
        """Whether the peer's process is known to be dead. Asking may start a check that the next call reports."""

    async def close(self) -> None:
        """Release the peer's memory or connection."""


class TransportReader(Reader):
    """A transport is a subclass, in a file of its own and in transports.TRANSPORTS; its instances are readers."""

    name: ClassVar[str]  # in --transport and kv_pb2.Rank.transports
    why: ClassVar[str]  # the reason of --transport auto for it

    @staticmethod
    def advertise(local: Local) -> bytes | None:
        """The pool's entry in Rank.transports; None: it takes no part."""
        raise NotImplementedError

    @staticmethod
    def find_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
        """Why `theirs` cannot be read by `ours`. Pure. Raises ReadError if an entry is malformed."""
        raise NotImplementedError

    def __init__(self, local: Local, peer: kv_pb2.Peer) -> None:
        """See `open`."""
        self._peer = peer
        self._store = store = local.store
        self._executor: Executor | None = local.executor  # None: asyncio's own
        theirs = len(peer.ranks), store.num_stages, stages_of(peer)
        self._runs = plan_runs(store.parts, store.rank, store.num_ranks, *theirs)  # who has which of our bytes
        self._page_bytes = page_bytes_of(store.parts, 0, len(peer.ranks), stages_of(peer))  # of each peer rank

    @classmethod
    async def open(cls, local: Local, peer: kv_pb2.Peer) -> Self:
        """Raises ReadError: "layout" if the peer's pool is not as announced, "transport" if it cannot be read."""
        reader = cls(local, peer)
        try:
            await reader._connect(local)
        except BaseException:  # also if cancelled, since what began completes anyway
            await reader.close()
            raise
        return reader

    async def _connect(self, local: Local) -> None:
        """Open what takes time."""

    @property
    def transport(self) -> str:
        return self.name

    def _check_bounds(self, sources: Sequence[PageRef]) -> None:
        """Raise ReadError if a source is outside the peer's pool."""
        num_pages = self._peer.num_pages
        for source in sources:
            if not 0 <= source.page < num_pages:
                raise ReadError("bounds", f"page {source.page} is outside the peer's pool of {num_pages} pages")

    async def _copy(self, *copies: Callable[[], None]) -> None:
        """Run `copies` in threads, the first in its turn. Even if cancelled, or if one fails, return only after all.

        A running copy cannot be stopped, and until it ends the caller must own the pages that it writes to.
        """
        loop, own = asyncio.get_running_loop(), self._executor
        copying = [loop.run_in_executor(own if copy is copies[0] else None, copy) for copy in copies]
        try:
            await asyncio.wait(copying)
        except asyncio.CancelledError:
            await asyncio.wait(copying)
            raise
        for copied in copying:
            copied.result()


class Advert(msgspec.Struct, frozen=True):
    """A rank's entry for a transport."""

    @classmethod
    def read(cls, rank: kv_pb2.Rank, name: str) -> Self | None:
        """None if there is none. Raises ReadError("layout") if it is malformed."""
        packed = rank.transports.get(name)
        try:
            return msgspec.msgpack.decode(packed, type=cls) if packed else None
        except msgspec.MsgspecError as error:
            raise ReadError("layout", f"the peer's entry for {name} is malformed: {error}") from error

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)


def check_generations(sources: Sequence[PageRef], found: Sequence[int]) -> None:
    """Raise ReadError if a page got another holder after it was offered."""
    for source, generation in zip(sources, found, strict=True):
        if generation != source.generation:
            raise ReadError(
                "generation",
                f"page {source.page} was recycled: offered at generation {source.generation}, now {generation}",
            )
