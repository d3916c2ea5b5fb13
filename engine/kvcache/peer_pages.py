"""Pages beside the pool, on its device, that are copied into it: kvtransfer's PeerPages and Landing.

Knows addresses and copies, not what is written there: by another process that owns them, or by a network card.
"""

import importlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kvcache.gpu import Gpu
from engine.staging import upload

WORD_BYTES = 4  # the kernel copies int32


class GpuPages:
    """Owns memory on a GPU: another process' pool, opened here, or our own. One caller at a time."""

    def __init__(
        self, gpu: Gpu, ours: Tensor, address: int, page_bytes: int, let_go: Callable[[int], None]
    ) -> None:  # fmt: skip
        """ours: [P, W] int32, the pool's pages. `page_bytes`: of those at `address`. `let_go` closes or frees them.

        Raises RuntimeError in CUDA's words.
        """
        self._gpu = gpu
        self._ours = ours
        self._page_words = page_bytes // WORD_BYTES
        self._let_go = let_go
        self.address = address  # 0 once it is closed
        try:
            self._copy_pages = importlib.import_module("engine.kernels.gpu_pages").copy_pages  # needs triton
            self.probe(1)  # builds the kernel: no read is to wait for that
        except BaseException:
            self.close()
            raise

    def copy(
        self, pages: Sequence[int], into: Sequence[int], source: int = 0, target: int = 0, num_bytes: int | None = None
    ) -> None:
        """Copy each page to the pool's beside it; returns when the bytes are there. All within both.

        Of each `num_bytes` from its byte `source` on, to byte `target`; all unless given.
        """
        words = slice(target // WORD_BYTES, None if num_bytes is None else (target + num_bytes) // WORD_BYTES)
        self._copy(lambda: self._ours[:, words], pages, into, source)

    def probe(self, num_pages: int, source: int = 0, num_bytes: int | None = None) -> None:
        """Copy the first pages into nowhere: of each what `copy` would."""
        num_words = self._page_words if num_bytes is None else num_bytes // WORD_BYTES
        sizes, device, pages = (num_pages, num_words), self._ours.device, range(num_pages)
        self._copy(lambda: torch.empty(sizes, dtype=torch.int32, device=device), pages, pages, source)

    def _copy(self, find_target: Callable[[], Tensor], pages: Sequence[int], into: Sequence[int], source: int) -> None:
        if not self.address:
            raise RuntimeError("the pages were closed before the copy")
        if not pages:
            return

        def launch() -> None:
            target = find_target()  # new memory must come from this stream: another one's may still be in use
            # each begins on 16 bytes, whatever n: otherwise Triton builds the kernel again
            index = upload([np.array(pages, np.int64), np.array(into, np.int64)], target.device)
            self._copy_pages(self.address + source, self._page_words, target, *index)

        self._gpu.run(launch)

    def close(self) -> None:
        """Idempotent."""
        address, self.address = self.address, 0
        if address:
            self._let_go(address)


class HostPages:
    """Owns pages in main memory beside a pool in main memory."""

    def __init__(self, store: Callable[..., None], num_pages: int, page_bytes: int) -> None:
        self._store = store
        self._rows = np.zeros((num_pages, page_bytes), np.uint8)

    @property
    def address(self) -> int:
        return int(self._rows.ctypes.data)

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None:
        """Copy each page to the pool's beside it."""
        self._store(into, [self._rows[page] for page in pages])

    def close(self) -> None:
        """Nothing to do: the memory goes with the last reference."""
