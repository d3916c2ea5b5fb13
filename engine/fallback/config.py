"""A model that runs by transformers' own code, as a value. Imports no torch."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from engine.attention.shape import AttentionShape, group_layers
from wire.kv_layout import KvPart, StatePart


class KeptState(NamedTuple):
    """One state tensor of one layer, in transformers' cache."""

    layer: int
    number: int  # among the layer's states of that kind
    is_conv: bool  # else recurrent
    sizes: tuple[int, ...]  # of one sequence
    is_wide: bool  # float32 whatever the model's dtype


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """A model that runs by transformers' own code; what `ModelConfig` says of native ones. Built by fallback_probe."""

    family: str  # the model_type of transformers
    vocab_size: int  # V, logits of a token
    context_tokens: int  # most in a sequence
    attention_shapes: tuple[AttentionShape, ...]  # L values
    windows: tuple[int | None, ...]  # L values, as in ModelConfig
    has_sinks: bool  # some layers pass sinks to attention
    attention_modules: tuple[str, ...]  # L names in transformers' module tree
    kept_states: tuple[KeptState, ...] = ()  # of layers without attention, or beside it
    hidden_size: int = 0  # H
    depth: int = 0  # all layers

    @property
    def num_layers(self) -> int:
        """L, layers with attention."""
        return len(self.attention_shapes)

    @property
    def kv_parts(self) -> tuple[KvPart, ...]:
        return group_layers(self.attention_shapes)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """In the order of their first state. What the heads are is up to transformers: each part has one."""
        return tuple(
            StatePart(count, 1, size) for size, count in Counter(one.sizes for one in self.kept_states).items()
        )
