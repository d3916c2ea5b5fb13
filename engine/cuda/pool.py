"""Pages in a GPU's memory, which peers open by a handle."""

import os
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.gpu import Gpu, GpuPages
from engine.kv.memory import T
from engine.kv.pool import Pool, PoolShape, PoolShare
from engine.out_of_memory import end_process, is_device_lost
from engine.staging import upload
from wire.kv_layout import TEST_BYTES, find_test_bytes

log = structlog.get_logger()


class GpuPool(Pool):
    """See `Pool`. The memory file holds only the generations.

    The pages are one allocation outside torch's allocator, which peers open by `ipc_handle`; TEST_BYTES random bytes
    behind them, of checksum `test_checksum`, show whether they read it right.
    """

    def __init__(
        self, shape: PoolShape, gpu: Gpu, draft_shape: PoolShape | None = None, share: PoolShare | None = None
    ) -> None:
        self.gpu = gpu
        super().__init__(shape, draft_shape, share)
        self.gpu_uuid, self.readable_gpus = gpu.uuid, gpu.readable

    def _allocate(self, lends: bool) -> Tensor:
        """Exports the handle of the memory for peers."""
        gpu = self.gpu
        try:
            begin = find_test_bytes(self.num_pages * self.page_bytes)
            whole = gpu.reserve(begin + TEST_BYTES)
        except RuntimeError as error:
            raise self._no_memory(f" on the GPU ({error})") from error
        random = os.urandom(TEST_BYTES)
        self.test_checksum, test = zlib.crc32(random), np.frombuffer(random, np.uint8)
        gpu.run(lambda: whole[begin:].copy_(upload([test], whole.device)[0]))
        if self._map_file(self.pages_offset) is not None:
            try:
                self.ipc_handle = gpu.export(whole.data_ptr())
            except RuntimeError as error:
                self.why_private = f"the GPU's memory cannot be exported: {error}"
        return whole[: self.num_pages * self.page_bytes].view(self.shape.dtype)

    def open_peer(self, handle: bytes, num_pages: int, page_bytes: int) -> GpuPages:
        num_bytes = find_test_bytes(num_pages * page_bytes) + TEST_BYTES
        return self.gpu.open_peer(handle, num_bytes, self.pages.view(torch.int32), page_bytes)

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

    def open_landing(self, num_pages: int) -> GpuPages:
        return self.gpu.open_landing(num_pages, self.pages.view(torch.int32), self.page_bytes)

    def store(self, pages: Sequence[int], rows: Sequence[NDArray[np.uint8]], begin: int = 0) -> None:
        if pages:
            data = np.stack(rows).view(np.int32)
            words = self.pages.view(torch.int32)[:, begin // 4 : begin // 4 + data.shape[1]]  # 8-bit: no index_copy_

            def put() -> None:
                index, uploaded = upload([np.array(pages, np.int64), data], words.device)
                words.index_copy_(0, index, uploaded)

            self.gpu.run(put)

    def _run(self, launch: Callable[[], T]) -> T:
        return self.gpu.run(launch)
