"""The operations of a device. Called once, when an engine is built."""

import torch

from engine.cpu.cpu_layers import load
from engine.cpu.ops import CpuOps
from engine.ops.base import Ops


def ops_for(device: torch.device) -> Ops:
    """The kernels' operations on a GPU, and on a CPU with a compiler; elsewhere torch's."""
    if device.type == "cuda":
        from engine.cuda.ops import CudaOps

        return CudaOps()
    return CpuOps() if device.type == "cpu" and load() is not None else Ops()
