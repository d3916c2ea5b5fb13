"""Reads this rank's part of a checkpoint's tensors and reports progress. Knows neither models nor layouts."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.weights.checkpoint import Checkpoint
from engine.weights.table import WHOLE, Axis, Product, Shard, Vector

OnProgress = Callable[[int, int], None]  # (done_bytes, total_bytes) of the checkpoint
PAGE_BYTES = 4096


class Reader:
    """Reads each tensor once. A rank maps whole files, but touches only its own part of them."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: OnProgress,
        shard: Shard = WHOLE,
    ) -> None:  # fmt: skip
        """dtype, device: of the tensors that it returns."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self._on_progress = on_progress
        self._read: set[str] = set()
        self._read_bytes = 0
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.entries.values())

    def vector(self, vector: Vector) -> Tensor:
        """[n] in the model's dtype."""
        return self.take(vector.name, vector.axis)

    def take(self, name: str, rows: Axis, columns: Axis | None = None) -> Tensor:
        """[rows] or [rows, columns] in the model's dtype: a view of the file's mapping if it needs no conversion."""
        borrowed = self.borrow(name, rows, columns)
        tensor = borrowed.to(self.device, self.dtype)
        if tensor is borrowed:
            tensor = self._cut(self.checkpoint.tensor(name), rows, columns)
            tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()  # reads each page before the first request
        return tensor

    def borrow(self, name: str, rows: Axis, columns: Axis | None = None) -> Tensor:
        """Like `take`, but in the stored dtype on the CPU, to be read once."""
        self._count(name)
        return self._cut(self.checkpoint.borrow(name), rows, columns)

    def _cut(self, tensor: Tensor, rows: Axis, columns: Axis | None) -> Tensor:
        for axis, part in enumerate((rows,) if columns is None else (rows, columns)):
            own = part.of(self.shard)
            tensor = tensor.narrow(axis, own.start, len(own))
        return tensor.contiguous()

    def weights(self, product: Product) -> list[Tensor]:
        """Each part of a product, [n, K], borrowed."""
        return [self.borrow(f"{part.module}.weight", part.rows, product.inputs) for part in product.parts]

    def fuse(self, product: Product) -> Tensor:
        """[N, K] in the model's dtype. A product of one part: see `take`."""
        if len(product.parts) == 1:
            (part,) = product.parts
            return self.take(f"{part.module}.weight", part.rows, product.inputs)
        num_rows, depth = product.num_rows(self.shard), product.depth(self.shard)
        fused = torch.empty((sum(num_rows), depth), dtype=self.dtype, device=self.device)
        for rows, part in zip(torch.split(fused, num_rows), product.parts, strict=True):
            rows.copy_(self.borrow(f"{part.module}.weight", part.rows, product.inputs))
        return fused

    def biases(self, product: Product) -> list[Tensor]:
        """Each part's bias [n] in the model's dtype; empty if this rank adds none."""
        if not product.has_bias or (product.inputs.is_divided and self.shard.rank):
            return []
        return [self.take(f"{part.module}.bias", part.rows) for part in product.parts]

    def bias(self, product: Product) -> Tensor | None:
        """[N]"""
        biases = self.biases(product)
        return torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)

    def count(self, product: Product) -> None:
        """The product's tensors need not be read."""
        for stored in product.stored():
            self._count(stored.name)

    def _count(self, name: str) -> None:
        if name not in self._read:
            self._read.add(name)
            self._read_bytes += self.checkpoint.entries[name].num_bytes
            self._on_progress(self._read_bytes, self._total_bytes)

    def finish(self) -> None:
        """Reports all tensors as read, also those that the model ignores."""
        self._on_progress(self._total_bytes, self._total_bytes)
