"""The memory of a worker's KV cache, and its pages as bytes for transfer.

Knows shapes and memory, not who holds which page (allocator.py) nor how peers read it (kvtransfer/).
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kvcache.allocator import num_pages_for

OS_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PoolShape:
    """[num_pages, num_layers, 2, num_kv_heads, page_tokens, head_dim]: one page of all layers is contiguous."""

    num_pages: int
    num_layers: int
    num_kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        elements = self.num_layers * 2 * self.num_kv_heads * self.page_tokens * self.head_dim
        return elements * self.dtype.itemsize

    def with_pages(self, num_pages: int) -> "PoolShape":
        return replace(self, num_pages=num_pages)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.num_pages, self.num_layers, 2, self.num_kv_heads, self.page_tokens, self.head_dim)


class Pool:
    """Page memory, zeroed at birth. Satisfies kvtransfer's PageStore.

    On the CPU one memory file that peers on this host can map: generations (uint64 a page, padded to 4096 bytes), then
    pages. On another device, or without Linux's memory files, one plain allocation with generations on the host.
    """

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = shape.num_pages
        self.page_bytes = shape.page_bytes
        self.fd: int | None = None  # the memory file, when there is one
        self._bytes: NDArray[np.uint8] | None = None  # [num_pages, page_bytes], the same memory as the tensor's
        self.pages_offset = 0  # bytes before the first page in the memory file
        if device.type == "cpu" and hasattr(os, "memfd_create"):
            self._allocate_shared()
        else:
            self.generations: NDArray[np.uint64] = np.zeros(shape.num_pages, np.uint64)
            self.tensor: Tensor = torch.zeros(shape.sizes, dtype=shape.dtype, device=device)

    def _allocate_shared(self) -> None:
        offset = self.pages_offset = num_pages_for(self.num_pages * 8, OS_PAGE_BYTES) * OS_PAGE_BYTES
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, offset + self.num_pages * self.page_bytes)
        # readers map it: were it to shrink, they would die of SIGBUS
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(self.fd, 0)
        self.generations = np.frombuffer(memory, np.uint64, self.num_pages)
        elements = torch.frombuffer(memory, dtype=self.shape.dtype, offset=offset)  # keeps the mapping alive
        self.tensor = elements.view(self.shape.sizes)
        self._bytes = np.frombuffer(memory, np.uint8, offset=offset).reshape(self.num_pages, self.page_bytes)

    def load(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of `pages`: [len(pages), page_bytes] uint8."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.tensor.device)
        rows = self.tensor.index_select(0, index).cpu().contiguous()
        copied: NDArray[np.uint8] = rows.view(torch.uint8).numpy().reshape(len(pages), self.page_bytes)
        return copied

    def store(self, page: int, data: NDArray[np.uint8]) -> None:
        """Overwrite `page` with page_bytes bytes. The caller holds the page."""
        if self._bytes is not None:
            np.copyto(self._bytes[page], data)
        else:
            self.tensor[page].view(-1).copy_(torch.from_numpy(data.copy()).view(self.shape.dtype))
