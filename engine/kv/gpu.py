"""A pool's GPU: its name, its memory, and work that the host waits for. Has not run on a card yet."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.kv.cuda_memory import Cudart, DeviceBytes, Span, find_cudart
from engine.staging import mark

T = TypeVar("T")
CopyPages = Callable[[int, int, Tensor, Tensor, Tensor], None]


class Gpu(Protocol):
    """What a pool needs from a GPU. Tests use one over host memory (tests/support/fake_cuda.py)."""

    uuid: str
    readable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can read, itself first
    cudart: Cudart

    @property
    def copy_pages(self) -> CopyPages:
        """See kernels.gpu_pages.copy_pages."""
        ...

    def copy_spans(self, spans: Sequence[Span]) -> None:
        """Copy them on the current stream without the device's multiprocessors. Does not wait."""
        ...

    def view(self, memory: DeviceBytes) -> Tensor:
        """[memory.num_bytes] uint8, the same memory."""
        ...

    def run(self, launch: Callable[[], T]) -> T:
        """Launch work on a stream beside the engine's and wait for it. From any thread; threads run in parallel.

        Raises RuntimeError with the driver's message.
        """
        ...


class CudaGpu:
    """A real GPU."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError without a libcudart."""
        from engine.kernels.gpu_pages import copy_pages

        self.copy_pages: CopyPages = copy_pages
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self.cudart = Cudart(find_cudart(), index)
        visible = range(torch.cuda.device_count())
        peers = [other for other in visible if other != index and torch.cuda.can_device_access_peer(index, other)]
        self.readable = tuple(str(torch.cuda.get_device_properties(one).uuid) for one in (index, *peers))
        self.uuid = self.readable[0]
        # of priority 0, which is CUDA's lowest: steps go first if their stream has a negative one
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def view(self, memory: DeviceBytes) -> Tensor:
        tensor = torch.as_tensor(memory, device=self._device)
        assert tensor.data_ptr() == memory.address, "a copy: peers would open other memory"
        return tensor

    def copy_spans(self, spans: Sequence[Span]) -> None:
        self.cudart.copy(spans, torch.cuda.current_stream(self._device).cuda_stream)

    def run(self, launch: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            result = launch()
            done = mark()
        done.synchronize()
        return result
