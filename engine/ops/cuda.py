"""Operations on a GPU, by Triton's kernels. Imports Triton: only `ops_for` imports this, where there is a GPU."""

import torch
from torch import Tensor

from engine.kernels import gpu_blocks, gpu_experts, gpu_groups, gpu_layers, gpu_linear, gpu_sampling
from engine.kernels.sampling_fields import SamplingTensors
from engine.layers.moe_config import Activation
from engine.ops.base import Ops
from engine.sampling import gpu
from engine.sampling.batch import SamplingBatch
from engine.weights.fp8 import E4M3_MAX, SMALLEST_PEAK, can_round, multiply_codes
from engine.weights.fp8_matrix import BLOCK
from engine.weights.stored_groups import StoredGroups


class CudaOps(Ops):
    """See `Ops`."""

    expert_kernels = gpu_experts

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return gpu_layers.add_norm(rows, None, weight, eps)

    def add_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return gpu_layers.add_norm(hidden, delta, weight, eps)

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        return gpu_layers.gate(gate_up) if activation == "silu" else super().gate(gate_up, activation)

    def multiply_fp8(self, rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Few rows are multiplied as they are; many are rounded to e4m3 like the weights, if their sizes allow."""
        has_blocks = scale.ndim == 2
        if len(rows) <= gpu_linear.MAX_ROWS:
            multiply = gpu_blocks.multiply if has_blocks else gpu_linear.multiply
            return multiply(rows, codes, scale, bias)
        if not can_round(codes, scale) or rows.dtype is not torch.bfloat16:
            return super().multiply_fp8(rows, codes, scale, bias)
        return multiply_rounded(rows, codes, scale, bias)

    def multiply_groups(self, rows: Tensor, weight: StoredGroups, bias: Tensor | None) -> Tensor:
        """Few rows are multiplied by the codes; for many, a part of the weights at a time is widened to their dtype."""
        multiply = gpu_groups.multiply if len(rows) <= gpu_linear.MAX_ROWS else gpu_groups.multiply_many
        return multiply(rows, *weight, bias)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        batch.check(logits)
        return gpu.sample(logits, batch)

    def sample_into(self, out: Tensor, logits: Tensor, fields: SamplingTensors) -> None:
        gpu_sampling.choose_tokens(logits, fields, out)


def multiply_rounded(rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """rows: [T, K] bfloat16, which `can_round` like the weights |-> [T, N] bfloat16. See `Ops.multiply_fp8`."""
    if scale.ndim == 1:
        return multiply_codes(*gpu_layers.round_rows(rows, SMALLEST_PEAK, E4M3_MAX), codes, scale, bias)
    rounded, row_scale = gpu_layers.round_rows(rows.reshape(-1, BLOCK), SMALLEST_PEAK, E4M3_MAX)
    row_scale = row_scale.view(len(rows), -1)
    return gpu_blocks.multiply_rounded(rounded.view(rows.shape), row_scale, codes, scale, bias, rows.dtype)
