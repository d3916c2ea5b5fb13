"""The operations of a device. Called once, when an engine is built."""

import torch

from engine.kernels.cpu_layers import load
from engine.ops.base import Ops
from engine.ops.cpu import CpuOps


def ops_for(device: torch.device) -> Ops:
    """The kernels' operations on a GPU, and on a CPU with a compiler; elsewhere torch's."""
    if device.type == "cuda":
        from engine.ops.cuda import CudaOps

        return CudaOps()
    return CpuOps() if device.type == "cpu" and load() is not None else Ops()
