"""Weights packed for the CPU's kernels."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu.cache import Weights, share_weights
from engine.cpu.packed import (
    NEVER,
    PANEL_COLUMNS,
    Epilogue,
    Matrix,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    PackedShape,
    can_pack,
    choose_torch_rows,
    panel_order,
)
from engine.cpu.packed_groups import ROW_BITS, GroupsShape, PackedGroups
from engine.formats.groups import Groups, join_groups
from engine.formats.ops import FormatOps
from engine.formats.products import find_groups
from engine.layer_config import Activation
from engine.layers.linear import Embedding, Gated, Linear, Quantization
from engine.models.load import DecoderT, OpenFormat, Source
from engine.weights.files import ReadHeader
from engine.weights.fingerprint import weight_fingerprint
from engine.weights.folders import SMALLEST_FILE_BYTES, CannotShareError, cache_folder
from engine.weights.formats import PlainFormat
from engine.weights.table import Product

PACKED_VERSION = 4  # of the layout of packed weights, and of how they are chosen


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
            parts = find_groups(self.reader, product, self.quantization, self.ops.find(FormatOps), bits)
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


def _name(product: Product) -> str:
    """The name of a product's packed weights, unlike any other product's."""
    part = product.parts[0]
    return part.weight if part.index is None else f"{part.weight}.{part.index}"


def is_packed(source: Source) -> bool:
    """Whether the kernels multiply its weights packed."""
    is_here = source.device.torch.type == "cpu" and source.dtype is torch.bfloat16
    return is_here and source.quantization != "fp8" and can_pack()


def build_packed(build: Callable[[OpenFormat], DecoderT], source: Source, read_header: ReadHeader) -> DecoderT:
    """`build` with packed weights: in a file that workers share, if they are large."""

    def pack(weights: Weights) -> DecoderT:
        return build(lambda reader, ops: PackedFormat(reader, ops, weights, source.quantization))

    shapes = (entry.shape for entry in source.checkpoint.entries.values())
    num_bytes = 2 * sum(map(math.prod, shapes)) // source.ranks.size  # at most
    if num_bytes < SMALLEST_FILE_BYTES:
        return pack(Weights())
    try:
        shared = share_weights(cache_folder(), name_weights(source, read_header), num_bytes, pack)
    except (CannotShareError, OSError) as error:  # of which a folder that cannot be made
        decoder = pack(Weights())
        decoder.why_unshared = str(error)
        return decoder
    decoder = pack(shared)
    decoder.mapped_bytes = shared.num_bytes
    return decoder


def name_weights(source: Source, read_header: ReadHeader) -> str:
    """The file name of packed weights: a hash of everything they depend on."""
    fingerprint = weight_fingerprint(source.folder, source.quantization, read_header)
    parts = [PACKED_VERSION, fingerprint, source.ranks.rank, source.ranks.size]
    parts += [source.part] if source.part else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
