"""What stands in the place of attention in some layers of a model, in numbers. The states are in float32.

The arithmetic is in recurrent.py. Imports no torch.
"""

from dataclasses import dataclass, replace

from wire.kv_layout import StatePart


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Gated DeltaNet (Qwen3.5): a convolution over queries, keys and values, then a memory of each value head."""

    num_key_heads: int  # Hk, of queries too
    num_value_heads: int  # Hv, a multiple of Hk
    key_dim: int  # Kd
    value_dim: int  # Vd
    kernel: int  # K, positions that a convolution sees

    @property
    def divisible(self) -> dict[str, int]:
        """What ranks divide: its name |-> size. Value heads go with their key heads."""
        return {"linear_num_key_heads": self.num_key_heads}

    def divide(self, size: int) -> "DeltaNetConfig":
        """What one of `size` ranks has."""
        num_key_heads, num_value_heads = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)

    def state_parts(self, num_layers: int) -> tuple[StatePart, ...]:
        """In the order of recurrent.DeltaStates."""
        keys = StatePart(num_layers, self.num_key_heads, (self.key_dim, self.kernel - 1))
        values = StatePart(num_layers, self.num_value_heads, (self.value_dim, self.kernel - 1))
        memory = StatePart(num_layers, self.num_value_heads, (self.key_dim, self.value_dim))
        return keys, keys, values, memory


@dataclass(frozen=True, slots=True)
class GatedConvConfig:
    """A short convolution between two gates (LFM2). Its channels are divided like the heads of attention."""

    num_heads: int  # N
    head_dim: int  # channels of a head: H / N
    kernel: int  # K, positions that the convolution sees
    has_bias: bool

    @property
    def divisible(self) -> dict[str, int]:
        """What ranks divide besides the heads of attention."""
        return {}

    def divide(self, size: int) -> "GatedConvConfig":
        """What one of `size` ranks has."""
        return replace(self, num_heads=self.num_heads // size)

    def state_parts(self, num_layers: int) -> tuple[StatePart, ...]:
        return (StatePart(num_layers, self.num_heads, (self.head_dim, self.kernel - 1)),)


Recurrent = DeltaNetConfig | GatedConvConfig
