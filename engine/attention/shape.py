"""What attention is told of a model. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wire.kv_layout import KvPart


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is the same in all layers of a part of the pages, mostly in all layers of a model."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    scale: float  # multiplies q·k, usually D ** -0.5
    softcap: float = 0.0  # a score s = q·k * scale becomes softcap * tanh(s / softcap), before the mask; 0: none


def group_layers(shapes: Sequence[AttentionShape]) -> tuple[KvPart, ...]:
    """Shapes of all layers |-> parts of a page. Layers with equal shapes are one part, in the order of their first."""
    return tuple(KvPart(count, shape.num_kv_heads, shape.head_dim) for shape, count in Counter(shapes).items())
