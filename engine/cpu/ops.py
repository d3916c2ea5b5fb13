"""Operations on a CPU: cpu_layers.cpp for bfloat16, cpu_states.cpp for float32 too, torch for other dtypes."""

import torch
from torch import Tensor

from engine.adapters.ops import AdapterOps
from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.cpu import cpu_adapters, cpu_layers, cpu_states
from engine.cpu.cpu_sampling import sample_on_cpu
from engine.cpu.packed_groups import round_groups
from engine.formats.groups import Groups
from engine.formats.ops import FormatOps
from engine.hybrids.ops import RecurrentOps
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv
from engine.layers.mixer import StateRows
from engine.sampling.batch import SamplingBatch


class CpuOps(FormatOps, AdapterOps, RecurrentOps):
    """See `Ops`. `gate` is torch's: packed products have their own."""

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        if cpu_layers.fits(rows, weight):
            return cpu_layers.norm(rows, weight, eps)
        return super().norm(rows, weight, eps)

    def add_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        is_sum = hidden.dtype is torch.float32 and hidden.is_contiguous() and hidden.shape == delta.shape
        if is_sum and cpu_layers.fits(delta, weight):
            return cpu_layers.add_norm(hidden, delta, weight, eps)
        return super().add_norm_(hidden, delta, weight, eps)

    def add_adapters_(self, out: Tensor, rows: Tensor, tiles: AdapterTiles, weights: AdapterWeights) -> None:
        add = cpu_adapters.add_adapters_ if cpu_adapters.can_add(out, rows) else super().add_adapters_
        add(out, rows, tiles, weights)

    def gated_conv(self, rows: Tensor, layer: GatedConv, at: StateRows, states: Tensor) -> Tensor:
        if cpu_states.fits_gated_conv(rows, *layer, *at[:3], states):
            return cpu_states.gated_conv(rows, *layer, *at[:3], states)
        return super().gated_conv(rows, layer, at, states)

    def delta_net(self, rows: Tensor, layer: DeltaNet, at: StateRows, states: DeltaStates) -> Tensor:
        if cpu_states.fits_delta_net(rows, *layer[4:], *at[:3], *states):
            return cpu_states.delta_net(rows, *layer[4:], *at[:3], *states)
        return super().delta_net(rows, layer, at, states)

    def round_groups(self, rows: Tensor) -> Groups:
        return round_groups(rows)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample_on_cpu(logits, batch)
