"""Reads this rank's part of a checkpoint's tensors and reports progress."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.weights.checkpoint import FLOATS, Checkpoint, FormT
from engine.weights.table import WHOLE, Axis, Part, Product, Shard, Vector

OnProgress = Callable[[int, int], None]  # (done_bytes, total_bytes) of the checkpoint
PAGE_BYTES = 4096


class ShardReader:
    """A rank maps whole files, but touches only its own part of them."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: OnProgress,
        shard: Shard = WHOLE,
    ) -> None:  # fmt: skip
        """dtype, device: of the tensors that it returns, unless it says otherwise."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self._on_progress = on_progress
        self._read: set[str] = set()
        self._read_bytes = 0
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.entries.values())

    def vector(self, vector: Vector, dtype: torch.dtype | None = None) -> Tensor:
        """[n]"""
        self._count(vector.name)
        tensor = _rows_of(self.checkpoint.tensor(vector.name), vector.axis, self.shard)
        return tensor.to(self.device, dtype or self.dtype)

    def weights(self, product: Product) -> list[Tensor]:
        """Each part of a product, [n, K], in the stored dtype on the CPU, to be read once."""
        return [self._weight(product, part) for part in product.parts]

    def coded(self, product: Product, form: type[FormT]) -> list[FormT] | None:
        """Each part of a product, [n, K], if the file has them all in a form of few bits. Counts nothing."""
        found = []
        for part in product.parts:
            is_direct = part.is_transposed == (part.index is not None)  # only stacked ones are the transpose's
            stored = self.checkpoint.coded(part.weight, part.index) if is_direct else None
            matrix = None if stored is None else stored.find(form)
            own = None if matrix is None else self._cut(matrix, product, part)
            if own is None:
                return None
            found.append(own)
        return found

    def fuse(self, product: Product) -> Tensor:
        """[N, K]: a view of the file's mapping if it is one part that needs no conversion."""
        if len(product.parts) > 1:
            num_rows, depth = product.num_rows(self.shard), product.depth(self.shard)
            fused = torch.empty((sum(num_rows), depth), dtype=self.dtype, device=self.device)
            for rows, weight in zip(torch.split(fused, num_rows), self.weights(product), strict=True):
                rows.copy_(weight)
            return fused
        (borrowed,) = self.weights(product)
        tensor = borrowed.to(self.device, self.dtype)
        if tensor is borrowed and self.checkpoint.entries[product.parts[0].weight].dtype in FLOATS:
            tensor = self._weight(product, product.parts[0], is_kept=True)
            tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()  # reads each page before the first request
        return tensor

    def biases(self, product: Product) -> list[Tensor]:
        """Each part's bias [n]; empty if this rank adds none."""
        found = []
        for part in product.parts:
            if part.bias is not None and not (product.inputs.is_divided and self.shard.rank):
                self._count(part.bias)
                own = cut_rows(_matrix(self.checkpoint.tensor(part.bias), part), part, self.shard)
                found.append(own.to(self.device, self.dtype))
        return found

    def bias(self, product: Product) -> Tensor | None:
        """[N]"""
        biases = self.biases(product)
        return torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)

    def _weight(self, product: Product, part: Part, *, is_kept: bool = False) -> Tensor:
        self._count(part.weight)
        stored = self.checkpoint.coded(part.weight, part.index)
        if stored is None:
            tensor = _matrix(self.checkpoint.tensor(part.weight, is_kept=is_kept), part)
        else:
            tensor = stored.dense() if part.index is None else stored.dense().T
        columns = product.inputs.of(self.shard)
        rows = cut_rows(tensor.T if part.is_transposed else tensor, part, self.shard)
        return rows.narrow(1, columns.start, len(columns)).contiguous()

    def _cut(self, matrix: FormT, product: Product, part: Part) -> FormT | None:
        """The part's own; None if its columns cut what shares a scale."""

        def cut(rows: Tensor) -> Tensor:
            return cut_rows(rows, part, self.shard)

        columns = product.inputs.of(self.shard)
        return matrix.each(cut).columns(columns.start, len(columns))

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


def _matrix(tensor: Tensor, part: Part) -> Tensor:
    """The part's own, if there are several."""
    if part.is_conv:
        return tensor.squeeze(1)
    return tensor if part.index is None else tensor[part.index]


def cut_rows(stored: Tensor, part: Part, shard: Shard) -> Tensor:
    """The shard's rows of a part, of the rows that its tensors have."""
    return _rows_of(stored[part.first : part.first + part.step * part.rows.size : part.step], part.rows, shard)


def _rows_of(tensor: Tensor, rows: Axis, shard: Shard) -> Tensor:
    own = rows.of(shard)
    tensor = tensor.narrow(0, own.start, len(own))
    if rows.order:
        tensor = tensor.unflatten(0, (-1, rows.width))[:, list(rows.order)].flatten(0, 1)  # type: ignore[no-untyped-call]
    return tensor
