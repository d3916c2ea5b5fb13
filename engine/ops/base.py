"""A decoder's elementwise work: norms and the gate. The slow twin of kernels/gpu_layers.py."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional


class Operations:
    """Elementwise work on rows. This class: by torch, on any device; on a GPU one kernel each. Sums are float32."""

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm. rows: [T, H], weight: [H] |-> [T, H]"""
        return functional.rms_norm(rows, weight.shape, weight, eps)

    def add_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` in place, both [T, H]; returns the norm of the sum, [T, H]."""
        return self.norm(hidden.add_(delta), weight, eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of each row times the second. [T, 2 I] |-> [T, I]. May overwrite `gate_up`."""
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return functional.silu(gate).mul_(up)


def choose_operations(device: torch.device) -> Operations:
    """Triton's on a GPU, where it comes with torch; on a CPU the C++ kernel's. Triton is not imported elsewhere."""
    if device.type == "cpu":
        operations: Operations = importlib.import_module("engine.kernels.cpu_layers").choose()
    elif device.type == "cuda":
        operations = importlib.import_module("engine.kernels.gpu_layers").TritonOperations()
    else:
        operations = Operations()
    return operations
