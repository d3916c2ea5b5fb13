"""Memory that the system may give huge pages: fewer page faults, and fewer misses of the TLB."""

import ctypes
import mmap
import os
from contextlib import suppress

HUGE_BYTES = 2 << 20  # with system pages of 4 KiB
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux's


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
