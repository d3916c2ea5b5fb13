"""Reads a model's tensors from a checkpoint and gives each product the layout that suits the device.

Plain weights that need neither conversion nor fusing stay in the file's mapping; fused ones are filled part by part, so
no weight exists twice outside the page cache. Quantised weights are rounded tensor by tensor, on their device. Knows
neither models nor names.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.layers.embedding import Embedding
from engine.layers.head import WidenedLinear
from engine.layers.linear import GatedLinear, Linear, PlainLinear, Quantization
from engine.ops.base import choose_operations
from engine.weights.cache import Weights
from engine.weights.checkpoint import Checkpoint
from engine.weights.fp8 import E4M3, Fp8Linear, quantise_rows
from engine.weights.int8 import Int8Linear, round_rows
from engine.weights.packed import (
    NEVER,
    PANEL_COLUMNS,
    Epilogue,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    PackedShape,
    panel_order,
)
from engine.weights.product_speed import choose_torch_rows

OnProgress = Callable[[int, int], None]  # (done_bytes, total_bytes) of the checkpoint
PAGE_BYTES = 4096


class Loader:
    """Takes each tensor once and counts bytes for progress. Weights are plain, or quantised for a GPU or by torch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization = "none",
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._on_progress = on_progress
        self._quantization = quantization
        self._done_bytes = 0
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.entries.values())

    def take(self, name: str) -> Tensor:
        """The tensor in the model's dtype and device: a view of the mapping if it needs no conversion."""
        borrowed = self.checkpoint.borrow(name)
        tensor = borrowed.to(self.device, self.dtype)
        if tensor is borrowed:
            tensor = self.checkpoint.tensor(name)
            tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()  # reads each page before the first request
        self._count([name])
        return tensor

    def fuse(self, names: Sequence[str]) -> Tensor:
        """The tensors concatenated by rows, [sum of rows, ...]; a single one as `take` returns it."""
        if len(names) == 1:
            return self.take(names[0])
        shapes = [self.checkpoint.entries[name].shape for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(fused, [shape[0] for shape in shapes]), strict=True):
            part.copy_(self.checkpoint.borrow(name))
        self._count(names)
        return fused

    def linear(self, names: Sequence[str], biases: Sequence[str]) -> Linear:
        """The product with the weights `names` concatenated by rows, and either all of their biases or none."""
        bias = self.fuse(biases) if biases else None
        if self._quantization == "none":
            return PlainLinear(self.fuse(names), bias)
        if self._quantization == "int8":
            return Int8Linear(*round_rows(self.fuse(names)), bias)
        codes, scale = self._round_to_fp8(names)
        return Fp8Linear(codes, scale, bias)

    def gated(self, names: Sequence[str], biases: Sequence[str]) -> Linear:
        """silu(gate) * up of the two products `names`."""
        return GatedLinear(self.linear(names, biases), choose_operations(self.device))

    def embed(self, table: str, head: str) -> tuple[Embedding, Linear]:
        """The embedding, and the product to float32 logits; tied if both names are the same."""
        weight = self.take(table)
        head_weight = weight if head == table else self.take(head)
        if self._quantization == "int8":
            return Embedding(weight), Int8Linear(*round_rows(head_weight), dtype=torch.float32)
        return Embedding(weight), WidenedLinear(head_weight)

    def finish(self) -> None:
        """Reports the ignored tensors as done."""
        self._on_progress(self._total_bytes, self._total_bytes)

    def _round_to_fp8(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[sum of rows, K] e4m3 and [sum of rows] float32, from the tensors in their stored dtype, one at a time."""
        num_rows = [self.checkpoint.entries[name].shape[0] for name in names]
        depth = self.checkpoint.entries[names[0]].shape[1]
        codes = torch.empty((sum(num_rows), depth), dtype=E4M3, device=self.device)
        scale = torch.empty(sum(num_rows), dtype=torch.float32, device=self.device)
        parts = zip(names, torch.split(codes, num_rows), torch.split(scale, num_rows), strict=True)
        for name, part_codes, part_scale in parts:
            found_codes, found_scale = quantise_rows(self.checkpoint.borrow(name).to(self.device))
            part_codes.copy_(found_codes)
            part_scale.copy_(found_scale)
        self._count(names)
        return codes, scale

    def _count(self, names: Sequence[str]) -> None:
        self._done_bytes += sum(self.checkpoint.entries[name].num_bytes for name in names)
        self._on_progress(self._done_bytes, self._total_bytes)


class PackedLoader(Loader):
    """Packs the weights of products for the CPU's kernel, in bfloat16 or 8 bits. Other tensors: see `Loader`."""

    def __init__(
        self, checkpoint: Checkpoint, on_progress: OnProgress, quantization: Quantization, weights: Weights
    ) -> None:
        super().__init__(checkpoint, torch.bfloat16, torch.device("cpu"), on_progress, quantization)
        self._weights = weights
        self._torch_rows = NEVER if quantization == "int8" else choose_torch_rows()

    def linear(self, names: Sequence[str], biases: Sequence[str]) -> Linear:
        return PackedLinear(self._pack(names), self._arrange(biases), torch_rows=self._torch_rows)

    def gated(self, names: Sequence[str], biases: Sequence[str]) -> Linear:
        """See `Loader.gated`. One product computes both."""
        bias = self._arrange(biases, is_gated=True)
        return PackedLinear(self._pack(names, is_gated=True), bias, Epilogue.GATED, self._torch_rows)

    def embed(self, table: str, head: str) -> tuple[Embedding, Linear]:
        matrix = self._pack([head])
        embedding = PackedEmbedding(matrix) if head == table else Embedding(self.take(table))
        return embedding, PackedLinear(matrix, epilogue=Epilogue.FLOATS)

    def _pack(self, names: Sequence[str], *, is_gated: bool = False) -> PackedMatrix:
        """The tensors concatenated by rows; `is_gated`: two tensors whose panels alternate."""
        shapes = [self.checkpoint.entries[name].shape for name in names]
        num_rows = [shape[0] for shape in shapes]
        shape = PackedShape(sum(num_rows), shapes[0][1], self._quantization == "int8")

        def fill(memory: Tensor) -> None:
            matrix = PackedMatrix(memory, shape)
            if is_gated:
                for half, name in enumerate(names):
                    matrix.fill(self._borrow(name), half, 2)
            elif any(count % PANEL_COLUMNS for count in num_rows[:-1]):
                matrix.fill(torch.cat([self._borrow(name) for name in names]))
            else:
                for index, name in enumerate(names):
                    matrix.fill(self._borrow(name), sum(num_rows[:index]) // PANEL_COLUMNS)

        matrix = PackedMatrix(self._weights.take(names[0], shape.num_bytes, fill), shape)
        self._count(names)
        return matrix

    def _borrow(self, name: str) -> Tensor:
        return self.checkpoint.borrow(name).to(torch.bfloat16)

    def _arrange(self, biases: Sequence[str], *, is_gated: bool = False) -> Tensor | None:
        return panel_order([self.take(name).float() for name in biases], is_gated) if biases else None
