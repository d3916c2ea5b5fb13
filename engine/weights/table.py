"""The names of a model's weights in its checkpoint, their sizes, how they are fused, and each rank's part of them.

The only place that says so: checking a checkpoint, cutting it for ranks and loading it follow from these values.
Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wire.kv_layout import heads_of


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Axis:
    """`count` units of `width` elements: heads, neurons, words. Ranks divide the units, or each has all of them.

    With more ranks than units, several ranks have the same unit.
    """

    count: int
    width: int = 1
    is_divided: bool = True
    order: tuple[int, ...] = ()  # the elements of each unit that are read, in order; empty: all, as stored

    @property
    def size(self) -> int:
        return self.count * self.width

    def of(self, shard: Shard) -> range:
        """The shard's elements."""
        units = heads_of(self.count, shard.rank, shard.size) if self.is_divided else range(self.count)
        return range(units.start * self.width, units.stop * self.width)

    def num_read(self, shard: Shard) -> int:
        """How many of them are read."""
        return len(self.of(shard)) // self.width * (len(self.order) or self.width)


def undivided(size: int, order: tuple[int, ...] = ()) -> Axis:
    """An axis that each rank has whole, as one unit."""
    return Axis(1, size, is_divided=False, order=order)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint, whole."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weights and the like: [axis.size]."""

    name: str
    axis: Axis

    def stored(self) -> Iterator[Stored]:
        yield Stored(self.name, (self.axis.size,))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a product, and their biases: all of the tensors `weight` and `bias`, or some of them.

    Within the tensors: rows first, first + step, ... of matrix `index`. A transposed matrix is stored as [K, rows], a
    convolution of K positions as [rows, 1, K].
    """

    weight: str
    rows: Axis
    bias: str | None = None
    num_stored: int = 0  # rows of the tensors; 0: these
    first: int = 0
    step: int = 1
    index: int | None = None  # in stacked tensors
    num_stacked: int = 0
    is_transposed: bool = False
    is_conv: bool = False

    def stored_shape(self, depth: int | None) -> tuple[int, ...]:
        """depth: K; None: of the bias."""
        num_rows = self.num_stored or self.rows.size
        if depth is not None and self.is_conv:
            return (num_rows, 1, depth)
        shape = (num_rows,) if depth is None else (depth, num_rows) if self.is_transposed else (num_rows, depth)
        return shape if self.index is None else (self.num_stacked, *shape)


def module(name: str, rows: Axis, has_bias: bool = False) -> Part:
    """The rows of a module of the checkpoint."""
    return Part(f"{name}.weight", rows, f"{name}.bias" if has_bias else None)


def packed(name: str, parts: list[Axis], has_bias: bool = False) -> tuple[Part, ...]:
    """Several parts in one module, one after the other."""
    one = module(name, Axis(sum(rows.size for rows in parts)), has_bias)
    firsts = [sum(rows.size for rows in parts[:index]) for index in range(len(parts))]
    return tuple(
        replace(one, rows=rows, num_stored=one.rows.size, first=first)
        for rows, first in zip(parts, firsts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W^T + b, where W [N, K] has the rows of all `parts`, one part after the other.

    If ranks divide the inputs, their results have to be added; the bias is then rank 0's.
    """

    parts: tuple[Part, ...]
    inputs: Axis

    def stored(self) -> Iterator[Stored]:
        for part in self.parts:
            yield Stored(part.weight, part.stored_shape(self.inputs.size))
            if part.bias is not None:
                yield Stored(part.bias, part.stored_shape(None))

    def num_rows(self, shard: Shard) -> list[int]:
        """Rows of each part that a rank reads."""
        return [part.rows.num_read(shard) for part in self.parts]

    def depth(self, shard: Shard) -> int:
        """K"""
        return len(self.inputs.of(shard))


Weight = Vector | Product
