"""The memory of a worker's KV cache, and its pages as bytes for transfer. Who owns a page: worker/prefix_cache.py."""

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.memory import Landing, PeerPages, T, create_file
from engine.staging import download, upload
from wire.huge_pages import map_file, prefer_huge_pages
from wire.kv_layout import KvPart, PagePart, StatePart

OS_PAGE_BYTES = 4096
Part = KvPart | StatePart


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The sizes of one model's pages, or of its slots; wire.kv_layout orders each part."""

    num_pages: int
    parts: tuple[Part, ...]
    page_tokens: int
    dtype: torch.dtype

    @property
    def page_elements(self) -> int:
        return sum(prod(self.part_sizes(part)[1:]) for part in self.parts)

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.dtype.itemsize

    def page_parts(self, whole: Sequence[Part]) -> tuple[PagePart, ...]:
        """The parts of a page as peers get them. whole: the same parts over all ranks."""
        rows = [prod(self.part_sizes(own)[1:]) // (own.num_heads * own.num_layers) for own in self.parts]
        return tuple(
            PagePart(one.num_heads, count * self.dtype.itemsize * one.num_layers, one.num_layers)
            for one, count in zip(whole, rows, strict=True)
        )

    def with_pages(self, num_pages: int) -> "PoolShape":
        return replace(self, num_pages=num_pages)

    def part_sizes(self, part: Part) -> tuple[int, ...]:
        """Sizes of a tensor that holds the part in all pages."""
        return part.pool_sizes(self.num_pages, self.page_tokens)

    def split(self, pages: Tensor) -> tuple[Tensor, ...]:
        """[num_pages, page_elements] |-> views of the parts, see `part_sizes`."""
        sizes = [self.part_sizes(part) for part in self.parts]
        parts = torch.split(pages, [prod(size[1:]) for size in sizes], 1)
        return tuple(part.view(size) for part, size in zip(parts, sizes, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the model's pages: axes as in wire.kv_layout with one part, else [num_pages, elements]."""
        return self.part_sizes(self.parts[0]) if len(self.parts) == 1 else (self.num_pages, self.page_elements)


@dataclass(frozen=True, slots=True)
class PoolShare:
    """Which heads a pool holds when several ranks share the same pages."""

    rank: int
    size: int
    parts: tuple[PagePart, ...]  # of a page over all ranks
    fd: int  # an empty memory file that all ranks have open; -1: they are on several hosts and have none
    barrier: Callable[[], object]  # returns when all ranks have called it
    num_stages: int = 1  # that divide the layers


class Pool:
    """Page memory, zeroed at creation. Satisfies kvtransfer's PageStore, which describes what has no comment here.

    With a draft model, a page holds the KV of both models for the same positions: one page id, one lease and one
    transfer for both.

        page:  [ the model's KV                         | the draft model's, in the same order ]
                 `tensor` is a view of all first parts    `draft_tensor` of all second parts

    A memory file that peers on this host can map. It holds generations (uint64 per page, padded to 4096 bytes), then
    pages: rank 0's, rank 1's and so on if ranks share it. If the system has no such file, or the ranks are on several
    hosts: plain memory, which peers read over the network. Only rank 0 changes generations.
    On a GPU: engine/cuda/pool.py.
    """

    def __init__(
        self, shape: PoolShape, draft_shape: PoolShape | None = None, share: PoolShare | None = None, lends: bool = True
    ) -> None:
        """`draft_shape` has the page_tokens and dtype of `shape`; its num_pages is ignored. Both: of this rank.

        Raises ValueError if there is not enough memory, RuntimeError if another rank does not come.
        """
        if draft_shape is not None and (draft_shape.page_tokens, draft_shape.dtype) != (shape.page_tokens, shape.dtype):
            raise ValueError(f"draft pages {draft_shape} do not fit pages {shape}")
        models = [shape, *([draft_shape.with_pages(shape.num_pages)] if draft_shape else [])]
        self.shape = shape
        self.num_pages = shape.num_pages
        self.page_bytes = sum(model.page_bytes for model in models)
        self._share = share
        self.rank, self.num_ranks, self.num_stages = (share.rank, share.size, share.num_stages) if share else (0, 1, 1)
        own = [part for model in models for part in model.page_parts(model.parts)]
        self.parts: tuple[PagePart, ...] = share.parts if share else tuple(own)
        self.fd: int | None = None
        self._bytes: NDArray[np.uint8]  # [num_pages, page_bytes]
        self.pages_offset = -(-self.num_pages * 8 // OS_PAGE_BYTES) * OS_PAGE_BYTES  # in the memory file
        self.why_private: str | None = None  # why peers on this host cannot open the memory
        self.generations: NDArray[np.uint64] = np.zeros(shape.num_pages, np.uint64)
        self.gpu_uuid, self.readable_gpus = "", tuple[str, ...]()
        self.ipc_handle = b""
        self.test_checksum = 0
        elements = self._allocate(lends if share is None else share.fd >= 0)
        self.pages = elements.view(shape.num_pages, self.page_bytes // shape.dtype.itemsize)
        self.tensor: Tensor = self.pages[:, : shape.page_elements].view(shape.sizes)
        self.draft_tensor = self.pages[:, shape.page_elements :].view(models[1].sizes) if draft_shape else None

    @property
    def size_mib(self) -> int:
        """The value to set --kv-memory-mib to: it is rounded down to whole pages."""
        return -(-self.num_pages * self.all_page_bytes >> 20)

    @property
    def all_page_bytes(self) -> int:
        """Over all ranks."""
        return self.num_ranks * self.page_bytes

    def _allocate(self, lends: bool) -> Tensor:
        """The elements of all pages."""
        shared = self._allocate_shared() if lends else None
        return self._allocate_private() if shared is None else shared

    def _allocate_private(self) -> Tensor:
        try:
            memory = mmap.mmap(-1, self.num_pages * self.page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._no_memory("") from error
        prefer_huge_pages(memory)
        return self._place(memory, 0)

    def _place(self, memory: mmap.mmap | memoryview, begin: int) -> Tensor:
        """The elements of all pages, in `memory` from `begin` on; they keep it alive."""
        num_bytes = self.num_pages * self.page_bytes
        self._bytes = np.frombuffer(memory, np.uint8, num_bytes, begin).reshape(self.num_pages, self.page_bytes)
        return torch.frombuffer(
            memory, dtype=self.shape.dtype, count=num_bytes // self.shape.dtype.itemsize, offset=begin
        )

    def _no_memory(self, why: str) -> ValueError:
        return ValueError(
            f"no memory for a KV pool of {self.size_mib} MiB{why}: lower --kv-memory-mib (now {self.size_mib})"
        )

    def _allocate_shared(self) -> Tensor | None:
        """The elements of all pages in a new memory file; None, and `why_private`, if there can be none."""
        num_bytes = self.num_pages * self.page_bytes
        memory = self._map_file(self.pages_offset + self.num_ranks * num_bytes)
        if memory is None:
            return None
        return self._place(memory, self.pages_offset + self.rank * num_bytes)

    def _map_file(self, num_bytes: int) -> memoryview | None:
        """A memory file that begins with the generations; None, and `why_private`, if the system has none.

        Sealed: if it shrank, readers that map it would die of SIGBUS. Of several ranks, rank 0 sizes it.
        """
        share, fd = self._share, None
        if share and share.fd < 0:
            return None
        try:
            fd = share.fd if share else create_file()
            if self.rank == 0:
                os.ftruncate(fd, num_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            if share:
                share.barrier()
            memory = map_file(fd, num_bytes)
        except (OSError, AttributeError) as error:  # a sandbox or limit forbids it, or this is not Linux
            mib = -(-num_bytes >> 20)
            self.why_private = f"no memory file of {mib} MiB for the KV pool: {error}; allow memfd_create of that size"
            if share:
                raise ValueError(f"ranks cannot share their pages: {self.why_private}, or set --tp 1") from error
            if fd is not None:
                os.close(fd)
            return None
        self.fd, self.generations = fd, np.frombuffer(memory, np.uint64, self.num_pages)
        return memory

    @property
    def address(self) -> int:
        return self.pages.data_ptr()

    @property
    def device_index(self) -> int:
        return self.pages.get_device()

    def open_peer(self, handle: bytes, num_pages: int, page_bytes: int) -> PeerPages:
        raise RuntimeError("this pool is not on a GPU")

    def end_if_lost(self) -> None:
        """End this process if the pages' device is lost to it."""

    def open_landing(self, num_pages: int) -> Landing:
        return HostPages(self, num_pages)

    def load(self, pages: Sequence[int], begin: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """`begin` and `num_bytes` are multiples of 4."""
        words = self.pages.view(torch.int32)[:, begin // 4 : None if num_bytes is None else (begin + num_bytes) // 4]

        def select() -> Tensor:  # [len(pages), words of each]
            return download(words.index_select(0, upload([np.array(pages, np.int64)], words.device)[0]))

        return self._run(select).view(torch.uint8).numpy()

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]], begin: int = 0) -> None:
        """All rows have the same length; one copy to a device."""
        for page, row in zip(pages, rows, strict=True):
            np.copyto(self._bytes[page, begin : begin + len(row)], row)

    def _run(self, launch: Callable[[], T]) -> T:
        return launch()


class HostPages:
    """Pages in main memory beside a pool there: kvtransfer's Landing."""

    def __init__(self, pool: Pool, num_pages: int) -> None:
        self._pool = pool
        self._rows = np.zeros((num_pages, pool.page_bytes), np.uint8)

    @property
    def address(self) -> int:
        return int(self._rows.ctypes.data)

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None:
        self._pool.store(into, [self._rows[page] for page in pages])

    def close(self) -> None:
        """The memory is freed with the last reference."""
