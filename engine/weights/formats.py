"""How products keep their weights: plain, rounded to 8 bits, packed for the CPU's kernel, or in few bits on a GPU.

A format reads its own part of a checkpoint. No weight exists twice outside the page cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu.packed import (
    NEVER,
    PANEL_COLUMNS,
    Epilogue,
    Matrix,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    PackedShape,
    choose_torch_rows,
    panel_order,
)
from engine.cpu.packed_groups import ROW_BITS, GroupsShape, PackedGroups, round_groups
from engine.experts.moe import BucketedExperts, Expert, Experts, GroupedExperts
from engine.formats.fp8 import E4M3, Fp8Matrix, has_fp8, quantise_rows
from engine.formats.groups import GROUP, Groups, join_groups, round_to_8_bits, store_groups
from engine.layers.config import Activation
from engine.layers.embedding import Embedding
from engine.layers.linear import (
    Fp8Linear,
    Gated,
    GatedLinear,
    GroupsLinear,
    Int8Linear,
    Linear,
    PlainLinear,
    Quantization,
    WidenedLinear,
    round_rows,
)
from engine.ops.base import Ops
from engine.weights.cache import Weights
from engine.weights.reader import ShardReader
from engine.weights.table import Product


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

    def experts(self, products: Sequence[tuple[Product, Product]], activation: Activation) -> Experts:
        """products: of each expert, gate and up, then down. On a GPU in the model's dtype, whatever the file has."""
        if self.reader.device.type == "cuda":
            ups, downs = zip(*products, strict=True)
            gate_up, down = (torch.stack([self.reader.fuse(one) for one in ones]) for ones in (ups, downs))
            up_bias, down_bias = self._stack_biases(ups), self._stack_biases(downs)
            return GroupedExperts(gate_up, down, activation, up_bias, down_bias, self.ops.expert_kernels)
        return BucketedExperts([Expert(self.gated(one, activation), self.linear(down)) for one, down in products])

    def _stack_biases(self, products: Sequence[Product]) -> Tensor | None:
        """[E, N]; None if this rank adds none."""
        biases = [bias for one in products if (bias := self.reader.bias(one)) is not None]
        return torch.stack(biases) if biases else None

    def embed(self, table: Product, head: Product) -> tuple[Embedding, Linear]:
        """The embedding, and the product to float32 logits; tied if both are equal."""
        weight = self.reader.fuse(table)
        return Embedding(weight), self._head(weight if head == table else self.reader.fuse(head))

    def _head(self, weight: Tensor) -> Linear:
        return WidenedLinear(weight)


class Int8Format(PlainFormat):
    """Weights and rows in 8 bits, by torch: the slow twin of `PackedFormat` in 8 bits."""

    def linear(self, product: Product) -> Linear:
        return Int8Linear(*round_rows(self.reader.fuse(product)), self.reader.bias(product))

    def _head(self, weight: Tensor) -> Linear:
        return Int8Linear(*round_rows(weight), dtype=torch.float32)


@dataclass(frozen=True)
class PackedFormat(PlainFormat):
    """Weights in tiles for the CPU's kernels, in memory that workers may share: bfloat16, 8 bits, or groups of 32.

    Weights that the file has in groups of no more bits than `quantization` wants stay as they are.
    """

    weights: Weights
    quantization: Quantization

    @property
    def torch_rows(self) -> int:
        return NEVER if self.quantization == "int8" else choose_torch_rows()

    def linear(self, product: Product) -> Linear:
        return PackedLinear(self._pack(product), self._bias(product), torch_rows=self.torch_rows)

    def gated(self, product: Product, activation: Activation = "silu") -> Gated:
        """See `PlainFormat.gated`. The kernel multiplies gate and up and joins them by silu."""
        if activation != "silu":
            return super().gated(product, activation)
        bias = self._bias(product, is_gated=True)
        return PackedLinear(self._pack(product, is_gated=True), bias, Epilogue.GATED, self.torch_rows)

    def embed(self, table: Product, head: Product) -> tuple[Embedding, Linear]:
        matrix = self._pack(head, bits=8)
        embedding = (
            PackedEmbedding(torch.empty(0, dtype=torch.bfloat16), matrix)
            if head == table
            else Embedding(self.reader.fuse(table))
        )
        return embedding, PackedLinear(matrix, epilogue=Epilogue.FLOATS)

    def _pack(self, product: Product, *, is_gated: bool = False, bits: int = 4) -> Matrix:
        """`is_gated`: the panels of both parts alternate. `bits`: if weights are rounded to groups."""
        matrix = self._pack_groups(product, is_gated, bits) or self._pack_tiles(product, is_gated)
        self.reader.count(product)  # a cache file may have it already
        return matrix

    def _pack_groups(self, product: Product, is_gated: bool, bits: int) -> PackedGroups | None:
        """None if the file does not have the weights in groups and they are not rounded to any."""
        num_rows, depth = product.num_rows(self.reader.shard), product.depth(self.reader.shard)
        begin, parts = f"{_name(product)}#", list[Groups]()
        name = self.weights.find(begin)
        if name is not None:
            shape = GroupsShape.named(name.removeprefix(begin), sum(num_rows), depth)
        else:
            parts = find_groups(self.reader, product, self.quantization, bits)
            if not parts:
                return None
            shape = GroupsShape.of(*parts, row_bits=8 if self.quantization == "int4" and bits == 4 else ROW_BITS)
            name = begin + shape.name

        def fill(memory: Tensor) -> None:
            matrix = PackedGroups(memory, shape)
            if is_gated:
                for half, part in enumerate(parts):
                    matrix.fill(part, half, 2)
            else:
                matrix.fill(join_groups(parts))

        return PackedGroups(self.weights.take(name, shape.num_bytes, fill), shape)

    def _pack_tiles(self, product: Product, is_gated: bool) -> PackedMatrix:
        num_rows = product.num_rows(self.reader.shard)
        shape = PackedShape(sum(num_rows), product.depth(self.reader.shard), self.quantization == "int8")

        def fill(memory: Tensor) -> None:
            matrix, weights = PackedMatrix(memory, shape), self.reader.weights(product)
            if is_gated:
                for half, weight in enumerate(weights):
                    matrix.fill(weight.to(torch.bfloat16), half, 2)
            elif any(count % PANEL_COLUMNS for count in num_rows[:-1]):
                matrix.fill(torch.cat([weight.to(torch.bfloat16) for weight in weights]))
            else:
                for index, weight in enumerate(weights):
                    matrix.fill(weight.to(torch.bfloat16), sum(num_rows[:index]) // PANEL_COLUMNS)

        return PackedMatrix(self.weights.take(_name(product), shape.num_bytes, fill), shape)

    def _bias(self, product: Product, *, is_gated: bool = False) -> Tensor | None:
        biases = [bias.float() for bias in self.reader.biases(product)]
        return panel_order(biases, is_gated) if biases else None


@dataclass(frozen=True)
class GpuFormat(PlainFormat):
    """Weights on a GPU in the bits that the file has, as groups or e4m3, or rounded to groups of 4 bits if it has more.

    Plain stay embedding, head and experts; weights in other forms, products of which only some parts are in groups,
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

    def _find_groups(self, product: Product) -> Linear | None:
        reader, parts = self.reader, find_groups(self.reader, product, self.quantization)
        if not parts:
            return None
        return GroupsLinear(store_groups(join_groups(parts), reader.device), reader.bias(product), self.ops)

    def _find_fp8(self, product: Product) -> Linear | None:
        reader = self.reader
        is_kept = self.quantization == "none" and reader.dtype is not torch.float16
        parts = reader.fp8(product) if is_kept else None
        if parts is None or not has_fp8(reader.device):
            return None
        codes, scale = (torch.cat(tensors).to(reader.device) for tensors in zip(*parts, strict=True))
        return Fp8Linear(Fp8Matrix(codes, scale), reader.bias(product), self.ops)


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
        return Fp8Linear(Fp8Matrix(codes, scale), self.reader.bias(product), self.ops)


def find_groups(reader: ShardReader, product: Product, quantization: Quantization, bits: int = 4) -> list[Groups]:
    """Each part of a product, in equally many bits: the file's own, or with int4 at most `bits`; else none."""
    stored, is_rounded = reader.groups(product), quantization == "int4"
    rounded = round_groups if bits == 4 else round_to_8_bits
    if stored is not None:
        found = [
            rounded(part.dense().to(torch.bfloat16)) if is_rounded and part.bits > bits else part for part in stored
        ]
        most = max(part.bits for part in found)
        return [part._replace(bits=most) for part in found]  # codes of 4 bits are codes of 8
    if not is_rounded or product.depth(reader.shard) % GROUP:
        return []
    return [rounded(weight.to("cpu", torch.bfloat16)) for weight in reader.weights(product)]


def _name(product: Product) -> str:
    """Of its packed weights: unlike any other product's."""
    part = product.parts[0]
    return part.weight if part.index is None else f"{part.weight}.{part.index}"


def choose_format(reader: ShardReader, ops: Ops, quantization: Quantization, weights: Weights | None) -> PlainFormat:
    """weights: memory for packed ones; None: they are not packed. In float32, a file's codes become floats."""
    if weights is not None:
        return PackedFormat(reader, ops, weights, quantization)
    if quantization == "int8":
        return Int8Format(reader, ops)
    if quantization == "fp8":
        return Fp8Format(reader, ops)
    is_coded = reader.device.type == "cuda" and reader.dtype is not torch.float32
    return GpuFormat(reader, ops, quantization) if is_coded else PlainFormat(reader, ops)
