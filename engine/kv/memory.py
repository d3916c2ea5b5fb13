"""The memory below a pool: files of the host's, and what is asked of a device whose memory is another."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
HUGE_BYTES = 2 << 20  # with system pages of 4 KiB
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux's


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


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Fewer page faults and TLB misses, if the system allows it."""
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def map_file(fd: int, num_bytes: int) -> memoryview:
    """A file, shared, at an address where it can have huge pages. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    whole = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags)  # unmaps the file, too, when the last view is gone
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    begin = -address % HUGE_BYTES
    system, how = ctypes.CDLL(None, use_errno=True), (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED)
    system.mmap.restype = ctypes.c_void_p
    offset = ctypes.c_long(0)
    mapped = system.mmap(ctypes.c_void_p(address + begin), ctypes.c_size_t(num_bytes), *how, fd, offset)
    if mapped != address + begin:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    prefer_huge_pages(whole)
    return memoryview(whole)[begin : begin + num_bytes]


def create_file() -> int:
    """The file descriptor of an empty memory file. Raises OSError."""
    return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
