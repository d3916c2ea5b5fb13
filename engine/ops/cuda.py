"""Operations on a GPU, by Triton's kernels. Imports Triton: only `ops_for` imports this, where there is a GPU."""

import torch
from torch import Tensor

from engine.kernels import gpu_experts, gpu_layers, gpu_linear, gpu_sampling
from engine.kernels.sampling_fields import SamplingTensors
from engine.layers.moe_config import Activation
from engine.ops.base import Ops
from engine.sampling import gpu
from engine.sampling.batch import SamplingBatch
from engine.weights.fp8 import can_round, multiply_rounded


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
        if len(rows) <= gpu_linear.MAX_ROWS:
            return gpu_linear.multiply(rows, codes, scale, bias)
        if can_round(codes) and rows.dtype is torch.bfloat16:
            return multiply_rounded(rows, codes, scale, bias)
        return super().multiply_fp8(rows, codes, scale, bias)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        batch.check(logits)
        return gpu.sample(logits, batch)

    def sample_into(self, out: Tensor, logits: Tensor, fields: SamplingTensors) -> None:
        gpu_sampling.choose_tokens(logits, fields, out)
