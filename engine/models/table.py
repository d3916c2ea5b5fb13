"""The weights of a decoder by the names of its fields: what each is called in a checkpoint, and how ranks divide it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from engine.layers.rope_config import rope_order
from engine.models.config import LayerConfig, ModelConfig, Moe, MoeNorms
from engine.weights.table import Axis, Part, Product, Shard, Stored, Vector, Weight, module, packed
from wire.kv_layout import can_divide, heads_of


@dataclass(frozen=True, slots=True)
class MlpTable:
    """gate and up as one product, then down."""

    gate_up_proj: Product
    down_proj: Product


@dataclass(frozen=True, slots=True)
class MoeTable:
    """See layers.moe.MixtureOfExperts."""

    router: Product
    choice_bias: Vector | None
    expert_scale: Vector | None
    experts: tuple[MlpTable, ...]
    shared: MlpTable | None
    norms: "MoeNormTable | None"


@dataclass(frozen=True, slots=True)
class MoeNormTable:
    """See config.MoeNorms."""

    router: Vector
    before_mlp: Vector
    after_mlp: Vector
    before_experts: Vector
    after_experts: Vector


@dataclass(frozen=True, slots=True)
class TokenInputTable:
    """See layers.token_inputs.TokenInputs."""

    embedding: Product
    projection: Product
    norm: Vector


@dataclass(frozen=True, slots=True)
class InputBlockTable:
    """See layers.token_inputs.InputBlock."""

    gate: Product
    projection: Product
    after: Vector


@dataclass(frozen=True, slots=True)
class LayerTable:
    """See decoder.DecoderLayer."""

    before_attention: Vector | None
    qkv_proj: Product
    q_norm: Vector | None
    k_norm: Vector | None
    sinks: Vector | None
    o_proj: Product
    after_attention: Vector | None
    before_mlp: Vector | None
    mlp: MlpTable | MoeTable
    after_mlp: Vector | None
    input_block: InputBlockTable | None
    scale: Vector | None


@dataclass(frozen=True, slots=True)
class ModelTable:
    """All weights of a model."""

    embedding: Product
    token_inputs: TokenInputTable | None
    layers: tuple[LayerTable, ...]
    final_norm: Vector
    lm_head: Product  # also of a tied model, whose checkpoint may lack it

    def stored(self) -> Iterator[Stored]:
        """The tensors that a checkpoint has to have. One that several parts share comes several times."""
        for weight in list_weights(self):
            yield from weight.stored()


def list_weights(table: object) -> Iterator[Weight]:
    """All weights in a table or a part of one."""
    if isinstance(table, Vector | Product):
        yield table
    elif isinstance(table, tuple):
        for one in table:
            yield from list_weights(one)
    elif table is not None:
        for field in fields(table):  # type: ignore[arg-type]
            yield from list_weights(getattr(table, field.name))


def build_table(config: ModelConfig) -> ModelTable:
    """config: of the whole model."""
    hidden, words = _whole(config.hidden_size), Axis(config.vocab_size)
    return ModelTable(
        embedding=Product((module(f"{config.prefix}embed_tokens", words),), hidden),
        token_inputs=_build_token_inputs(config) if config.token_input_size else None,
        layers=tuple(_build_layer(config, index) for index in range(config.num_layers)),
        final_norm=Vector(f"{config.prefix}norm.weight", hidden),
        lm_head=Product((module(config.head, words),), hidden),
    )


def _build_token_inputs(config: ModelConfig) -> TokenInputTable:
    name, size = f"{config.prefix}per_layer", config.token_input_size
    of_all = _whole(config.num_layers * size)
    return TokenInputTable(
        embedding=Product((module(f"{config.prefix}embed_tokens_per_layer", Axis(config.vocab_size)),), of_all),
        projection=Product((module(f"{name}_model_projection", of_all),), _whole(config.hidden_size)),
        norm=Vector(f"{name}_projection_norm.weight", _whole(size)),
    )


def _build_input_block(config: ModelConfig, prefix: str) -> InputBlockTable:
    hidden, own = _whole(config.hidden_size), _whole(config.token_input_size)
    return InputBlockTable(
        gate=Product((module(f"{prefix}per_layer_input_gate", own),), hidden),
        projection=Product((module(f"{prefix}per_layer_projection", hidden),), own),
        after=Vector(f"{prefix}post_per_layer_input_norm.weight", hidden),
    )


def _build_layer(config: ModelConfig, index: int) -> LayerTable:
    prefix, layer, hidden = f"{config.prefix}layers.{index}.", config.layers[index], _whole(config.hidden_size)
    rope, shape = config.ropes[layer.rope or 0], config.shape_of(layer)
    order = rope_order(rope.rotated_dims, shape.head_dim, is_interleaved=config.rope_is_interleaved)
    queries = Axis(shape.num_heads, shape.head_dim, order=order)
    keys = Axis(shape.num_kv_heads, shape.head_dim, order=order)
    values, attended = replace(keys, order=()), replace(queries, order=())
    norm_axes = [queries, keys] if config.qk_norm == "width" else [_whole(shape.head_dim, order)] * 2
    names, moe = config.norms, config.moe if layer.is_moe else None

    def norm(name: str | None, axis: Axis = hidden) -> Vector | None:
        return None if name is None else Vector(f"{prefix}{name}.weight", axis)

    attention, has_bias = f"{prefix}self_attn.", config.has_qkv_bias
    if config.packs_qkv:
        qkv = packed(f"{attention}qkv_proj", [queries, keys, values], has_bias)
    else:
        axes = {"q_proj": queries, "k_proj": keys, "v_proj": values}
        num_parts = 1 if layer.kv_layer is not None else 3 if layer.has_values else 2
        qkv = tuple(module(attention + name, rows, has_bias) for name, rows in [*axes.items()][:num_parts])
    q_norm, k_norm = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm != "none" else (None, None)
    if layer.kv_layer is not None:
        k_norm = None
    return LayerTable(
        before_attention=norm(names.before_attention),
        qkv_proj=Product(qkv, hidden),
        q_norm=norm(q_norm, norm_axes[0]),
        k_norm=norm(k_norm, norm_axes[1]),
        sinks=Vector(f"{attention}sinks", Axis(config.num_heads)) if config.has_sinks else None,
        o_proj=Product((module(f"{attention}o_proj", hidden, config.has_output_bias),), attended),
        after_attention=norm(names.after_attention),
        before_mlp=None if moe and moe.norms else norm(names.before_mlp),
        mlp=_build_moe(config, moe, prefix, layer)
        if moe
        else _build_mlp(config, prefix, inner_size=layer.intermediate_size),
        after_mlp=norm(names.after_mlp),
        input_block=_build_input_block(config, prefix) if config.token_input_size else None,
        scale=Vector(f"{prefix}layer_scalar", _whole(1)) if config.has_layer_scale else None,
    )


def _build_mlp(config: ModelConfig, prefix: str, name: str = "mlp", inner_size: int | None = None) -> MlpTable:
    hidden, inner = _whole(config.hidden_size), Axis(inner_size or config.intermediate_size)
    has_bias = config.has_mlp_bias
    if config.packs_gate_up:
        gate_up = packed(f"{prefix}{name}.gate_up_proj", [inner, inner], has_bias)
    else:
        gate_up = tuple(module(f"{prefix}{name}.{one}", inner, has_bias) for one in ("gate_proj", "up_proj"))
    return MlpTable(Product(gate_up, hidden), Product((module(f"{prefix}{name}.down_proj", hidden, has_bias),), inner))


def _build_moe(config: ModelConfig, moe: Moe, prefix: str, layer: LayerConfig) -> MoeTable:
    hidden, of_all = _whole(config.hidden_size), _whole(moe.routing.num_experts)
    shared_size = moe.shared_size or layer.intermediate_size
    router = module(prefix + moe.router, of_all, moe.has_biases)
    return MoeTable(
        router=Product((router,), hidden),
        choice_bias=Vector(prefix + moe.choice_bias, of_all) if moe.choice_bias else None,
        expert_scale=Vector(prefix + moe.expert_scale, of_all) if moe.expert_scale else None,
        experts=tuple(_build_expert(config, moe, prefix, index) for index in range(moe.routing.num_experts)),
        shared=_build_mlp(config, prefix, moe.shared, shared_size) if moe.shared else None,
        norms=_build_moe_norms(config, moe.norms, prefix) if moe.norms else None,
    )


def _build_moe_norms(config: ModelConfig, names: MoeNorms, prefix: str) -> MoeNormTable:
    hidden = _whole(config.hidden_size)
    others = (config.norms.before_mlp, names.after_mlp, names.before_experts, names.after_experts)
    return MoeNormTable(
        Vector(prefix + names.router, hidden), *(Vector(f"{prefix}{name}.weight", hidden) for name in others)
    )


def _build_expert(config: ModelConfig, moe: Moe, prefix: str, index: int) -> MlpTable:
    hidden, inner, name = _whole(config.hidden_size), Axis(moe.inner_size), prefix + moe.experts
    if moe.layout in ("alternating", "stacked"):  # of all experts one tensor; alternating: transposed, with biases
        takes_turns = moe.layout == "alternating"  # gate and up rows; else all gate rows come first

        def stacked(product: str, rows: Axis, **where: int) -> Part:
            return Part(
                f"{name}.{product}", rows, f"{name}.{product}_bias" if takes_turns else None, index=index,
                num_stacked=moe.routing.num_experts, is_transposed=takes_turns, **where,
            )  # fmt: skip

        step, second = (2, 1) if takes_turns else (1, inner.size)
        halves = [
            stacked("gate_up_proj", inner, num_stored=2 * inner.size, first=first, step=step) for first in (0, second)
        ]
        return MlpTable(Product(tuple(halves), hidden), Product((stacked("down_proj", hidden),), inner))
    gate, up, down = ("w1", "w3", "w2") if moe.layout == "w1w2w3" else ("gate_proj", "up_proj", "down_proj")
    gate_up = tuple(module(f"{name}.{index}.{one}", inner) for one in (gate, up))
    return MlpTable(Product(gate_up, hidden), Product((module(f"{name}.{index}.{down}", hidden),), inner))


def _whole(size: int, order: tuple[int, ...] = ()) -> Axis:
    """An axis that each rank has whole, as one unit."""
    return Axis(1, size, is_divided=False, order=order)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as one rank computes it; its vocabulary stays whole. ValueError names what cannot be divided."""
    size = shard.size
    for name, count in config.divisible.items():
        if count % size:
            raise ValueError(f"{size} ranks do not divide {name} {count}: set --tp to a divisor of it")
    for count in (config.num_kv_heads, *(shape.num_kv_heads for shape in config.attention_shapes)):
        if not can_divide(count, size):
            raise ValueError(f"{size} ranks and {count} KV heads: set --tp to a divisor or a multiple of them")

    def own(num_kv_heads: int) -> int:
        return len(heads_of(num_kv_heads, shard.rank, size))

    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=own(config.num_kv_heads),
        layers=tuple(
            replace(
                layer,
                num_kv_heads=layer.num_kv_heads and own(layer.num_kv_heads),
                intermediate_size=layer.intermediate_size and layer.intermediate_size // size,
            )
            for layer in config.layers
        ),
        intermediate_size=config.intermediate_size // size,
    )
