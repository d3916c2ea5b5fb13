"""How a decode worker reads pages of a prefill worker: the Reader protocol and the choice of a transport.

Knows pages as bytes through PageStore; nothing of sessions, offers or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from protos import kv_pb2
from wire.kv_layout import PagePart
from wire.names import Transport as Transport


class PeerPages(Protocol):
    """Another process's pool, opened on a GPU. Raises RuntimeError with the driver's message. One caller at a time."""

    def copy(self, pages: Sequence[int], into: Sequence[int], source: int, target: int, num_bytes: int) -> None:
        """Copy its page pages[i] to the store's page into[i]; returns when the bytes are there.

        Copies `num_bytes` of each page from byte `source` to byte `target`. The caller checks bounds and holds the
        store's pages.
        """
        ...

    def probe(self, num_pages: int, source: int, num_bytes: int) -> None:
        """Copy `num_bytes` of each of its first pages, from byte `source` on, and drop them."""
        ...

    def load(self, begin: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """[num_bytes] bytes from byte `begin` on, once for each way in which `copy` may read them."""
        ...

    def close(self) -> None:
        """Idempotent. Copies after it raise."""
        ...


class Landing(Protocol):
    """Pages on a store's device where bytes arrive before they are checked. One caller at a time."""

    @property
    def address(self) -> int:
        """Address of the first page; the others follow without gaps."""
        ...

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None:
        """Copy pages[i] to the store's page into[i]; returns when the bytes are there. Raises RuntimeError.

        The caller holds the store's pages.
        """
        ...

    def close(self) -> None:
        """Free the pages; nothing may write to them any more. Idempotent."""
        ...


class PageStore(Protocol):
    """One rank's pool, as transfers use it."""

    num_pages: int
    page_bytes: int
    parts: tuple[PagePart, ...]  # of a page, over all ranks
    rank: int
    num_ranks: int
    generations: NDArray[np.uint64]  # one per page, changed by the owner when a page gets a new holder

    def load(self, pages: Sequence[int], begin: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """[len(pages), num_bytes]: a copy of `num_bytes` (default: all) of each page from byte `begin` on."""
        ...

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]], begin: int = 0) -> None:
        """Overwrite each page from byte `begin` on with its row. The caller holds the pages."""
        ...

    def open_peer(self, handle: bytes, num_pages: int, page_bytes: int) -> PeerPages:
        """Open the GPU memory of another process on this host, the test bytes too. The first time may take seconds.

        Raises RuntimeError with the driver's message, or if this pool is not on a GPU.
        """
        ...

    def end_if_lost(self) -> None:
        """After a failed copy: end this process if its GPU is lost to it."""
        ...

    @property
    def address(self) -> int:
        """Address of the first page."""
        ...

    @property
    def device_index(self) -> int:
        """Index of the pages' GPU; -1 for main memory."""
        ...

    def open_landing(self, num_pages: int) -> Landing:
        """New pages of page_bytes on this pool's device. Raises RuntimeError with the driver's message."""
        ...


@dataclass(frozen=True, slots=True)
class PageRef:
    """A peer's page with a given content."""

    page: int
    generation: int


class ReadError(Exception):
    """The pages could not be read; the content of the destination pages is undefined."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason  # one word, as in OfferResponse.reason
        self.detail = detail


class Reader(Protocol):
    """Reads pages of one incarnation of one peer into the local store."""

    @property
    def transport(self) -> str:
        """The name for users: a Transport; for NIXL with UCX's transport, such as "nixl:rc_mlx5"."""
        ...

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        """Copy sources[i] to the local page into[i], then check every source's generation.

        The caller holds the local pages until this returns or raises, even if it is cancelled.
        Raises ReadError: "generation" if a page was recycled, "bounds", or "transport" if the peer is gone.
        """
        ...

    async def probe(self, num_pages: int) -> None:
        """Read the peer's first pages and drop them, to measure speed. Raises ReadError("transport")."""
        ...

    def is_gone(self) -> bool:
        """Whether the peer's process is known to be dead. Asking may start a check that the next call reports."""
        ...

    async def close(self) -> None:
        """Release the peer's memory or connection."""
        ...


def choose_transport(
    ours: kv_pb2.Peer, theirs: kv_pb2.Peer, wanted: Transport | Literal["auto"], is_required: bool,
    nixl_obstacle: str | None = None,
) -> tuple[Transport, str]:  # fmt: skip
    """The fastest transport for reading `theirs` from `ours` that `wanted` allows, and the reason. Pure.

    If `wanted` is not possible, the result is that of auto, or ValueError if `is_required`. `nixl_obstacle`: why
    this process cannot use NIXL.
    """
    if wanted == "grpc":
        return "grpc", "requested by --transport grpc"
    obstacles = {
        "cuda_ipc": _find_ipc_obstacle(ours, theirs),
        "shm": _find_shm_obstacle(ours, theirs),
        "nixl": nixl_obstacle or _find_nixl_obstacle(theirs),
    }
    transport, why = _choose_fastest(theirs, obstacles)
    if wanted == "auto" or wanted == transport:
        return transport, why
    obstacle = obstacles[wanted]
    if obstacle is None:
        return wanted, f"requested by --transport {wanted}"
    if is_required:
        raise ValueError(
            f"{wanted} is not possible with {theirs.address}: {obstacle}; drop --require-transport to use {transport}"
        )
    return transport, obstacle


def _choose_fastest(theirs: kv_pb2.Peer, obstacles: Mapping[str, str | None]) -> tuple[Transport, str]:
    if obstacles["cuda_ipc"] is None:
        return "cuda_ipc", "the peer's GPU memory can be opened on this host"
    if obstacles["shm"] is None:
        return "shm", "the peer's pool is shared memory on this host"
    if obstacles["nixl"] is None:
        return "nixl", "the peer's pool is open to NIXL"
    if _has_gpus(theirs):
        return "grpc", obstacles["cuda_ipc"] or ""
    return "grpc", obstacles["shm"]


def _find_shm_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
    if ours.host != theirs.host:
        return "the workers share no host and PID namespace"
    if _has_gpus(theirs) or not theirs.HasField("pool_fd"):
        return "the peer's pool is not shared memory"
    return None


def _find_nixl_obstacle(theirs: kv_pb2.Peer) -> str | None:
    if not all(rank.HasField("nixl") for rank in theirs.ranks):
        return "the peer's pool is not open to NIXL: start the peer with --transport nixl, and look into its log"
    return None


def _has_gpus(peer: kv_pb2.Peer) -> bool:
    return any(rank.HasField("gpu") for rank in peer.ranks)


def _find_ipc_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
    if not _has_gpus(ours):
        return "this worker's pool is not on a GPU"
    if not _has_gpus(theirs):
        return "the peer's pool is not on a GPU"
    if ours.host != theirs.host:
        return "the workers share no host and PID namespace"
    if ours.pid == theirs.pid:
        return "the workers are one process, which cannot open its own handles"
    for their in theirs.ranks:
        if not their.gpu.ipc_handle or not theirs.HasField("pool_fd"):
            return "the peer gives no handle of its GPU memory"
        for our in ours.ranks:
            if their.gpu.uuid not in our.gpu.readable:
                pair = f"GPU {our.gpu.uuid} has no peer access to the peer's {their.gpu.uuid}"
                return f"{pair}, or this process cannot see it"
    return None


def check_generations(sources: Sequence[PageRef], found: Sequence[int]) -> None:
    """Raise ReadError if a page got another holder after it was offered."""
    for source, generation in zip(sources, found, strict=True):
        if generation != source.generation:
            raise ReadError(
                "generation",
                f"page {source.page} was recycled: offered at generation {source.generation}, now {generation}",
            )


def check_bounds(sources: Sequence[PageRef], num_pages: int) -> None:
    """Raise ReadError if a source is outside the peer's pool."""
    for source in sources:
        if not 0 <= source.page < num_pages:
            raise ReadError("bounds", f"page {source.page} is outside the peer's pool of {num_pages} pages")
