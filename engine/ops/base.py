"""A decoder's operations besides plain products and attention, by torch on any device: the twin of the kernels."""

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.layer_config import Activation
from engine.sampling.batch import SamplingBatch
from engine.sampling.sample import sample

LIMIT, SLOPE = 7.0, 1.702  # gpt-oss's clamp, and the steepness of its sigmoid
BLOCK_BYTES = 32 << 20  # of weights widened to float32 at a time

HALVES = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}  # whether torch multiplies them fast on this CPU

OpsT = TypeVar("OpsT", bound="Ops")


class Ops:
    """Sums are float32."""

    def find(self, kind: type[OpsT]) -> OpsT:
        """These operations with those that `kind` adds: the device's own if it has some, else torch's."""
        return self if isinstance(self, kind) else kind()

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm. rows: [T, H], weight: [H] |-> [T, H]"""
        if weight.dtype is not rows.dtype:  # Gemma's 1 + weight
            return functional.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype)
        return functional.rms_norm(rows, weight.shape, weight, eps)

    def add_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` in place, [T, H] float32; returns the norm of the sum in delta's dtype, [T, H]."""
        return functional.rms_norm(hidden.add_(delta), weight.shape, weight.float(), eps).to(delta.dtype)

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """The first half of each row, activated, times the second. [T, 2 I] |-> [T, I]. May overwrite `gate_up`."""
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return functional.silu(gate).mul_(up) if activation == "silu" else activate(gate, up, activation)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """See `sampling.sample.sample`. [S, V] float32 |-> [S] int64 on the same device. May modify `logits`."""
        return sample(logits, batch)


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """gate, up: [T, I] |-> [T, I] in their dtype; rounds like transformers. Does not modify its arguments."""
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))


def widen_slow(tensor: Tensor) -> Tensor:
    """In float32 if torch's products of its dtype are slow on its device: with AVX2, of bfloat16, 5 to 30 times."""
    is_fast = HALVES.get(tensor.dtype)
    return tensor.float() if is_fast is not None and tensor.is_cpu and not is_fast() else tensor


def multiply_widened(rows: Tensor, weight: Tensor) -> Tensor:
    """[S, K], [N, K] |-> [S, N] float32: any device, any dtype. Widens one block of weights at a time, for all rows."""
    num_outputs, depth = weight.shape
    wide = rows.float()  # [S, K]
    logits = torch.empty(len(rows), num_outputs, dtype=torch.float32, device=rows.device)
    step = max(1, BLOCK_BYTES // (4 * depth))
    for begin in range(0, num_outputs, step):
        block = weight[begin : begin + step].float()  # [at most step, K]
        logits[:, begin : begin + step] = functional.linear(wide, block)
    return logits
