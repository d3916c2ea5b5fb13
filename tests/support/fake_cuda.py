"""A GPU over host memory: the engine's own calls go to fake_cudart.cpp, kernels run in the interpreter."""

import ctypes
import gc
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine.cpu.build import find_compiler
from engine.cuda.cuda_memory import Cudart, DeviceBytes, Span
from engine.cuda.gpu import Gpu
from engine.cuda.gpu_pages import copy_pages
from engine.weights.folders import cache_folder

SOURCE = Path(__file__).with_name("fake_cudart.cpp")
T = TypeVar("T")


@cache
def fake_cudart() -> str:
    """The library's path; builds the library if it is missing."""
    path = cache_folder() / f"fake_cudart-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not path.exists():
        building = path.with_suffix(f".{os.getpid()}")
        subprocess.run([*find_compiler(), "-shared", "-fPIC", "-o", str(building), str(SOURCE)], check=True)
        building.rename(path)
    return str(path)


class FakeGpu(Gpu):
    """All processes share one GPU."""

    def __init__(self) -> None:
        self.cudart = Cudart(fake_cudart(), 0)
        self.uuid = "gpu-0"
        self.readable = (self.uuid,)
        self.copy_pages = copy_pages

    def view(self, memory: DeviceBytes) -> Tensor:
        buffer = (ctypes.c_ubyte * memory.num_bytes).from_address(memory.address)
        buffer.owner = memory  # type: ignore[attr-defined]  # as long as the tensor
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def copy_spans(self, spans: Sequence[Span]) -> None:
        self.cudart.copy(spans, 0)

    def run(self, launch: Callable[[], T]) -> T:
        return launch()


def count_opened() -> int:
    """Number of other processes' allocations that are mapped here."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:fake-cuda")
