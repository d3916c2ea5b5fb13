"""A model as one frozen value: all that its tensors and its order of operations depend on. Imports no torch."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from engine.attention.shape import AttentionShape, group_layers
from engine.json_values import Json
from engine.layer_config import Activation, ImageAttention, Recurrent, RopeConfig, Routing
from engine.weights.table import Product, Vector
from wire.kv_layout import KvPart, StatePart

QkNorm = Literal["none", "head", "width"]  # over each head of query and key, or over all heads together
ExpertLayout = Literal["per_expert", "alternating", "stacked"]  # in a checkpoint, see models/table.py


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


@dataclass(frozen=True, slots=True)
class MoeNorms:
    """Names of the norms where experts and a dense MLP take the same rows, each with norms of its own (Gemma 4)."""

    router: str  # tensor; times H ** -0.5, it is the weight of a norm
    after_mlp: str
    before_experts: str
    after_experts: str


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts in the place of MLPs, or beside them. Modules: names below the layer's."""

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
    shared_gate: str | None = None  # module of a product with one output, whose sigmoid multiplies what the MLP gives
    expert_scale: str | None = None  # tensor; multiplies the weights of the chosen experts
    norms: MoeNorms | None = None  # given: the shared MLP is the layer's own


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What makes a decoder of one layer a draft head. Its row at position i is of the model's hidden rows there and of
    the token after it, and predicts the token after that."""

    kind: Literal["eagle3", "mtp"]  # the layer's attention takes both side by side; or their product is the layer's row
    taps: tuple[int, ...]  # the model's layers whose input it takes; the number of its layers: the last rows, normed
    tap_size: int  # of one such row
    vocab_size: int  # of its own lm_head
    norm_before_fc: bool = False  # one norm of all taps together
    fc_norm: bool = False  # a norm of each tap
    norm_before_residual: bool = False
    norm_output: bool = False  # drafts go on from normed rows


class TokenKv(Protocol):
    """What a token's KV is where a layer's first product is not its heads: see `LayerParts.build_projection`."""

    def shape(self, num_heads: int, scale: float) -> AttentionShape:
        """For so many query heads."""
        ...

    def weights(
        self, name: str, num_heads: int, hidden_size: int, *, has_bias: bool
    ) -> tuple[dict[str, Product], dict[str, Vector]]:
        """Of one layer, qkv_proj among them. name: of the module."""
        ...


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

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
    recurrent: Recurrent | None = None  # in the place of attention; None: all layers have it
    token_kv: TokenKv | None = None  # None: keys and values of heads; else head_dim is what ropes turn
    norms: Norms = Norms()
    mlp: MlpNames = MlpNames()
    output_module: str = "o_proj"  # after attention
    norm_offset: float = 0.0  # added to all norms' weights
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # to the dtype of the weights
    residual_multiplier: float = 1.0  # of what a layer adds
    has_layer_scale: bool = False  # a number per layer that multiplies what leaves it
    token_input_size: int = 0  # P, of what each layer is given of each token beside the hidden row; 0: nothing
    logits_divisor: float = 1.0
    packs_qkv: bool = False  # one tensor in the checkpoint
    packs_gate_up: bool = False
    rope_is_interleaved: bool = False  # pairs are (2i, 2i + 1) in the checkpoint
    moe: Moe | None = None
    quantization: Json | None = None  # what the file says of quantised weights; None: plain, or a format of its own
    prefix: str = "model."  # of the decoder's tensors
    head: str = "lm_head"  # module
    draft_head: DraftHead | None = None  # of a draft head
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
        """Of kv_layers."""
        return tuple(layer.window for layer in self.kv_layers)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Of kv_layers."""
        return tuple(map(self.shape_of, self.kv_layers))

    def shape_of(self, layer: LayerConfig) -> AttentionShape:
        if self.token_kv is not None:
            return self.token_kv.shape(self.num_heads, self.attention_scale)
        num_kv_heads, head_dim = layer.num_kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim
        return AttentionShape(self.num_heads, num_kv_heads, head_dim, self.attention_scale, self.attention_softcap)

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
        """What layers without attention keep of a sequence; empty if there are none."""
        num_layers = sum(not layer.has_attention for layer in self.layers)
        return self.recurrent.state_parts(num_layers) if self.recurrent else ()

    @property
    def divisible(self) -> dict[str, int]:
        """What ranks divide: its name |-> size."""
        sizes = {"num_heads": self.num_heads, "vocab_size": self.vocab_size}
        if self.draft_head is not None:
            sizes["draft_vocab_size"] = self.draft_head.vocab_size
        if not all(layer.is_moe for layer in self.layers) or (self.moe and self.moe.norms):
            sizes["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            sizes["moe_intermediate_size"] = self.moe.inner_size
        if self.moe is not None and self.moe.shared_size:
            sizes["shared experts' intermediate_size"] = self.moe.shared_size
        return sizes | (self.recurrent.divisible if self.recurrent else {})


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
