"""A model as one frozen value: all that its tensors and its order of operations depend on. Imports no torch."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from engine.attention.shape import AttentionShape, group_layers
from engine.json_values import Json
from engine.layer_config import Activation, ImageAttention, RopeConfig
from wire.kv_layout import KvPart, StatePart

QkNorm = Literal["none", "head", "width"]  # over each head of query and key, or over all heads together


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of norms in a checkpoint, all but the last of a layer's; None: the layer has none there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    final: str = "norm"


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names in a checkpoint: a layer's module, and its products, which are those of its experts too."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ConfigPart:
    """A family's settings of which the core knows nothing: a satellite's data, and what the core asks of it."""

    __slots__ = ()

    @property
    def has_mlp(self) -> bool:
        """Whether its layers have a dense MLP, too."""
        return False

    @property
    def divisible(self) -> dict[str, int]:
        """Sizes that ranks divide: name |-> size."""
        return {}

    def divide(self, size: int) -> Self:
        """The settings of one of `size` ranks."""
        return self

    def state_parts(self, num_layers: int) -> tuple[StatePart, ...]:
        """The states that so many layers keep of a sequence."""
        return ()

    def shape(self, own: AttentionShape) -> AttentionShape:
        """Shape of attention where pages do not keep heads. own: its shape with heads."""
        return own

    def as_stored(self, names: Collection[str]) -> Self:
        """As a checkpoint with tensors of these names has it."""
        return self

    def add_weights(self, layer: Any) -> None:
        """Name the weights of its part of a layer, in a `table.LayerTable`."""

    def complete(self, model: "ModelConfig", table: Any) -> Any:
        """A `table.Table` of the model with the weights that it has once."""
        return table

    def check_size(self, model: "ModelConfig", num_bytes: int) -> None:
        """ValueError if a checkpoint of so many bytes cannot be of such a model."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Settings that may differ from layer to layer."""

    window: int | None = None  # tokens a query sees, itself included; None: all of them
    rope: int | None = 0  # index in ModelConfig.ropes; None: no rotation
    is_moe: bool = False
    num_kv_heads: int | None = None  # None: the model's, also below
    head_dim: int | None = None
    intermediate_size: int | None = None
    has_values: bool = True  # False: keys, before their norm and rotation, are the values too
    kv_layer: int | None = None  # the earlier layer whose keys and values this one reads; None: it has its own
    has_attention: bool = True  # False: it is what `ModelConfig.recurrent` says


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
    has_v_norm: bool = False  # over each head of values, without weights
    has_output_gate: bool = False  # q_proj gives each head a gate too, whose sigmoid multiplies what is attended
    recurrent: ConfigPart | None = None  # in the place of attention; None: all layers have it
    token_kv: ConfigPart | None = None  # None: keys and values of heads; else head_dim is what ropes turn
    norms: Norms = Norms()
    mlp: MlpNames = MlpNames()
    output_module: str = "o_proj"  # after attention
    norm_offset: float = 0.0  # added to all norms' weights
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # to the dtype of the weights
    residual_multiplier: float = 1.0  # of what a layer adds
    has_layer_scale: bool = False  # a number per layer that multiplies what leaves it
    token_inputs: ConfigPart | None = None  # what each layer is given of each token beside the hidden row
    logits_divisor: float = 1.0
    packs_qkv: bool = False  # one tensor in the checkpoint
    packs_gate_up: bool = False
    rope_is_interleaved: bool = False  # pairs are (2i, 2i + 1) in the checkpoint
    moe: ConfigPart | None = None  # in the place of MLPs, or beside them
    quantization: Json | None = None  # what the file says of quantised weights; None: plain, or a format of its own
    prefix: str = "model."  # of the decoder's tensors
    head: str = "lm_head"  # module
    draft_head: ConfigPart | None = None  # of a draft head
    whole: str | None = None  # model_type of a model with other parts, whose language model this is
    image_token: int | None = None  # its rows come from an encoding; None: the model takes no images
    image_attention: ImageAttention = "causal"
    pad_token: int = 0  # of which layers are given what they are given of tokens, in the place of an image's

    def within(self, context_tokens: int) -> "ModelConfig":
        """For sequences of at most so many tokens; 0: the model's own limit."""
        context = min(self.context_tokens, context_tokens or self.context_tokens)
        return replace(self, context_tokens=context, ropes=tuple(rope.within(context) for rope in self.ropes))

    @property
    def counts_rows(self) -> bool:
        """Whether an image's tokens have positions by row and column (M-RoPE)."""
        return any(rope.axes for rope in self.ropes)

    @property
    def kv_layers(self) -> tuple[LayerConfig, ...]:
        """Those with keys and values of their own."""
        return tuple(layer for layer in self.layers if layer.has_attention and layer.kv_layer is None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of kv_layers, in their order."""
        return tuple(layer.window for layer in self.kv_layers)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Shapes of kv_layers, in their order."""
        return tuple(map(self.shape_of, self.kv_layers))

    def shape_of(self, layer: LayerConfig) -> AttentionShape:
        num_kv_heads, head_dim = layer.num_kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim
        own = AttentionShape(self.num_heads, num_kv_heads, head_dim, self.attention_scale, self.attention_softcap)
        return own if self.token_kv is None else self.token_kv.shape(own)

    def find_places(self) -> list[int]:
        """Each layer's index in the pool: of its keys and values or, without attention, of its state."""
        places: list[int] = []
        for index, layer in enumerate(self.layers):
            before = self.layers[:index]
            alike = [one for one in before if one.kv_layer is None and one.has_attention == layer.has_attention]
            places.append(len(alike) if layer.kv_layer is None else places[layer.kv_layer])
        return places

    @property
    def kv_parts(self) -> tuple[KvPart, ...]:
        return group_layers(self.attention_shapes)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The states that layers without attention keep of a sequence; empty if there are none."""
        num_layers = sum(not layer.has_attention for layer in self.layers)
        return self.recurrent.state_parts(num_layers) if self.recurrent else ()

    @property
    def divisible(self) -> dict[str, int]:
        """Sizes that ranks divide: name |-> size."""
        sizes = {"num_heads": self.num_heads, "vocab_size": self.vocab_size}
        if not all(layer.is_moe for layer in self.layers) or (self.moe and self.moe.has_mlp):
            sizes["intermediate_size"] = self.intermediate_size
        for part in (self.draft_head, self.moe, self.recurrent):
            sizes |= part.divisible if part else {}
        return sizes
