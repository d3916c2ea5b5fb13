"""What layers compute, as data that config readers fill: activations, routing, ropes, recurrent layers. No torch."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from wire.kv_layout import StatePart

Activation = Literal["silu", "gelu_tanh", "clamped"]  # what joins gate and up, see ops/base.py
Scoring = Literal["softmax", "sigmoid"]
ImageAttention = Literal["causal", "windows", "all"]  # layers where the tokens of one image see each other
# float32: scores and weights. rounded: float32, then weights rounded to the model's dtype. logits: the logits' dtype.
Precision = Literal["float32", "rounded", "logits"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")  # the keys of rope.FREQUENCIES
MAX_LOGITS_AT_ONCE = 1 << 25  # of a step: 128 MiB of float32, 262 rows of 128,000 tokens
SLOT_TILES = (16, 64)  # rows an expert multiplies at once on a GPU: where it has up to so many on average, and more
LARGE_DEVICE_BYTES = 38 << 30  # a GPU of 40 GB or more computes four times as many: all answers fit one captured step


def most_logits(memory_bytes: float) -> int:
    """Of a step, computed at once, on a GPU with so much memory; 0: on a CPU."""
    return MAX_LOGITS_AT_ONCE << (2 if memory_bytes >= LARGE_DEVICE_BYTES else 0)


@dataclass(frozen=True, slots=True)
class Routing:
    """How each row chooses top_k of num_experts, and their weights; `route` applies it. ValueError if inconsistent."""

    num_experts: int  # E
    top_k: int  # k
    scoring: Scoring = "softmax"
    scores_all: bool = True  # False: experts are chosen by logits, and the chosen logits scored (gpt-oss)
    # The choice is within the top_groups of num_groups groups. A group's score is the sum of its group_peaks best.
    num_groups: int = 1
    top_groups: int = 1
    group_peaks: int = 1
    renormalise: bool = False  # divide the weights by their sum + epsilon
    epsilon: float = 0.0
    scale: float = 1.0  # routed_scaling_factor
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts cannot be chosen")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"{self.num_experts} experts, of which {self.top_groups} in {self.num_groups} groups")
        group_size = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * group_size or self.group_peaks > group_size:
            raise ValueError(f"groups of {group_size} experts are too small for {self}")


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
        """In the order of recurrent.DeltaStates. float32."""
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
        return {}  # besides the heads of attention

    def divide(self, size: int) -> "GatedConvConfig":
        return replace(self, num_heads=self.num_heads // size)

    def state_parts(self, num_layers: int) -> tuple[StatePart, ...]:
        return (StatePart(num_layers, self.num_heads, (self.head_dim, self.kernel - 1)),)


Recurrent = DeltaNetConfig | GatedConvConfig
