"""The memory of a worker's KV cache, and its pages as bytes for transfer.

Knows shapes and memory, not who holds which page (worker/prefix_cache.py) nor how peers read it (kvtransfer/).
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire.kv_layout import pool_sizes

OS_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What fixes the sizes of a pool; wire.kv_layout orders them."""

    num_pages: int
    num_layers: int
    num_kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_elements(self) -> int:
        return prod(self.with_pages(1).sizes)

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.dtype.itemsize

    def with_pages(self, num_pages: int) -> "PoolShape":
        return replace(self, num_pages=num_pages)

    @property
    def sizes(self) -> tuple[int, ...]:
        return pool_sizes(
            num_pages=self.num_pages,
            num_kv_heads=self.num_kv_heads,
            num_layers=self.num_layers,
            page_tokens=self.page_tokens,
            head_dim=self.head_dim,
        )


class Pool:
    """Page memory, zeroed at birth. Satisfies kvtransfer's PageStore.

    With a draft model a page has two parts, the model's KV and then the draft model's for the same positions: one page
    id, one lease and one transfer for both.

        page:  [ the model's KV                         | the draft model's, in the same order ]
                 `tensor` is a view of all first parts    `draft_tensor` of all second parts

    On the CPU one memory file that peers on this host can map: generations (uint64 a page, padded to 4096 bytes), then
    pages. On another device, or where the system gives no memory file, one plain allocation with generations on the
    host, which peers then read over the network.
    """

    def __init__(self, shape: PoolShape, device: torch.device, draft_shape: PoolShape | None = None) -> None:
        """`draft_shape` has the page_tokens and dtype of `shape`; its num_pages does not matter.

        Raises ValueError when there is not that much memory.
        """
        if draft_shape is not None and (draft_shape.page_tokens, draft_shape.dtype) != (shape.page_tokens, shape.dtype):
            raise ValueError(f"draft pages {draft_shape} do not go with pages {shape}")
        self.shape = shape
        self.num_pages = shape.num_pages
        page_elements = shape.page_elements + (draft_shape.page_elements if draft_shape else 0)
        self.page_bytes = page_elements * shape.dtype.itemsize
        self.fd: int | None = None  # the memory file, when there is one
        self._bytes: NDArray[np.uint8] | None = None  # [num_pages, page_bytes], the same memory as the tensors'
        self.pages_offset = 0  # bytes before the first page in the memory file
        self.why_private: str | None = None  # why it is no memory file although it is a CPU's
        self.generations: NDArray[np.uint64] = np.zeros(shape.num_pages, np.uint64)
        elements = self._allocate_shared() if device.type == "cpu" else None
        if elements is None:
            elements = self._allocate_private(page_elements, device)
        self._pages = elements.view(shape.num_pages, page_elements)
        self.tensor: Tensor = self._pages[:, : shape.page_elements].view(shape.sizes)
        self.draft_tensor: Tensor | None = None
        if draft_shape is not None:
            sizes = draft_shape.with_pages(shape.num_pages).sizes
            self.draft_tensor = self._pages[:, shape.page_elements :].view(sizes)

    @property
    def size_mib(self) -> int:
        """What --kv-memory-mib asks for: it is rounded down to whole pages."""
        return -(-self.num_pages * self.page_bytes >> 20)

    def _allocate_private(self, page_elements: int, device: torch.device) -> Tensor:
        try:
            return torch.zeros(self.num_pages, page_elements, dtype=self.shape.dtype, device=device)
        except RuntimeError as error:  # torch's word for too little memory
            raise ValueError(
                f"no memory for a KV pool of {self.size_mib} MiB: lower --kv-memory-mib (now {self.size_mib})"
            ) from error

    def _allocate_shared(self) -> Tensor | None:
        """The elements of all pages in a new memory file; None, and `why_private`, when the system gives none."""
        offset = -(-self.num_pages * 8 // OS_PAGE_BYTES) * OS_PAGE_BYTES
        try:
            self.fd, memory = _map_new_file(offset + self.num_pages * self.page_bytes)
        except (OSError, AttributeError) as error:  # a sandbox or limit forbids it, or this is no Linux
            self.why_private = f"no memory file of {self.size_mib} MiB for the KV pool: {error}"
            return None
        self.pages_offset = offset
        self.generations = np.frombuffer(memory, np.uint64, self.num_pages)
        self._bytes = np.frombuffer(memory, np.uint8, offset=offset).reshape(self.num_pages, self.page_bytes)
        return torch.frombuffer(memory, dtype=self.shape.dtype, offset=offset)  # keeps the mapping alive

    def load(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of `pages`: [len(pages), page_bytes] uint8."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._pages.device)
        rows = self._pages.index_select(0, index).cpu()
        copied: NDArray[np.uint8] = rows.view(torch.uint8).numpy()
        return copied

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]]) -> None:
        """Overwrite `pages`, each with page_bytes bytes; one copy if to a device. The caller holds the pages."""
        if self._bytes is not None:
            for page, row in zip(pages, rows, strict=True):
                np.copyto(self._bytes[page], row)
        elif pages:
            index = torch.tensor(pages, dtype=torch.int64, device=self._pages.device)
            data = torch.from_numpy(np.stack(rows)).view(self.shape.dtype)
            self._pages.index_copy_(0, index, data.to(self._pages.device))


def _map_new_file(num_bytes: int) -> tuple[int, mmap.mmap]:
    """A memory file that readers may map: were it to shrink, they would die of SIGBUS. Raises OSError."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, 0)
        with suppress(OSError, AttributeError):  # fewer page faults and misses where the system allows it
            memory.madvise(mmap.MADV_HUGEPAGE)
        return fd, memory
    except OSError:
        os.close(fd)
        raise
