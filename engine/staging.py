"""A step's arrays: ragged ranges in numpy, without a Python loop over their elements, and copies to the device and
back that do not block the host.

`np.count_nonzero` instead of `any`: on a step's few numbers it takes a quarter of the time.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
ALIGNMENT = 16  # bytes; kernels read int32 and int64 fields in vectors


def join_ranges(begins: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """[N], [N] -> owner and value of each element of the ranges [begin, begin + count), one after the other."""
    every = np.arange(len(counts), dtype=np.int64)
    if not np.count_nonzero(counts != 1):  # a plain decode step
        return every, begins
    owners = np.repeat(every, counts)
    firsts: Ints = counts.cumsum()
    firsts -= counts  # index of each range's first element
    return owners, np.arange(len(owners), dtype=np.int64) + (begins - firsts)[owners]


def find_starts(counts: Ints) -> NDArray[np.int32]:
    """[N] -> [N + 1] start of each part; ends with the sum."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.add.accumulate(counts, out=starts[1:])
    return starts


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
