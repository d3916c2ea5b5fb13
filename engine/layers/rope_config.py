"""What config.json says of rotary position embedding, as a value. The mathematics is in rope.py. Imports no torch."""

import math
from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "llama3", "yarn")  # the keys of rope.FREQUENCIES


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rope, all values resolved. Fields that a kind does not use keep their defaults."""

    kind: str  # one of ROPE_KINDS
    theta: float  # base wavelength
    factor: float = 1.0  # context extension; linear, llama3, yarn
    original_context: int = 0  # positions seen in pre-training; llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin; yarn


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The paper's temperature as a multiplier of cos and sin; the `mscale`s are DeepSeek's refinement."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return temperature(mscale) / temperature(mscale_all_dim) if mscale and mscale_all_dim else temperature(1.0)
