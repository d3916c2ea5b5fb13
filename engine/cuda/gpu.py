"""A pool's GPU, and memory on it that is copied into the pool: another process's pool, or pages that a NIC writes.

Has not run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.cuda_memory import Cudart, DeviceBytes, Span, find_cudart
from engine.staging import download, mark, upload

T = TypeVar("T")
WORD_BYTES = 4  # the kernel copies int32

# A copy engine leaves the multiprocessors to the steps, but each copy costs the host and the engine some 5 us. With 64
# KiB a copy that is 13 GB/s, more than twice what an 8B model's prefill makes (40,000 tokens/s of 128 KiB: 5 GB/s).
# Smaller ones are copied by our kernel, all in one launch. The 5 us are not measured.
ENGINE_BYTES = 64 << 10


class Gpu:
    """The memory of a GPU that a pool is in. Tests use one over host memory (tests/support/fake_cuda.py)."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError without a libcudart."""
        from engine.cuda.gpu_pages import copy_pages

        self.copy_pages: Callable[[int, int, Tensor, Tensor, Tensor], None] = copy_pages
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self.cudart = Cudart(find_cudart(), index)
        visible = range(torch.cuda.device_count())
        peers = [other for other in visible if other != index and torch.cuda.can_device_access_peer(index, other)]
        # UUIDs of the GPUs whose memory it can read, itself first
        self.readable = tuple(str(torch.cuda.get_device_properties(one).uuid) for one in (index, *peers))
        self.uuid = self.readable[0]
        # of priority 0, which is CUDA's lowest: steps go first if their stream has a negative one
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def reserve(self, num_bytes: int) -> Tensor:
        whole = self.view(DeviceBytes(self.cudart, num_bytes))
        self.run(whole.zero_)
        return whole

    def export(self, address: int) -> bytes:
        return self.cudart.export(address)

    def open_peer(self, handle: bytes, num_bytes: int, ours: Tensor, page_bytes: int) -> "GpuPages":
        return GpuPages(self, ours, self.cudart.open(handle, num_bytes), page_bytes, self.cudart.close)

    def open_landing(self, num_pages: int, ours: Tensor, page_bytes: int) -> "GpuPages":
        return GpuPages(self, ours, self.cudart.allocate(num_pages * page_bytes), page_bytes, self.cudart.free)

    def view(self, memory: DeviceBytes) -> Tensor:
        """[memory.num_bytes] uint8, the same memory."""
        tensor = torch.as_tensor(memory, device=self._device)
        assert tensor.data_ptr() == memory.address, "a copy: peers would open other memory"
        return tensor

    def copy_spans(self, spans: Sequence[Span]) -> None:
        """Copy them on the current stream without the device's multiprocessors. Does not wait."""
        self.cudart.copy(spans, torch.cuda.current_stream(self._device).cuda_stream)

    def run(self, launch: Callable[[], T]) -> T:
        """Launch work on a stream beside the engine's and wait for it. From any thread; threads run in parallel.

        Raises RuntimeError with the driver's message.
        """
        with torch.cuda.stream(self._stream):
            result = launch()
            done = mark()
        done.synchronize()
        return result


def join_pages(pages: Sequence[int], into: Sequence[int]) -> list[tuple[int, int, int]]:
    """(page, page to copy it into, how many): pages in a row on both sides make one copy. Pure."""
    pairs = sorted(zip(pages, into, strict=True))
    runs = groupby(enumerate(pairs), lambda one: (one[1][0] - one[0], one[1][1] - one[0]))
    return [(*found[0][1], len(found)) for found in (list(run) for _, run in runs)]


def plan_spans(
    pages: Sequence[int], into: Sequence[int], source: tuple[int, int], target: tuple[int, int], num_bytes: int
) -> list[Span] | None:
    """The copies of `num_bytes` of each page for a copy engine; None if they are too small for it. Pure.

    source, target: address of the bytes in page 0, bytes from one page to the next.
    """
    is_whole = source[1] == target[1] == num_bytes
    runs = join_pages(pages, into) if is_whole else [(*pair, 1) for pair in zip(pages, into, strict=True)]
    if len(pages) * num_bytes < ENGINE_BYTES * len(runs):
        return None
    return [
        Span(source[0] + page * source[1], target[0] + home * target[1], count * num_bytes)
        for page, home, count in runs
    ]


class GpuPages:
    """Owns memory on a GPU beside a pool: another process's pool, opened here, or our own. kvtransfer's PeerPages."""

    def __init__(
        self, gpu: Gpu, ours: Tensor, address: int, page_bytes: int, let_go: Callable[[int], None]
    ) -> None:  # fmt: skip
        """ours: [P, W] int32, the pool's pages. `page_bytes`: of the pages at `address`. `let_go` closes or frees them.

        Raises RuntimeError with CUDA's message.
        """
        self._gpu = gpu
        self._ours = ours
        self._page_words = page_bytes // WORD_BYTES
        self._let_go = let_go
        self.address = address  # 0 after close
        try:
            self.load(0, page_bytes)  # builds the kernel now, so that no read waits for it
        except BaseException:
            self.close()
            raise

    def copy(
        self, pages: Sequence[int], into: Sequence[int], source: int = 0, target: int = 0, num_bytes: int | None = None
    ) -> None:
        words = slice(target // WORD_BYTES, None if num_bytes is None else (target + num_bytes) // WORD_BYTES)
        self._copy(lambda: self._ours[:, words], pages, into, source)

    def probe(self, num_pages: int, source: int, num_bytes: int) -> None:
        sizes, device, pages = (num_pages, num_bytes // WORD_BYTES), self._ours.device, range(num_pages)
        self._copy(lambda: torch.empty(sizes, dtype=torch.int32, device=device), pages, pages, source)

    def load(self, begin: int, num_bytes: int) -> list[NDArray[np.uint8]]:
        """By the kernel, and by a copy engine."""

        def read() -> Tensor:
            target = torch.empty(2, num_bytes // WORD_BYTES, dtype=torch.int32, device=self._ours.device)
            self._launch_kernel(target, [0], [0], begin)
            self._gpu.copy_spans([Span(self.address + begin, target[1].data_ptr(), num_bytes)])
            return download(target)

        return list(self._gpu.run(read).view(torch.uint8).numpy())

    def _launch_kernel(self, target: Tensor, pages: Sequence[int], into: Sequence[int], source: int) -> None:
        # each array begins on 16 bytes, whatever n is: otherwise Triton compiles again
        index = upload([np.array(pages, np.int64), np.array(into, np.int64)], target.device)
        self._gpu.copy_pages(self.address + source, self._page_words, target, *index)

    def _copy(self, find_target: Callable[[], Tensor], pages: Sequence[int], into: Sequence[int], source: int) -> None:
        if not self.address:
            raise RuntimeError("the pages were closed before the copy")
        if not pages:
            return

        def launch() -> None:
            target = find_target()  # allocate on this stream: memory of another stream may still be in use
            spans = plan_spans(
                pages, into, (self.address + source, self._page_words * WORD_BYTES),
                (target.data_ptr(), target.stride(0) * WORD_BYTES), target.shape[1] * WORD_BYTES,
            )  # fmt: skip
            if spans is None:
                self._launch_kernel(target, pages, into, source)
            else:
                self._gpu.copy_spans(spans)

        self._gpu.run(launch)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._let_go(address)
