"""Pages outside the pool, on its device, that are copied into it: kvtransfer's PeerPages and Landing.

Knows addresses and copies, not the writer of the pages: the process that owns them, or a network card.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kv.gpu import Gpu
from engine.staging import upload

WORD_BYTES = 4  # the kernel copies int32


class GpuPages:
    """Owns memory on a GPU: another process's pool, opened here, or our own. One caller at a time."""

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
            self.probe(1)  # builds the kernel now, so that no read waits for it
        except BaseException:
            self.close()
            raise

    def copy(
        self, pages: Sequence[int], into: Sequence[int], source: int = 0, target: int = 0, num_bytes: int | None = None
    ) -> None:
        """Copy pages[i] to the pool's page into[i]; returns when the bytes are there. The caller checks bounds.

        Copies `num_bytes` of each page (default: all), from byte `source` to byte `target`.
        """
        words = slice(target // WORD_BYTES, None if num_bytes is None else (target + num_bytes) // WORD_BYTES)
        self._copy(lambda: self._ours[:, words], pages, into, source)

    def probe(self, num_pages: int, source: int = 0, num_bytes: int | None = None) -> None:
        """Copy from the first pages what `copy` would, and drop it."""
        num_words = self._page_words if num_bytes is None else num_bytes // WORD_BYTES
        sizes, device, pages = (num_pages, num_words), self._ours.device, range(num_pages)
        self._copy(lambda: torch.empty(sizes, dtype=torch.int32, device=device), pages, pages, source)

    def _copy(self, find_target: Callable[[], Tensor], pages: Sequence[int], into: Sequence[int], source: int) -> None:
        if not self.address:
            raise RuntimeError("the pages were closed before the copy")
        if not pages:
            return

        def launch() -> None:
            target = find_target()  # allocate on this stream: memory of another stream may still be in use
            # each array begins on 16 bytes, whatever n is: otherwise Triton compiles again
            index = upload([np.array(pages, np.int64), np.array(into, np.int64)], target.device)
            self._gpu.copy_pages(self.address + source, self._page_words, target, *index)

        self._gpu.run(launch)

    def close(self) -> None:
        """Idempotent."""
        address, self.address = self.address, 0
        if address:
            self._let_go(address)


class HostPages:
    """Owns pages in main memory for a pool in main memory."""

    def __init__(self, store: Callable[..., None], num_pages: int, page_bytes: int) -> None:
        self._store = store
        self._rows = np.zeros((num_pages, page_bytes), np.uint8)

    @property
    def address(self) -> int:
        return int(self._rows.ctypes.data)

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None:
        """Copy pages[i] to the pool's page into[i]."""
        self._store(into, [self._rows[page] for page in pages])

    def close(self) -> None:
        """Nothing to do: the memory is freed with the last reference."""
