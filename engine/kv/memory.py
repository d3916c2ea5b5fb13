"""The memory below a pool: files of the host's, and what is asked of a device whose memory is another."""

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")


class Landing(Protocol):
    """Pages beside a pool, in its own kind of memory: kvtransfer's Landing."""

    @property
    def address(self) -> int: ...

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class PeerPages(Landing, Protocol):
    """Another process's pool: kvtransfer's PeerPages."""

    def copy(
        self, pages: Sequence[int], into: Sequence[int], source: int = 0, target: int = 0, num_bytes: int | None = None
    ) -> None: ...

    def probe(self, num_pages: int, source: int, num_bytes: int) -> None: ...

    def load(self, begin: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]: ...


class DeviceMemory(Protocol):
    """The memory of a device that is not the host's. Raises RuntimeError with the driver's message."""

    uuid: str
    readable: tuple[str, ...]  # UUIDs of the devices whose memory it can read, itself first

    def reserve(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zeroed, outside torch's allocator."""
        ...

    def export(self, address: int) -> bytes:
        """The handle by which other processes open an allocation."""
        ...

    def open_peer(self, handle: bytes, num_bytes: int, ours: Tensor, page_bytes: int) -> PeerPages:
        """Another process's allocation of `num_bytes`, as pages to be copied into `ours`, [P, W] int32."""
        ...

    def open_landing(self, num_pages: int, ours: Tensor, page_bytes: int) -> Landing:
        """Memory for pages that something else writes, to be copied into `ours`."""
        ...

    def run(self, launch: Callable[[], T]) -> T:
        """Launch work beside the steps and wait for it. From any thread."""
        ...


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Fewer page faults and TLB misses, if the system allows it."""
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def create_file() -> int:
    """The file descriptor of an empty memory file. Raises OSError."""
    return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
