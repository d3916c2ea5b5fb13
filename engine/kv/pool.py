"""The memory of a worker's KV cache, and its pages as bytes for transfer.

Knows shapes and memory, not the owners of pages (worker/prefix_cache.py) nor how peers read them (kvtransfer/).
"""

import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.cuda_memory import CudaError, DeviceBytes
from engine.kv.gpu import CudaGpu, Gpu
from engine.kv.peer_pages import GpuPages, HostPages
from engine.out_of_memory import end_process, is_device_lost
from engine.staging import download, upload
from wire.kv_layout import TEST_BYTES, KvPart, PagePart, StatePart, find_test_bytes

OS_PAGE_BYTES = 4096
Part = KvPart | StatePart
log = structlog.get_logger()


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

    def head_bytes(self, part: Part) -> int:
        """Bytes of one head in a page: all layers of the part, keys and values."""
        return prod(self.part_sizes(part)[1:]) * self.dtype.itemsize // part.num_heads

    def page_parts(self, whole: Sequence[Part]) -> tuple[PagePart, ...]:
        """What peers are told. whole: the same parts over all ranks."""
        return tuple(PagePart(one.num_heads, self.head_bytes(own)) for one, own in zip(whole, self.parts, strict=True))

    def with_pages(self, num_pages: int) -> "PoolShape":
        return replace(self, num_pages=num_pages)

    def part_sizes(self, part: Part) -> tuple[int, ...]:
        """Of a tensor that holds the part in all pages."""
        return part.pool_sizes(self.num_pages, self.page_tokens)

    def split(self, pages: Tensor) -> tuple[Tensor, ...]:
        """[num_pages, page_elements] |-> views of the parts, see `part_sizes`."""
        sizes = [self.part_sizes(part) for part in self.parts]
        parts = torch.split(pages, [prod(size[1:]) for size in sizes], 1)
        return tuple(part.view(size) for part, size in zip(parts, sizes, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the model's pages: axes as in wire.kv_layout with one part, else [num_pages, elements]."""
        return self.part_sizes(self.parts[0]) if len(self.parts) == 1 else (self.num_pages, self.page_elements)


@dataclass(frozen=True, slots=True)
class PoolShare:
    """Which heads a pool holds when several ranks share the same pages."""

    rank: int
    size: int
    parts: tuple[PagePart, ...]  # of a page over all ranks
    fd: int  # an empty memory file that all ranks have open
    barrier: Callable[[], object]  # returns when all ranks have called it


class Pool:
    """Page memory, zeroed at creation. Satisfies kvtransfer's PageStore.

    With a draft model, a page holds the KV of both models for the same positions: one page id, one lease and one
    transfer for both.

        page:  [ the model's KV                         | the draft model's, in the same order ]
                 `tensor` is a view of all first parts    `draft_tensor` of all second parts

    On the CPU: a memory file that peers on this host can map. It holds generations (uint64 per page, padded to 4096
    bytes), then pages: rank 0's, rank 1's and so on if ranks share it. On a GPU: the file holds only the generations,
    and the pages are one allocation outside torch's allocator, which peers open by `ipc_handle`; TEST_BYTES random
    bytes behind them, of checksum `test_checksum`, show whether they read it right. If the system allows neither: plain
    memory, which peers read over the network. Only rank 0 changes generations.
    """

    def __init__(
        self,
        shape: PoolShape,
        device: torch.device,
        draft_shape: PoolShape | None = None,
        gpu: Gpu | None = None,
        share: PoolShare | None = None,
    ) -> None:
        """`draft_shape` has the page_tokens and dtype of `shape`; its num_pages is ignored. Both: of this rank.

        `gpu`: that of `device`; found automatically on CUDA. Raises ValueError if there is not enough memory,
        RuntimeError if another rank does not come.
        """
        if draft_shape is not None and (draft_shape.page_tokens, draft_shape.dtype) != (shape.page_tokens, shape.dtype):
            raise ValueError(f"draft pages {draft_shape} do not fit pages {shape}")
        self.shape = shape
        self.num_pages = shape.num_pages
        page_elements = shape.page_elements + (draft_shape.page_elements if draft_shape else 0)
        self.page_bytes = page_elements * shape.dtype.itemsize
        self._share = share
        self.rank, self.num_ranks = (share.rank, share.size) if share else (0, 1)
        own = (*shape.page_parts(shape.parts), *(draft_shape.page_parts(draft_shape.parts) if draft_shape else ()))
        self.parts: tuple[PagePart, ...] = share.parts if share else own
        self.fd: int | None = None  # the memory file, if there is one
        self._bytes: NDArray[np.uint8] | None = None  # [num_pages, page_bytes], the same memory as the tensors'
        self.pages_offset = -(-self.num_pages * 8 // OS_PAGE_BYTES) * OS_PAGE_BYTES  # in the memory file
        self.why_private: str | None = None  # why peers on this host cannot open the memory
        self.generations: NDArray[np.uint64] = np.zeros(shape.num_pages, np.uint64)
        self.gpu = CudaGpu(device) if gpu is None and device.type == "cuda" else gpu
        self.ipc_handle = b""  # of the pages on a GPU, if they can be exported
        self.test_checksum = 0  # CRC-32 of the bytes behind them
        elements = self._allocate_shared() if self.gpu is None else self._allocate_on(self.gpu)
        if elements is None:
            elements = self._allocate_private(page_elements)
        self.pages = elements.view(shape.num_pages, page_elements)
        self.tensor: Tensor = self.pages[:, : shape.page_elements].view(shape.sizes)
        self.draft_tensor: Tensor | None = None
        if draft_shape is not None:
            sizes = draft_shape.with_pages(shape.num_pages).sizes
            self.draft_tensor = self.pages[:, shape.page_elements :].view(sizes)

    @property
    def size_mib(self) -> int:
        """The value to set --kv-memory-mib to: it is rounded down to whole pages."""
        return -(-self.num_pages * self.all_page_bytes >> 20)

    @property
    def all_page_bytes(self) -> int:
        """Bytes of a page over all ranks."""
        return self.num_ranks * self.page_bytes

    def _allocate_private(self, page_elements: int) -> Tensor:
        try:
            return torch.zeros(self.num_pages, page_elements, dtype=self.shape.dtype)
        except RuntimeError as error:  # what torch raises without enough memory
            raise self._no_memory("") from error

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
        begin = self.pages_offset + self.rank * num_bytes
        self._bytes = np.frombuffer(memory, np.uint8, num_bytes, begin).reshape(self.num_pages, self.page_bytes)
        count = num_bytes // self.shape.dtype.itemsize
        return torch.frombuffer(memory, dtype=self.shape.dtype, count=count, offset=begin)  # keeps the mapping alive

    def _allocate_on(self, gpu: Gpu) -> Tensor:
        """The elements of all pages in the memory of `gpu`; exports their handle for peers."""
        try:
            begin = find_test_bytes(self.num_pages * self.page_bytes)
            memory = DeviceBytes(gpu.cudart, begin + TEST_BYTES)
        except CudaError as error:
            raise self._no_memory(f" on the GPU ({error})") from error
        whole = gpu.view(memory)
        random = os.urandom(TEST_BYTES)
        self.test_checksum, test = zlib.crc32(random), np.frombuffer(random, np.uint8)
        gpu.run(whole.zero_)
        gpu.run(lambda: whole[begin:].copy_(upload([test], whole.device)[0]))
        pages = whole[: self.num_pages * self.page_bytes]
        if self._map_file(self.pages_offset) is not None:
            try:
                self.ipc_handle = gpu.cudart.export(memory.address)
            except CudaError as error:
                self.why_private = f"the GPU's memory cannot be exported: {error}"
        return pages.view(self.shape.dtype)

    def _map_file(self, num_bytes: int) -> mmap.mmap | None:
        """A new memory file that begins with the generations; None, and `why_private`, if the system has none."""
        try:
            self.fd, memory = (
                _map_new_file(num_bytes) if self._share is None else _map_shared_file(self._share, num_bytes)
            )
        except (OSError, AttributeError) as error:  # a sandbox or limit forbids it, or this is not Linux
            mib = -(-num_bytes >> 20)
            self.why_private = f"no memory file of {mib} MiB for the KV pool: {error}; allow memfd_create of that size"
            if self._share is not None:
                raise ValueError(f"ranks cannot share their pages: {self.why_private}, or set --tp 1") from error
            return None
        self.generations = np.frombuffer(memory, np.uint64, self.num_pages)
        return memory

    @property
    def address(self) -> int:
        """Address of the first page."""
        return self.pages.data_ptr()

    @property
    def device_index(self) -> int:
        """Index of the pages' GPU; -1 for main memory."""
        return self.pages.get_device()

    def open_peer(self, handle: bytes, num_pages: int, page_bytes: int) -> GpuPages:
        """Open the pool of another process on this host, with its test bytes. Raises RuntimeError, see GpuPages."""
        if self.gpu is None:
            raise RuntimeError("this pool is not on a GPU")
        cudart = self.gpu.cudart
        address = cudart.open(handle, find_test_bytes(num_pages * page_bytes) + TEST_BYTES)
        return GpuPages(self.gpu, self.pages.view(torch.int32), address, page_bytes, cudart.close)

    def end_if_lost(self) -> None:
        """End this process if its GPU's context is lost, which even a copy of our own memory then says.

        Like the engine's next step, which an idle worker would not come to.
        """
        try:
            self.load([0], 0, 4)
        except RuntimeError as error:
            if is_device_lost(error):
                log.error("the GPU is lost to this process, which ends", reason=str(error))
                end_process()

    def open_landing(self, num_pages: int) -> GpuPages | HostPages:
        """New pages like ours, on the same device, for data that arrives from elsewhere. Raises RuntimeError."""
        if self.gpu is None:
            return HostPages(self.store, num_pages, self.page_bytes)
        cudart = self.gpu.cudart
        address = cudart.allocate(num_pages * self.page_bytes)
        return GpuPages(self.gpu, self.pages.view(torch.int32), address, self.page_bytes, cudart.free)

    def load(self, pages: Sequence[int], begin: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """[len(pages), num_bytes]: a copy of `num_bytes` (default: all) of each page from byte `begin` on.

        Both are multiples of 4.
        """
        words = slice(begin // 4, None if num_bytes is None else (begin + num_bytes) // 4)
        if self.gpu is None:
            return self._select(pages, words).view(torch.uint8).numpy()
        return self.gpu.run(lambda: download(self._select(pages, words))).view(torch.uint8).numpy()

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]], begin: int = 0) -> None:
        """Overwrite each page from byte `begin` on with its row. All rows have the same length; one copy to a device.

        The caller holds the pages.
        """
        if self._bytes is not None:
            for page, row in zip(pages, rows, strict=True):
                np.copyto(self._bytes[page, begin : begin + len(row)], row)
        elif pages:
            run = (lambda launch: launch()) if self.gpu is None else self.gpu.run
            run(lambda: self._put(pages, np.stack(rows).view(np.int32), begin // 4))

    def _select(self, pages: Sequence[int], part: slice) -> Tensor:
        """[len(pages), words of the part] int32, on the pool's device."""
        words = self.pages.view(torch.int32)[:, part]
        return words.index_select(0, upload([np.array(pages, np.int64)], words.device)[0])

    def _put(self, pages: Sequence[int], rows: NDArray[np.int32], begin: int) -> None:
        words = self.pages.view(torch.int32)[:, begin : begin + rows.shape[1]]  # no index_copy_ for 8-bit types
        index, data = upload([np.array(pages, np.int64), rows], words.device)
        words.index_copy_(0, index, data)


def _map_new_file(num_bytes: int) -> tuple[int, mmap.mmap]:
    """A new memory file. Sealed: if it shrank, readers that map it would die of SIGBUS. Raises OSError."""
    fd = create_file()
    try:
        _size_file(fd, num_bytes)
        return fd, _map_whole(fd)
    except OSError:
        os.close(fd)
        raise


def _map_shared_file(share: PoolShare, num_bytes: int) -> tuple[int, mmap.mmap]:
    """The memory file of several ranks; rank 0 sizes it. Raises OSError."""
    if share.rank == 0:
        _size_file(share.fd, num_bytes)
    share.barrier()
    return share.fd, _map_whole(share.fd)


def create_file() -> int:
    """The file descriptor of an empty memory file. Raises OSError."""
    return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _size_file(fd: int, num_bytes: int) -> None:
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _map_whole(fd: int) -> mmap.mmap:
    memory = mmap.mmap(fd, 0)
    with suppress(OSError, AttributeError):  # fewer page faults and TLB misses, if the system allows it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
