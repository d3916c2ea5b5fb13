"""What attention is told of a model. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is the same in all layers of a part of the pages, mostly in all layers of a model."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    scale: float  # multiplies q·k, usually D ** -0.5
    softcap: float = 0.0  # a score s = q·k * scale becomes softcap * tanh(s / softcap), before the mask; 0: none
