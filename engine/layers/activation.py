"""How the gate and up halves of an MLP's first product join, by torch: the slow twin of the fused kernels."""

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.moe_config import Activation

LIMIT, SLOPE = 7.0, 1.702  # gpt-oss's clamp, and the steepness of its sigmoid


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """gate, up: [T, I] |-> [T, I] in their dtype; rounds like transformers. Does not modify its arguments."""
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))
