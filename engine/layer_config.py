"""Settings of what layers compute, which config readers fill: activations and ropes. No torch."""

import math
from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped"]  # what joins gate and up, see ops/base.py
ImageAttention = Literal["causal", "windows", "all"]  # layers where the tokens of one image see each other
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")  # the keys of rope.FREQUENCIES
MAX_LOGITS_AT_ONCE = 1 << 25  # of a step: 128 MiB of float32, 262 rows of 128,000 tokens


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rope, all values resolved. Fields that a kind does not use keep their defaults."""

    kind: str  # one of ROPE_KINDS
    theta: float  # base wavelength
    factor: float = 1.0  # context extension; linear, llama3, yarn, proportional
    original_context: int = 0  # positions seen in pre-training; llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin; yarn, longrope
    rotated_dims: int = 0  # of each head, the first ones; 0: all
    factors: tuple[float, ...] = ()  # of each wavelength; longrope
    short_factors: tuple[float, ...] = ()  # the same for contexts up to the original one
    turned_share: float = 1.0  # of the pairs, the first ones; the others stay as they are; proportional
    axes: tuple[int, ...] = ()  # what turns each pair at an image token, 0: its time, 1: row, 2: column; empty: one

    def within(self, context_tokens: int) -> "RopeConfig":
        """For sequences of at most so many tokens. transformers changes longrope's frequencies with the longest
        position of a batch; here a model has one set."""
        is_short = self.kind == "longrope" and context_tokens <= self.original_context
        return replace(self, factors=self.short_factors) if is_short else self


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The paper's temperature as a multiplier of cos and sin; the `mscale`s are DeepSeek's refinement."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return temperature(mscale) / temperature(mscale_all_dim) if mscale and mscale_all_dim else temperature(1.0)


def rope_order(rotated_dims: int, head_dim: int, *, is_interleaved: bool) -> tuple[int, ...]:
    """The dimensions of a head in the order that makes its pairs (i, i + D / 2), rotated ones first.

    q·k is the same if queries and keys have the same order. Empty: as it is.
    """
    turned, rest = list(range(rotated_dims or head_dim)), list(range(rotated_dims or head_dim, head_dim))
    half = len(turned) // 2
    firsts, seconds = (turned[::2], turned[1::2]) if is_interleaved else (turned[:half], turned[half:])
    order = (*firsts, *rest[: len(rest) // 2], *seconds, *rest[len(rest) // 2 :])
    return () if order == tuple(range(head_dim)) else order
