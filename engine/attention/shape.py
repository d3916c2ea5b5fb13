"""Shapes and constants of a model's attention. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wire.kv_layout import KvPart


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Properties that all layers of a part of the pages share, mostly all layers of a model."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    scale: float  # multiplies q·k, usually D ** -0.5
    softcap: float = 0.0  # a score s = q·k * scale becomes softcap * tanh(s / softcap), before the mask; 0: none
    value_dim: int = 0  # Dv, where values are the keys' first Dv; 0: they are beside the keys, of D
    expanded: tuple[int, int] = (0, 0)  # with value_dim: dims of keys and values of the Hq heads that stand for them

    @property
    def kept_numbers(self) -> int:
        """Numbers that a page keeps of a token."""
        return self.num_kv_heads * self.head_dim * (1 if self.value_dim else 2)

    def part(self, num_layers: int) -> KvPart:
        """The part of a page that so many such layers take."""
        return KvPart(num_layers, self.num_kv_heads, self.head_dim, not self.value_dim)


def group_layers(shapes: Sequence[AttentionShape]) -> tuple[KvPart, ...]:
    """Shapes of all layers |-> parts of a page. Layers with equal shapes are one part, in the order of their first."""
    return tuple(shape.part(count) for shape, count in Counter(shapes).items())
