"""Adds adapters' part to products, by torch on any device: the twin of the kernels."""

import torch
from torch import Tensor

from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.ops.base import Ops


class AdapterOps(Ops):
    """Sums are float32."""

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
