"""How products keep weights in few bits: those of a file, or rounded to 8 or 4 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.formats.fp8 import E4M3, Fp8Matrix, has_fp8, quantise_rows
from engine.formats.groups import GROUP, Groups, join_groups, round_to_8_bits, store_groups
from engine.formats.linear import Fp8Linear, GroupsLinear, Int8Linear, round_rows
from engine.formats.ops import FormatOps
from engine.formats.stacks import stack_fp8, stack_groups
from engine.layers.linear import Linear, Quantization
from engine.weights.formats import PlainFormat, Stack
from engine.weights.reader import ShardReader
from engine.weights.table import Product


class Int8Format(PlainFormat):
    """Weights and rows in 8 bits, by torch: the slow twin of `PackedFormat` in 8 bits."""

    def linear(self, product: Product) -> Linear:
        return Int8Linear(*round_rows(self.reader.fuse(product)), self.reader.bias(product))

    def _head(self, weight: Tensor) -> Linear:
        return Int8Linear(*round_rows(weight), dtype=torch.float32)


@dataclass(frozen=True)
class GpuFormat(PlainFormat):
    """Weights on a GPU in the bits that the file has, as groups or e4m3, or rounded to groups of 4 bits if it has more.

    Plain stay embedding and head; weights in other forms, products of which only some parts are in groups,
    those of a rank whose columns cut a group or block, and e4m3 on a GPU that cannot multiply it or in a float16 model,
    whose rows are not rounded to e4m3.
    """

    quantization: Quantization  # none or int4

    def linear(self, product: Product) -> Linear:
        found = self._find_groups(product) or self._find_fp8(product)
        if found is None:
            return super().linear(product)
        self.reader.count(product)
        return found

    def stack(self, products: Sequence[Product]) -> Stack:
        """As above, but experts are not rounded; in float16 models they keep e4m3, too."""
        reader, device = self.reader, self.reader.device
        groups = [found for one in products if (found := reader.coded(one, Groups))]
        if len(groups) == len(products) and len({part.bits for one in groups for part in one}) == 1:
            stack = stack_groups(groups, device)
        else:
            fp8 = [matrices for one in products if has_fp8(device) and (matrices := find_fp8(reader, one))]
            if len(fp8) < len(products):
                return super().stack(products)
            stack = stack_fp8(fp8, device)
        for one in products:
            reader.count(one)
        return stack

    def _find_groups(self, product: Product) -> Linear | None:
        reader, parts = self.reader, find_groups(self.reader, product, self.quantization, self.ops.find(FormatOps))
        if not parts:
            return None
        return GroupsLinear(
            store_groups(join_groups(parts), reader.device), reader.bias(product), self.ops.find(FormatOps)
        )

    def _find_fp8(self, product: Product) -> Linear | None:
        reader = self.reader
        is_kept = self.quantization == "none" and reader.dtype is not torch.float16
        parts = find_fp8(reader, product) if is_kept else None
        if parts is None or not has_fp8(reader.device):
            return None
        codes, scale = (torch.cat(tensors).to(reader.device) for tensors in zip(*parts, strict=True))
        return Fp8Linear(Fp8Matrix(codes, scale), reader.bias(product), self.ops.find(FormatOps))


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
        return Fp8Linear(Fp8Matrix(codes, scale), self.reader.bias(product), self.ops.find(FormatOps))


def find_fp8(reader: ShardReader, product: Product) -> list[Fp8Matrix] | None:
    """Each part of a product, if the file has them all in e4m3 with scales alike."""
    found = reader.coded(product, Fp8Matrix)
    return found if found and len({matrix.scale.ndim for matrix in found}) == 1 else None


def find_groups(
    reader: ShardReader, product: Product, quantization: Quantization, ops: FormatOps, bits: int = 4
) -> list[Groups]:
    """Each part of a product, in equally many bits: the file's own, or with int4 at most `bits`; else none."""
    stored, is_rounded = reader.coded(product, Groups), quantization == "int4"
    rounded = ops.round_groups if bits == 4 else round_to_8_bits
    if stored is not None:
        found = [
            rounded(part.dense().to(torch.bfloat16)) if is_rounded and part.bits > bits else part for part in stored
        ]
        most = max(part.bits for part in found)
        return [part._replace(bits=most) for part in found]  # codes of 4 bits are codes of 8
    if not is_rounded or product.depth(reader.shard) % GROUP:
        return []
    return [rounded(weight.to("cpu", torch.bfloat16)) for weight in reader.weights(product)]
