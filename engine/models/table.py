"""The weights of a decoder by the names of its fields: what each is called in a checkpoint, and how ranks divide it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from engine.models.config import ModelConfig
from engine.weights.table import Axis, Part, Product, Shard, Stored, Vector, Weight
from wire.kv_layout import can_divide, heads_of

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class LayerTable:
    """See decoder.DecoderLayer."""

    input_norm: Vector
    qkv_proj: Product
    q_norm: Vector | None
    k_norm: Vector | None
    o_proj: Product
    mlp_norm: Vector
    gate_up_proj: Product
    down_proj: Product


@dataclass(frozen=True, slots=True)
class ModelTable:
    """All weights of a model."""

    embedding: Product
    layers: tuple[LayerTable, ...]
    final_norm: Vector
    lm_head: Product  # also of a tied model, whose checkpoint may lack it

    def stored(self) -> Iterator[Stored]:
        """The tensors that a checkpoint has to have."""
        weights: list[Weight | None] = [self.embedding, self.final_norm, self.lm_head]
        for layer in self.layers:
            weights += [getattr(layer, field.name) for field in fields(layer)]
        for weight in weights:
            if weight is not None:
                yield from weight.stored()


def build_table(config: ModelConfig) -> ModelTable:
    """config: of the whole model."""
    hidden, words = _whole(config.hidden_size), Axis(config.vocab_size)
    return ModelTable(
        embedding=Product((Part(EMBEDDING, words),), hidden),
        layers=tuple(_build_layer(config, f"model.layers.{index}.") for index in range(config.num_layers)),
        final_norm=Vector("model.norm.weight", hidden),
        lm_head=Product((Part(HEAD, words),), hidden),
    )


def _build_layer(config: ModelConfig, prefix: str) -> LayerTable:
    hidden, inner = _whole(config.hidden_size), Axis(config.intermediate_size)
    queries, keys = Axis(config.num_heads, config.head_dim), Axis(config.num_kv_heads, config.head_dim)

    def product(module: str, inputs: Axis, has_bias: bool, **outputs: Axis) -> Product:
        parts = (Part(f"{prefix}{module}.{name}", rows) for name, rows in outputs.items())
        return Product(tuple(parts), inputs, has_bias)

    def norm(name: str, axis: Axis = hidden) -> Vector:
        return Vector(f"{prefix}{name}.weight", axis)

    head = _whole(config.head_dim)
    return LayerTable(
        input_norm=norm("input_layernorm"),
        qkv_proj=product("self_attn", hidden, config.has_qkv_bias, q_proj=queries, k_proj=keys, v_proj=keys),
        q_norm=norm("self_attn.q_norm", head) if config.has_qk_norm else None,
        k_norm=norm("self_attn.k_norm", head) if config.has_qk_norm else None,
        o_proj=product("self_attn", queries, config.has_output_bias, o_proj=hidden),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up_proj=product("mlp", hidden, config.has_mlp_bias, gate_proj=inner, up_proj=inner),
        down_proj=product("mlp", inner, config.has_mlp_bias, down_proj=hidden),
    )


def _whole(size: int) -> Axis:
    """An axis that each rank has whole."""
    return Axis(size, is_divided=False)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as one rank computes it; its vocabulary stays whole. ValueError names what cannot be divided."""
    size = shard.size
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % size:
            raise ValueError(f"{size} ranks do not divide {name} {getattr(config, name)}: set --tp to a divisor of it")
    if not can_divide(config.num_kv_heads, size):
        raise ValueError(
            f"{size} ranks and {config.num_kv_heads} KV heads: set --tp to a divisor or a multiple of them"
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=len(heads_of(config.num_kv_heads, shard.rank, size)),
        intermediate_size=config.intermediate_size // size,
    )
