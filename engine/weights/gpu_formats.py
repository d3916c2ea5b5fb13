"""How products keep their weights on GPUs in fewer bits than the model's dtype. One class each.

Embedding, head and experts stay plain.
"""

import torch
from torch import Tensor

from engine.layers.linear import Linear, Quantization
from engine.ops.base import Ops
from engine.weights.formats import PlainFormat, find_groups
from engine.weights.fp8 import Fp8Linear, has_fp8, quantise_rows
from engine.weights.fp8_matrix import E4M3
from engine.weights.groups import join_groups
from engine.weights.reader import Reader
from engine.weights.stored_groups import StoredGroups, store_groups
from engine.weights.table import Product


class GroupsLinear:
    """y = x W^T + b with W in groups of 32 along K."""

    __slots__ = ("_bias", "_ops", "_weight")

    def __init__(self, weight: StoredGroups, bias: Tensor | None, ops: Ops) -> None:
        """bias: [N] in the model's dtype."""
        self._weight = weight
        self._bias = bias
        self._ops = ops

    def __call__(self, rows: Tensor) -> Tensor:
        return self._ops.multiply_groups(rows, self._weight, self._bias)


class GpuFormat(PlainFormat):
    """Weights in the bits that the file has, as groups or e4m3, or rounded to groups of 4 bits if it has more.

    Plain are those of other forms, products of which only some parts are in groups, those of a rank whose columns cut a
    group or block, and e4m3 on a GPU that cannot multiply it or in a float16 model, whose rows are not rounded to e4m3.
    """

    def __init__(self, reader: Reader, ops: Ops, quantization: Quantization) -> None:
        """quantization: none or int4."""
        super().__init__(reader, ops)
        self._quantization = quantization

    def linear(self, product: Product) -> Linear:
        found = self._find_groups(product) or self._find_fp8(product)
        if found is None:
            return super().linear(product)
        self.reader.count(product)
        return found

    def _find_groups(self, product: Product) -> Linear | None:
        reader, parts = self.reader, find_groups(self.reader, product, self._quantization)
        if not parts:
            return None
        return GroupsLinear(store_groups(join_groups(parts), reader.device), reader.bias(product), self.ops)

    def _find_fp8(self, product: Product) -> Linear | None:
        reader = self.reader
        is_kept = self._quantization == "none" and reader.dtype is not torch.float16
        parts = reader.fp8(product) if is_kept else None
        if parts is None or not has_fp8(reader.device):
            return None
        codes, scale = (torch.cat(tensors).to(reader.device) for tensors in zip(*parts, strict=True))
        return Fp8Linear(codes, scale, reader.bias(product), self.ops)


class Fp8Format(PlainFormat):
    """Weights rounded to 8 bits, each part on its device."""

    def linear(self, product: Product) -> Linear:
        num_rows, device = product.num_rows(self.reader.shard), self.reader.device
        codes = torch.empty((sum(num_rows), product.depth(self.reader.shard)), dtype=E4M3, device=device)
        scale = torch.empty(sum(num_rows), dtype=torch.float32, device=device)
        rows = zip(torch.split(codes, num_rows), torch.split(scale, num_rows), strict=True)
        for (own_codes, own_scale), weight in zip(rows, self.reader.weights(product), strict=True):
            found_codes, found_scale = quantise_rows(weight.to(device))
            own_codes.copy_(found_codes)
            own_scale.copy_(found_scale)
        return Fp8Linear(codes, scale, self.reader.bias(product), self.ops)
