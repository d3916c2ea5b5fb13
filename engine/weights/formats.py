"""How products keep their weights. This one: plain. Others are satellites' (engine/compose.py chooses).

A format reads its own part of a checkpoint. No weight exists twice outside the page cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.layer_config import Activation
from engine.layers.linear import Embedding, Gated, GatedLinear, Linear, PlainLinear, WidenedLinear
from engine.ops.base import Ops
from engine.weights.reader import ShardReader
from engine.weights.table import Product


class Stack(NamedTuple):
    """A matrix of each expert, [E, N, K]."""

    codes: Tensor  # plain: the weights
    form: str = "plain"  # others: formats/stacks.py
    scale: Tensor | None = None
    second: Tensor | None = None


@dataclass(frozen=True)
class PlainFormat:
    """Weights in the model's dtype. Those that need neither conversion nor fusing stay in the file's mapping."""

    reader: ShardReader
    ops: Ops

    def linear(self, product: Product) -> Linear:
        return PlainLinear(self.reader.fuse(product), self.reader.bias(product))

    def gated(self, product: Product, activation: Activation = "silu") -> Gated:
        """gate and up of a product of two parts, joined."""
        return GatedLinear(self.linear(product), self.ops, activation)

    def stack(self, products: Sequence[Product]) -> Stack:
        """One of each expert, for kernels."""
        return Stack(torch.stack([self.reader.fuse(one) for one in products]))

    def embed(self, table: Product, head: Product) -> tuple[Embedding, Linear]:
        """The embedding, and the product to float32 logits; tied if both are equal."""
        weight = self.reader.fuse(table)
        return Embedding(weight), self._head(weight if head == table else self.reader.fuse(head))

    def _head(self, weight: Tensor) -> Linear:
        return WidenedLinear(weight)
