"""Another process' pages in GPU memory, opened here. Satisfies kvtransfer's PeerPages."""

import importlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kvcache.gpu import Gpu
from engine.staging import upload


class GpuPeerPages:
    """Owns the mapping of a peer's pool. One caller at a time: a copy must not run into `close`."""

    def __init__(self, gpu: Gpu, ours: Tensor, handle: bytes, num_pages: int) -> None:
        """ours: [P, W] int32, our pages; the peer has `num_pages` of the same size.

        Raises RuntimeError in CUDA's words.
        """
        self._copy_pages = importlib.import_module("engine.kernels.gpu_pages").copy_pages  # needs triton
        self._gpu = gpu
        self._ours = ours
        self._address = gpu.cudart.open(handle, num_pages * ours.shape[1] * ours.itemsize)  # 0 once it is closed
        try:
            self.probe(1)  # builds the kernel: no read is to wait for that
        except BaseException:
            self.close()
            raise

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None:
        """Copy each of the peer's pages to ours beside it; returns when the bytes are there. Within both pools."""
        self._copy(lambda: self._ours, pages, into)

    def probe(self, num_pages: int) -> None:
        """Copy the peer's first pages into nowhere."""
        sizes, device = (num_pages, self._ours.shape[1]), self._ours.device
        self._copy(lambda: torch.empty(sizes, dtype=torch.int32, device=device), range(num_pages), range(num_pages))

    def _copy(self, find_target: Callable[[], Tensor], pages: Sequence[int], into: Sequence[int]) -> None:
        if not self._address:
            raise RuntimeError("the peer's pool was closed before the copy")
        if not pages:
            return

        def launch() -> None:
            target = find_target()  # new memory must come from this stream: another one's may still be in use
            # each begins on 16 bytes, whatever n: otherwise Triton builds the kernel again
            index = upload([np.array(pages, np.int64), np.array(into, np.int64)], target.device)
            self._copy_pages(self._address, target, *index)

        self._gpu.run(launch)

    def close(self) -> None:
        """Idempotent."""
        address, self._address = self._address, 0
        if address:
            self._gpu.cudart.close(address)
