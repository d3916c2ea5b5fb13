"""How this CPU multiplies fastest, how fast, and how fast it reads: measured by cpu_math.cpp."""

import ctypes
import mmap
import time
from enum import IntEnum
from functools import cache

import numpy as np

from engine.cpu.build import find_instruction_set, load_kernel

ROUNDS, TRIES = 2000, 8  # a try takes 0.1 ms or so
READ_BYTES = 512 << 20  # more than caches hold


class Math(IntEnum):
    """How bfloat16 is multiplied; enum MathKind of cpu_products.h. With 8 bits PAIRS are products of four codes."""

    WIDENED = 0  # to float32; 8 bits: to 16
    PAIRS = 1
    TILES = 2  # AMX, or Arm's products of two rows and two columns


HOW = {Math.WIDENED: "as float32", Math.PAIRS: "in pairs", Math.TILES: "in tiles"}


@cache
def choose_math(is_8bit: bool = False) -> Math:
    """The fastest way. Instructions for bfloat16 can be slower than float32's: Intel's for pairs take four times as
    long, for twice the products. The same in all processes of a host. Raises BuildError."""
    rates = {math: measure_rate(math, is_8bit) for math in Math}
    return max(rates, key=lambda math: rates[math])


def describe_math() -> str:
    """For the log: what kernels are built for, and how they multiply bfloat16."""
    return f"{find_instruction_set()}, bfloat16 {HOW[choose_math()]}"


def measure_rate(
    math: Math, is_8bit: bool, num_threads: int = 1, rounds: int = ROUNDS, *, has_loads: bool = False
) -> float:
    """Operations a second that registers allow, the best of several tries; 0 if this CPU has no such math.

    `has_loads`: tiles are loaded from L1 for each product. Where a core's other thread is busy, that takes far longer.
    """
    kernel = _load()
    if math is Math.TILES and not kernel.baton_request_tiles():
        return 0.0
    best = 0.0
    for _ in range(TRIES):
        began = time.perf_counter()
        done = kernel.baton_multiply_registers(math, is_8bit, has_loads, rounds, num_threads)
        best = max(best, num_threads * done / (time.perf_counter() - began))
    return best


def measure_reading(num_threads: int) -> float:
    """Bytes a second that this many threads read from memory, the best of several tries."""
    share = READ_BYTES // num_threads // 4096 * 4096
    memory = mmap.mmap(-1, share * num_threads + 3 * 4096)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = np.frombuffer(memory, np.uint8)
    values.fill(1)
    best = 0.0
    for _ in range(TRIES):
        began = time.perf_counter()
        _load().baton_read(values.ctypes.data, share * num_threads, num_threads)
        best = max(best, share * num_threads / (time.perf_counter() - began))
    return best


@cache
def _load() -> ctypes.CDLL:
    kernel = load_kernel("cpu_math")
    kernel.baton_multiply_registers.argtypes = [*[ctypes.c_int] * 3, ctypes.c_int64, ctypes.c_int]
    kernel.baton_multiply_registers.restype = ctypes.c_double
    kernel.baton_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    kernel.baton_read.restype = ctypes.c_int64
    return kernel
