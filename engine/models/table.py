"""The weights of a decoder by the names of its fields: what each is called in a checkpoint, and how ranks divide it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from engine.models.config import LayerConfig, ModelConfig, Moe, MoeNorms
from engine.models.mixer_table import MixerTable, build_mixer
from engine.weights.table import Axis, Part, Product, Shard, Stored, Vector, Weight, module, packed, undivided
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
    shared_gate: Product | None
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
    mixer: MixerTable
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
    hidden, words = undivided(config.hidden_size), Axis(config.vocab_size)
    return ModelTable(
        embedding=Product((module(f"{config.prefix}embed_tokens", words),), hidden),
        token_inputs=_build_token_inputs(config) if config.token_input_size else None,
        layers=tuple(_build_layer(config, index) for index in range(config.num_layers)),
        final_norm=Vector(f"{config.prefix}{config.norms.final}.weight", hidden),
        lm_head=Product((module(config.head, words),), hidden),
    )


def _build_token_inputs(config: ModelConfig) -> TokenInputTable:
    name, size = f"{config.prefix}per_layer", config.token_input_size
    of_all = undivided(config.num_layers * size)
    return TokenInputTable(
        embedding=Product((module(f"{config.prefix}embed_tokens_per_layer", Axis(config.vocab_size)),), of_all),
        projection=Product((module(f"{name}_model_projection", of_all),), undivided(config.hidden_size)),
        norm=Vector(f"{name}_projection_norm.weight", undivided(size)),
    )


def _build_input_block(config: ModelConfig, prefix: str) -> InputBlockTable:
    hidden, own = undivided(config.hidden_size), undivided(config.token_input_size)
    return InputBlockTable(
        gate=Product((module(f"{prefix}per_layer_input_gate", own),), hidden),
        projection=Product((module(f"{prefix}per_layer_projection", hidden),), own),
        after=Vector(f"{prefix}post_per_layer_input_norm.weight", hidden),
    )


def _build_layer(config: ModelConfig, index: int) -> LayerTable:
    prefix, layer, hidden = f"{config.prefix}layers.{index}.", config.layers[index], undivided(config.hidden_size)
    names, moe = config.norms, config.moe if layer.is_moe else None

    def norm(name: str | None) -> Vector | None:
        return None if name is None else Vector(f"{prefix}{name}.weight", hidden)

    return LayerTable(
        before_attention=norm(names.before_attention),
        mixer=build_mixer(config, layer, prefix),
        after_attention=norm(names.after_attention),
        before_mlp=None if moe and moe.norms else norm(names.before_mlp),
        mlp=_build_moe(config, moe, prefix, layer)
        if moe
        else _build_mlp(config, prefix + config.mlp.module, layer.intermediate_size),
        after_mlp=norm(names.after_mlp),
        input_block=_build_input_block(config, prefix) if config.token_input_size else None,
        scale=Vector(f"{prefix}layer_scalar", undivided(1)) if config.has_layer_scale else None,
    )


def _build_mlp(config: ModelConfig, name: str, inner_size: int | None) -> MlpTable:
    hidden, inner = undivided(config.hidden_size), Axis(inner_size or config.intermediate_size)
    names, has_bias = config.mlp, config.has_mlp_bias
    if config.packs_gate_up:
        gate_up = packed(f"{name}.gate_up_proj", [inner, inner], has_bias)
    else:
        gate_up = tuple(module(f"{name}.{one}", inner, has_bias) for one in (names.gate, names.up))
    return MlpTable(Product(gate_up, hidden), Product((module(f"{name}.{names.down}", hidden, has_bias),), inner))


def _build_moe(config: ModelConfig, moe: Moe, prefix: str, layer: LayerConfig) -> MoeTable:
    hidden, of_all = undivided(config.hidden_size), undivided(moe.routing.num_experts)
    shared_size = moe.shared_size or layer.intermediate_size
    router = module(prefix + moe.router, of_all, moe.has_biases)
    return MoeTable(
        router=Product((router,), hidden),
        choice_bias=Vector(prefix + moe.choice_bias, of_all) if moe.choice_bias else None,
        expert_scale=Vector(prefix + moe.expert_scale, of_all) if moe.expert_scale else None,
        experts=tuple(_build_expert(config, moe, prefix, index) for index in range(moe.routing.num_experts)),
        shared=_build_mlp(config, prefix + moe.shared, shared_size) if moe.shared else None,
        shared_gate=Product((module(prefix + moe.shared_gate, undivided(1)),), hidden) if moe.shared_gate else None,
        norms=_build_moe_norms(config, moe.norms, prefix) if moe.norms else None,
    )


def _build_moe_norms(config: ModelConfig, names: MoeNorms, prefix: str) -> MoeNormTable:
    hidden = undivided(config.hidden_size)
    others = (config.norms.before_mlp, names.after_mlp, names.before_experts, names.after_experts)
    return MoeNormTable(
        Vector(prefix + names.router, hidden), *(Vector(f"{prefix}{name}.weight", hidden) for name in others)
    )


def _build_expert(config: ModelConfig, moe: Moe, prefix: str, index: int) -> MlpTable:
    hidden, inner, name = undivided(config.hidden_size), Axis(moe.inner_size), prefix + moe.experts
    if moe.layout in ("alternating", "stacked"):  # of all experts one tensor; alternating: transposed, with biases
        takes_turns = moe.layout == "alternating"  # gate and up rows; else all gate rows come first

        def stacked(product: str, rows: Axis) -> Part:
            return Part(
                f"{name}.{product}", rows, f"{name}.{product}_bias" if takes_turns else None, index=index,
                num_stacked=moe.routing.num_experts, is_transposed=takes_turns,
            )  # fmt: skip

        step, second = (2, 1) if takes_turns else (1, inner.size)
        both = replace(stacked("gate_up_proj", inner), num_stored=2 * inner.size, step=step)
        halves = [replace(both, first=first) for first in (0, second)]
        return MlpTable(Product(tuple(halves), hidden), Product((stacked("down_proj", hidden),), inner))
    gate_up = tuple(module(f"{name}.{index}.{one}", inner) for one in (config.mlp.gate, config.mlp.up))
    down = module(f"{name}.{index}.{config.mlp.down}", hidden)
    return MlpTable(Product(gate_up, hidden), Product((down,), inner))


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
        recurrent=config.recurrent and config.recurrent.divide(size),
    )
