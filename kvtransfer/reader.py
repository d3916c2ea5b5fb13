"""How a decode worker gets at pages of a prefill worker: the Reader protocol and the choice among transports.

Knows pages as bytes through PageStore; nothing of sessions, offers or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from protos import kv_pb2

Transport = Literal["shm", "grpc"]


class PageStore(Protocol):
    """A pool, as transfers see it."""

    num_pages: int
    page_bytes: int
    generations: NDArray[np.uint64]  # one a page, changed by the owner when a page gets a new holder

    def load(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of `pages`: [len(pages), page_bytes]."""
        ...

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]]) -> None:
        """Overwrite each page with the row beside it, of page_bytes bytes. The caller holds the pages."""
        ...


@dataclass(frozen=True, slots=True)
class PageRef:
    """A peer's page at one point of its life."""

    page: int
    generation: int


class ReadError(Exception):
    """The pages could not be read; nothing about the destination pages may be believed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason  # one word, as in OfferResponse.reason
        self.detail = detail


class Reader(Protocol):
    """Reads pages of one incarnation of one peer into the local store."""

    transport: Transport

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        """Copy each source page into the local page beside it, then check every source's generation.

        The caller holds the local pages until this returns or raises, even when it is cancelled meanwhile.
        Raises ReadError: "generation" when a page was recycled, "bounds", or "transport" when the peer is gone.
        """
        ...

    async def probe(self, num_pages: int) -> None:
        """Read the peer's first pages into nowhere, to measure the way. Raises ReadError("transport")."""
        ...

    def is_gone(self) -> bool:
        """True once the peer's process is known to be dead, which asking may bring about."""
        ...

    async def close(self) -> None:
        """Let go of the peer's memory or connection."""
        ...


def choose_transport(
    ours: kv_pb2.Peer, theirs: kv_pb2.Peer, wanted: Literal["auto", "shm", "grpc"], is_required: bool
) -> tuple[Transport, str]:
    """The fastest transport for reading `theirs` from `ours` within `wanted`, and why. Pure.

    shm that cannot be had gives grpc; when that `is_required` to be otherwise, ValueError says why.
    """
    if wanted == "grpc":
        return "grpc", "asked for by --transport grpc"
    obstacle = None
    if ours.host != theirs.host:
        obstacle = "the workers share no host and PID namespace"
    elif not theirs.HasField("pool_fd"):
        obstacle = "the peer's pool is not shared memory"
    if obstacle is None:
        return "shm", "the peer's pool is shared memory on this host"
    if wanted == "shm" and is_required:
        raise ValueError(f"shm cannot be had with {theirs.address}: {obstacle}; drop --require-transport to use grpc")
    return "grpc", obstacle


def check_generations(sources: Sequence[PageRef], found: Sequence[int]) -> None:
    """Raise ReadError when a page has had another holder since it was offered."""
    for source, generation in zip(sources, found, strict=True):
        if generation != source.generation:
            raise ReadError(
                "generation",
                f"page {source.page} was recycled: offered at generation {source.generation}, now {generation}",
            )


def check_bounds(sources: Sequence[PageRef], num_pages: int) -> None:
    """Raise ReadError when a source lies outside the peer's pool."""
    for source in sources:
        if not 0 <= source.page < num_pages:
            raise ReadError("bounds", f"page {source.page} is outside the peer's pool of {num_pages} pages")
