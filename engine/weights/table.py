"""What a model's weights are called in its checkpoint, their sizes, how they are fused, and each rank's part of them.

The only place that says so: checking a checkpoint, cutting it for ranks and loading it follow from these values.
Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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

    @property
    def size(self) -> int:
        return self.count * self.width

    def of(self, shard: Shard) -> range:
        """The shard's elements."""
        units = heads_of(self.count, shard.rank, shard.size) if self.is_divided else range(self.count)
        return range(units.start * self.width, units.stop * self.width)


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
    """Rows of a product: those of one module of the checkpoint, which has `weight` and perhaps `bias`."""

    module: str
    rows: Axis


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W^T + b, where W [N, K] has the rows of all `parts`, one part after the other.

    If ranks divide the inputs, their results have to be added; the bias is then rank 0's.
    """

    parts: tuple[Part, ...]
    inputs: Axis
    has_bias: bool = False

    def stored(self) -> Iterator[Stored]:
        for part in self.parts:
            yield Stored(f"{part.module}.weight", (part.rows.size, self.inputs.size))
            if self.has_bias:
                yield Stored(f"{part.module}.bias", (part.rows.size,))

    def num_rows(self, shard: Shard) -> list[int]:
        """Of each part."""
        return [len(part.rows.of(shard)) for part in self.parts]

    def depth(self, shard: Shard) -> int:
        """K"""
        return len(self.inputs.of(shard))


Weight = Vector | Product
