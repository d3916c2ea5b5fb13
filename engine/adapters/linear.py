"""Products whose rows may have adapters (LoRA)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.adapters.ops import AdapterOps
from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.layers.linear import Extended, Gated, Linear


@dataclass(slots=True, eq=False)
class AdaptersStep:
    """Adapters of the rows that products get in the running step. See `adapters.slots`."""

    tiles: AdapterTiles | None = None  # of the rows that they get now; None: none has an adapter
    outputs: AdapterTiles | None = None  # the same of rows with logits


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """The adapters (LoRA) of one product, in all slots."""

    weights: AdapterWeights
    step: AdaptersStep
    ops: AdapterOps
    panel_columns: int  # see `Gated`

    @property
    def is_idle(self) -> bool:
        return self.step.tiles is None

    def add_(self, out: Tensor, rows: Tensor) -> Tensor:
        """out: [T, N], the product of rows [T, K]; changed in place and returned."""
        if self.step.tiles is not None:
            self.ops.add_adapters_(out, rows.contiguous(), self.step.tiles, self.weights)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLinear(Extended):
    """A product whose rows may have adapters: y = x W^T + b + B A x."""

    own: Linear
    site: Site

    def __call__(self, rows: Tensor) -> Tensor:
        return self.site.add_(self.own(rows), rows)

    @property
    def is_idle(self) -> bool:
        return self.site.is_idle


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedGated(Extended):
    """The same for a product that joins gate and up."""

    own: Gated
    site: Site

    def __call__(self, rows: Tensor) -> Tensor:
        if self.site.is_idle:
            return self.own(rows)
        return self.own.join(self.site.add_(self.own.split(rows), rows))

    @property
    def is_idle(self) -> bool:
        return self.site.is_idle


def interleave_panels(parts: Sequence[Tensor], width: int) -> Tensor:
    """[n, ...] of each part |-> [N padded, ...]: their panels of `width`, the last of each padded by zeros, in turn."""
    padded = [functional.pad(part, (*(0, 0) * (part.dim() - 1), 0, -len(part) % width)) for part in parts]
    return torch.stack([part.view(-1, width, *part.shape[1:]) for part in padded], 1).flatten(0, 2)
