"""A decoder as one frozen value: all that its tensors and its order of operations depend on. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from engine.attention.shape import AttentionShape, group_layers
from engine.layers.moe_config import Activation, Routing
from engine.layers.rope_config import RopeConfig
from engine.weights.scheme import Scheme
from wire.kv_layout import KvPart

QkNorm = Literal["none", "head", "width"]  # over each head of query and key, or over all heads together
ExpertLayout = Literal["per_expert", "w1w2w3", "alternating"]  # of experts in a checkpoint, see models/table.py


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms in a checkpoint; None: the layer has none there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts in the place of MLPs. Modules: names below the layer's."""

    routing: Routing
    inner_size: int  # of each expert
    router: str  # module of the product whose outputs are scored
    experts: str
    layout: ExpertLayout
    has_biases: bool = False  # of the router and of all products
    choice_bias: str | None = None  # tensor; None: scores alone decide
    has_wide_router: bool = False  # logits are computed in float32
    shared: str | None = None  # module of an MLP for all rows
    shared_size: int = 0  # its inner size


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None  # tokens a query sees, itself included; None: all of them
    rope: int | None = 0  # index in ModelConfig.ropes; None: no rotation
    is_moe: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Built by `load_config`; immutable."""

    family: str  # a key of FAMILIES
    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    rms_eps: float
    is_tied: bool  # lm_head shares the embedding
    layers: tuple[LayerConfig, ...]  # L values
    ropes: tuple[RopeConfig, ...]  # layers refer to them
    context_tokens: int  # most in a sequence
    attention_scale: float  # multiplies q·k
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False  # a logit per head that takes part in the softmax and has no value
    attention_softcap: float = 0.0  # 0: none
    logits_softcap: float = 0.0  # 0: none
    qk_norm: QkNorm = "none"
    norms: Norms = Norms()
    norm_offset: float = 0.0  # added to all norms' weights
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # to the dtype of the weights
    residual_multiplier: float = 1.0  # of what a layer adds
    logits_divisor: float = 1.0
    packs_qkv: bool = False  # one tensor in the checkpoint
    packs_gate_up: bool = False
    rope_is_interleaved: bool = False  # pairs are (2i, 2i + 1) in the checkpoint
    moe: Moe | None = None
    scheme: Scheme | None = None  # of quantised weights; None: plain ones, or a format of its own
    prefix: str = "model."  # of the decoder's tensors
    head: str = "lm_head"  # module

    @property
    def windows(self) -> tuple[int | None, ...]:
        """L values."""
        return tuple(layer.window for layer in self.layers)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """L values."""
        shape = AttentionShape(
            self.num_heads, self.num_kv_heads, self.head_dim, self.attention_scale, self.attention_softcap
        )
        return (shape,) * self.num_layers

    @property
    def kv_parts(self) -> tuple[KvPart, ...]:
        return group_layers(self.attention_shapes)

    @property
    def divisible(self) -> dict[str, int]:
        """What ranks divide: its name |-> size."""
        sizes = {"num_heads": self.num_heads, "vocab_size": self.vocab_size}
        if not all(layer.is_moe for layer in self.layers):
            sizes["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            sizes["moe_intermediate_size"] = self.moe.inner_size
        if self.moe is not None and self.moe.shared:
            sizes["shared experts' intermediate_size"] = self.moe.shared_size
        return sizes
