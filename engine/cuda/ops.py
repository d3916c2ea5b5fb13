"""Operations on a GPU, by Triton's kernels. Imports Triton: only `CudaDevice` imports this, where there is a GPU."""

import torch
from torch import Tensor

from engine.adapters.ops import AdapterOps
from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.cpu import sampling_checks as checks
from engine.cpu.packed_groups import round_groups
from engine.cuda import (
    gpu_adapters,
    gpu_blocks,
    gpu_experts,
    gpu_groups,
    gpu_layers,
    gpu_linear,
    gpu_sampling,
    gpu_states,
)
from engine.cuda import sampling as gpu
from engine.cuda.field_ops import FieldOps
from engine.cuda.fields import SamplingTensors
from engine.experts.ops import ExpertOps
from engine.formats.fp8 import BLOCK, E4M3_MAX, SMALLEST_PEAK, can_round, multiply_codes
from engine.formats.groups import Groups, StoredGroups
from engine.formats.ops import FormatOps
from engine.hybrids.ops import RecurrentOps
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv
from engine.layer_config import Activation
from engine.layers.mixer import StateRows
from engine.sampling.batch import SamplingBatch


class CudaOps(FormatOps, ExpertOps, RecurrentOps, AdapterOps, FieldOps):
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
            multiply = gpu_linear.multiply if scale.ndim == 1 else gpu_blocks.multiply
            return multiply(rows, codes, scale, bias)
        if not _is_rounded(rows, codes, scale):
            return super().multiply_fp8(rows, codes, scale, bias)
        return multiply_rounded(rows, codes, scale, bias)

    def multiply_gated_fp8(
        self, gate_up: Tensor, activation: Activation, codes: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        if activation == "silu" and _is_rounded(gate_up, codes, scale):
            return multiply_rounded(gate_up, codes, scale, bias, has_gate=True)
        return super().multiply_gated_fp8(gate_up, activation, codes, scale, bias)

    def multiply_groups(self, rows: Tensor, weight: StoredGroups, bias: Tensor | None) -> Tensor:
        """Few rows are multiplied by the codes; for many, a part of the weights at a time is widened to their dtype."""
        multiply = gpu_groups.multiply if len(rows) <= gpu_groups.MAX_ROWS else gpu_groups.multiply_many
        return multiply(rows, *weight, bias)

    def add_adapters_(self, out: Tensor, rows: Tensor, tiles: AdapterTiles, weights: AdapterWeights) -> None:
        gpu_adapters.add_adapters_(out, rows, tiles, weights)

    def gated_conv(self, rows: Tensor, layer: GatedConv, at: StateRows, states: Tensor) -> Tensor:
        return gpu_states.gated_conv(rows, *layer, *at[:3], states)

    def delta_net(self, rows: Tensor, layer: DeltaNet, at: StateRows, states: DeltaStates) -> Tensor:
        return gpu_states.delta_net(rows, *layer[4:], *at[:3], *states)

    def round_groups(self, rows: Tensor) -> Groups:
        return round_groups(rows)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if checks.ARE_ON:
            checks.check_sampling(batch, logits)
        return gpu.sample(logits, batch)

    def sample_into(self, out: Tensor, logits: Tensor, fields: SamplingTensors) -> None:
        gpu_sampling.choose_tokens(logits, fields, out)


def _is_rounded(rows: Tensor, codes: Tensor, scale: Tensor) -> bool:
    return len(rows) > gpu_linear.MAX_ROWS and rows.dtype is not torch.float32 and can_round(codes, scale)


def multiply_rounded(
    rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, has_gate: bool = False
) -> Tensor:  # fmt: skip
    """rows: [T, K] in 16 bits, which `can_round` like the weights; or [T, 2 K], gated by SiLU first |-> [T, N]."""
    width = codes.shape[1] if scale.ndim == 1 else BLOCK
    rounded, row_scale = gpu_layers.round_rows(rows, width, SMALLEST_PEAK, E4M3_MAX, has_gate)
    if scale.ndim == 1:
        return multiply_codes(rounded, row_scale, codes, scale, None if bias is None else bias.bfloat16()).to(
            rows.dtype
        )
    return gpu_blocks.multiply_rounded(rounded, row_scale, codes, scale, bias, rows.dtype)
