"""What the engine knows of a model without native code. Imports no torch; `fallback_probe` fills it."""

from dataclasses import dataclass

from engine.attention.shape import AttentionShape, group_layers
from wire.kv_layout import KvPart


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """The part of `ModelConfig` that is not about native code. Immutable."""

    family: str  # the model_type of transformers
    vocab_size: int  # V, logits of a token
    context_tokens: int  # most in a sequence
    attention_shapes: tuple[AttentionShape, ...]  # L values
    windows: tuple[int | None, ...]  # L values, as in ModelConfig
    has_sinks: bool  # some layers pass sinks to attention
    attention_modules: tuple[str, ...]  # L names in transformers' module tree

    @property
    def num_layers(self) -> int:
        """L, layers with attention."""
        return len(self.attention_shapes)

    @property
    def kv_parts(self) -> tuple[KvPart, ...]:
        return group_layers(self.attention_shapes)
