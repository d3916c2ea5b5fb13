"""Times the kernel's products beside torch's, in milliseconds at start: on this machine the faster one is taken."""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine.weights.cache import OwnWeights
from engine.weights.packed import NEVER, PackedLinear, PackedMatrix, PackedShape

SIZE = 2048  # outputs and depth
FROM_ROWS = {128: 32, 8: 4, 1: 1}  # rows that are timed |-> the range that they stand for begins here
CLEARLY = 1.25  # times as fast: a difference that other work on the machine does not make
TRIES = 3


@cache
def choose_torch_rows() -> int:
    """From how many rows on torch's product, with unpacking, is clearly faster than the kernel; NEVER as a rule.

    It happens where torch uses instructions that the compiler does not know, such as AMX with GCC 10.
    """
    matrix = pack(torch.randn(SIZE, SIZE, dtype=torch.bfloat16))
    kernel, by_torch = PackedLinear(matrix), PackedLinear(matrix, torch_rows=0)
    chosen = NEVER
    for num_rows, first in FROM_ROWS.items():
        rows = torch.randn(num_rows, SIZE, dtype=torch.bfloat16)
        if CLEARLY * time_best(lambda: by_torch(rows)) > time_best(lambda: kernel(rows)):  # noqa: B023  called here
            break
        chosen = first
    return chosen


def pack(weight: Tensor, *, is_8bit: bool = False) -> PackedMatrix:
    """[N, K] bfloat16, in memory of its own."""
    shape = PackedShape(len(weight), weight.shape[1], is_8bit)
    memory = OwnWeights().take("", shape.num_bytes, lambda memory: PackedMatrix(memory, shape).fill(weight))
    return PackedMatrix(memory, shape)


def time_best(call: Callable[[], Tensor]) -> float:
    """Seconds, the best of few tries."""
    call()
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)
