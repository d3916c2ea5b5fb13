"""Copies between host and device that do not block the host."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels read int32 and int64 fields in vectors


def pin(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies of the arrays in one pinned buffer, from which a GPU copies without blocking the host.

    torch's allocator gets the buffer back with the last tensor, and reuses it only after the copies from it. If
    `device` is the CPU, the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    begins = find_begins(arrays)
    return _split(_pack(arrays, begins), arrays, begins)


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`, in one copy. On the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    begins = find_begins(arrays)
    return _split(_pack(arrays, begins).to(device, non_blocking=True), arrays, begins)


def find_begins(arrays: Iterable[NDArray[Any]]) -> list[int]:
    """Where each array begins in a block, in bytes; ends with the block's size."""
    return list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))


def _pack(arrays: Sequence[NDArray[Any]], begins: Sequence[int]) -> Tensor:
    """One after the other in pinned memory."""
    pinned = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    memory = pinned.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        memory[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    return pinned


def _split(block: Tensor, arrays: Sequence[NDArray[Any]], begins: Sequence[int]) -> list[Tensor]:
    return [
        block[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, begin in zip(arrays, begins, strict=False)
    ]


def download(tensor: Tensor) -> Tensor:
    """`tensor` on the host; complete once the device has done everything launched so far."""
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def mark() -> torch.cuda.Event:
    """An event after everything launched on this thread's stream. Waiting for it does not spin."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
