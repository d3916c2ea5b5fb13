"""What a decoder does besides plain products and attention, by torch on any device: the twin of the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.formats.fp8 import Fp8Matrix
from engine.formats.groups import StoredGroups
from engine.hybrids import recurrent
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv, StateRows
from engine.layers.config import Activation
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import SamplingTensors
from engine.sampling.sample import read_fields, sample

LIMIT, SLOPE = 7.0, 1.702  # gpt-oss's clamp, and the steepness of its sigmoid
BLOCK_BYTES = 32 << 20  # of weights widened to float32 at a time


class Ops:
    """Sums are float32."""

    expert_kernels: Any = None  # kernels.gpu_experts on a GPU

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

    def multiply_fp8(self, rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """rows: [T, K]; codes, scale: a `Fp8Matrix`, [N, K]; bias: [N] |-> [T, N] in the dtype of the rows."""
        if scale.ndim == 1:
            product = multiply_widened(rows, codes).mul_(scale)  # [T, N]
        else:
            product = multiply_widened(rows, Fp8Matrix(codes, scale).dense())
        return (product if bias is None else product.add_(bias)).to(rows.dtype)

    def multiply_gated_fp8(
        self, gate_up: Tensor, activation: Activation, codes: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`multiply_fp8` of what `gate` makes of gate_up: [T, 2 K]."""
        return self.multiply_fp8(self.gate(gate_up, activation), codes, scale, bias)

    def multiply_groups(self, rows: Tensor, weight: StoredGroups, bias: Tensor | None) -> Tensor:
        """rows: [T, K], weight: [N, K], bias: [N] |-> [T, N] in the dtype of the rows, to which weights are rounded."""
        product = multiply_widened(rows, weight.dense().to(rows.dtype))
        return (product if bias is None else product.add_(bias)).to(rows.dtype)

    def add_adapters_(self, out: Tensor, rows: Tensor, tiles: AdapterTiles, weights: AdapterWeights) -> None:
        """Add B A x to the rows of `out`, [T, N], for those of `rows`, [T, K], that have an adapter."""
        max_rank = weights.b.shape[1]
        for slot, first, count in tiles.tiles.tolist():
            if slot < 0 or not weights.ranks[slot]:
                continue
            own = tiles.rows[first : first + count].long()
            shrunk = rows[own].float() @ weights.a[slot].float().T  # [count, P R]
            added = torch.zeros(count, out.shape[1], device=out.device)
            for begin, end, part in weights.blocks.tolist():
                part_of = shrunk[:, part * max_rank : (part + 1) * max_rank]
                added[:, begin:end] = part_of @ weights.b[slot, :, begin:end].float()
            out[own] = (out[own].float() + added).to(out.dtype)

    def gated_conv(self, rows: Tensor, layer: GatedConv, at: StateRows, states: Tensor) -> Tensor:
        """LFM2's short convolution: out gate * conv(gate * value). Reads the states at `sources`, writes to `targets`.

        rows: [T, 3 C], contiguous columns: gates, out gates, values |-> [T, C] in the dtype of the rows.
        states: [num_slots, N, C / N, K - 1] float32, the last gate * value of each channel, oldest first; a head's are
        contiguous.
        """
        return recurrent.gated_conv(rows, layer, at, states)

    def delta_net(self, rows: Tensor, layer: DeltaNet, at: StateRows, states: DeltaStates) -> Tensor:
        """Qwen3.5's Gated DeltaNet between its projections. Reads the states at `sources`, writes to `targets`.

        rows: [T, 2 Hk Kd + 2 Hv Vd + 2 Hv], contiguous columns: queries, keys and values before the convolution, z of
        the output's gate [Hv Vd], b [Hv] and a [Hv] |-> [T, Hv Vd] in the dtype of the rows.
        """
        return recurrent.delta_net(rows, layer, at, states)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """See `sampling.sample.sample`. [S, V] float32 |-> [S] int64 on the same device. May modify `logits`."""
        return sample(logits, batch)

    def sample_into(self, out: Tensor, logits: Tensor, fields: SamplingTensors) -> None:
        """`sample` into `out`, [S] int64, with fields on the logits' device. Does not modify `logits`."""
        out.copy_(sample(logits.clone(), read_fields(fields)))


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """gate, up: [T, I] |-> [T, I] in their dtype; rounds like transformers. Does not modify its arguments."""
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))


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
